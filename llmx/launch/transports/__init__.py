"""How ranks are started on hosts: one small class for each transport, behind one interface.

``local``: this machine; ``pdsh``: ssh to every host in parallel; ``openmpi``: ``mpirun``;
``slurm``: ``srun``. Each renders the argv and the environment of ``deepspeed`` from a
``LaunchSpec`` alone.

``python -m llmx launch.transport=openmpi hardware=a100x2_v100x2 dry_run=true`` shows it.
"""

from __future__ import annotations

from llmx.launch.transports.base import Transport
from llmx.launch.transports.local import LocalTransport
from llmx.launch.transports.openmpi import OpenMpiTransport
from llmx.launch.transports.pdsh import PdshTransport
from llmx.launch.transports.slurm import SlurmTransport

__all__ = [
    "TRANSPORTS",
    "LocalTransport",
    "OpenMpiTransport",
    "PdshTransport",
    "SlurmTransport",
    "Transport",
    "transport_of",
]

TRANSPORTS: dict[str, Transport] = {
    transport.name: transport
    for transport in (LocalTransport(), PdshTransport(), OpenMpiTransport(), SlurmTransport())
}


def transport_of(name: str) -> Transport:
    """The transport of ``plan.transport``."""
    return TRANSPORTS[name]
