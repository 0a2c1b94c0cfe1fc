"""Probes the network between the hosts of a run, before a rank starts.

Every host connects to every other one on a fresh port of the address that its ranks will use, and
exchanges one byte, then 64 KiB in each direction. Ranks that meet a firewall, a wrong MTU or a
missing route wait in their first collective, for hours and without a message.

``launch.probe=false`` leaves it out; ``python -m llmx doctor`` runs it alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmx.config.validate import RESERVED
from llmx.errors import LaunchError
from llmx.launch.agents.connection import AgentError, Connection, request_all
from llmx.launch.environment import gpus_of_hosts, rank_env
from llmx.launch.spec import LaunchSpec
from llmx.plan.types import HostPlan
from llmx.text import plural

SIZE = 1 << 16
"""Bytes in each direction: more than the packets of any MTU, and than what a host sends before an
answer."""
ALL_REDUCE = Path(__file__).with_name("all_reduce.py")
MEGABYTES = 64
"""Size of an all-reduce that is timed."""
TIMEOUT_S = 4.0
"""Time-out of each step. The kernel repeats a lost SYN after 1 s and after 3 s."""
NAMES = 3
"""Hosts that one line lists."""
RENDEZVOUS = "rendezvous"
"""The peer of a probe that is no host but the port where ranks meet."""


@dataclass(frozen=True)
class Node:
    """Where the ranks of one host listen."""

    name: str
    interface: str | None = None
    address: str = ""
    mtu: int = 0
    ports: tuple[int, int] = (32768, 60999)
    """The range from which the kernel takes a port for a rank that asks for any."""


@dataclass(frozen=True)
class Fault:
    """A connection that does not work."""

    source: str
    target: str
    address: str
    port: int
    stage: str
    """The step that failed: ``connect``, ``byte``, ``send`` or ``receive``."""
    error: str
    """The name of the error, e.g. ``ETIMEDOUT``."""


@dataclass
class Mesh:
    """The hosts of a run as their agents found them, and the connections between them."""

    nodes: dict[str, Node] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    unmet: list[Fault] = field(default_factory=list)
    """Hosts that do not reach the rendezvous."""
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    """(source, target) -> what an answer takes, where all steps pass."""


def find_nodes(
    hosts: Sequence[HostPlan], connections: Sequence[Connection], *, to: str = ""
) -> dict[str, Node]:
    """The interface and address that ranks use on each host: as configured, else on the route to
    another host, or to the address ``to``.

    Raises:
        LaunchError: an interface is not there or has no address, or there is no route.
    """
    used = [connection for connection in connections if connection.hosts]

    def request(connection: Connection) -> dict[str, Any]:
        index = connection.hosts[0]
        address = to or next(host.address for at, host in enumerate(hosts) if at != index)
        return {"interface": hosts[index].interface, "to": address}

    nodes, problems = {}, []
    for connection, reply in request_all(used, "network", timeout_s=30, message=request):
        host = hosts[connection.hosts[0]]
        if isinstance(reply, AgentError):
            problems.append(
                f"{host.name}: has no route to {request(connection)['to']} ({reply}). Set the "
                "address of the host to one that the other hosts can reach."
            )
        elif not reply["address"]:
            problems.append(_interface_problem(host, reply["interfaces"]))
        else:
            first, last = reply["ports"] or (32768, 60999)
            nodes[host.name] = Node(
                host.name,
                reply["interface"],
                reply["address"],
                reply["mtu"],
                (int(first), int(last)),
            )
    if problems:
        raise LaunchError("\n".join(problems))
    return nodes


def _interface_problem(host: HostPlan, interfaces: Mapping[str, Sequence[str]]) -> str:
    """An interface that no rank can use."""
    with_address = [
        f"{name} ({addresses[0]})" for name, addresses in interfaces.items() if addresses
    ]
    problem = "has no address" if host.interface in interfaces else "is not there, or is down"
    suitable = [name for name, listed in interfaces.items() if host.address in listed]
    instead = suitable[0] if suitable else "one of them"
    return (
        f"{host.name}: interface={host.interface} {problem}. Interfaces with an address: "
        f"{', '.join(with_address) or 'none'}. Set interface of this host to {instead}, or leave "
        "it out: then it is the one on the route to the other hosts."
    )


def probe_mesh(
    nodes: Mapping[str, Node],
    connections: Sequence[Connection],
    *,
    port: int,
    rendezvous: Callable[[int], tuple[str, int]],
    pairs: bool = True,
) -> Mesh:
    """Connect every host to every other one, and to the rendezvous, all at once.

    ``port``: on which the first host listens for it, 0 for none; ``rendezvous``: where it is for a
    host; ``pairs``: false connects to the rendezvous alone.

    Raises:
        LaunchError: a host cannot listen.
    """
    mesh = Mesh(dict(nodes))
    used = [connection for connection in connections if connection.name in nodes]
    with _listening(nodes, used, port) as (ports, token):

        def peers(connection: Connection) -> dict[str, Any]:
            listed = [(RENDEZVOUS, *rendezvous(connection.hosts[0]))] if port else []
            if pairs:
                listed += [
                    (name, nodes[name].address, fresh_port)
                    for name, fresh_port in ports.items()
                    if name != connection.name
                ]
            return {"peers": listed, "token": token, "size": SIZE, "timeout_s": TIMEOUT_S}

        # Of many hosts not all connections of one are tried at once.
        limit_s = 4 * TIMEOUT_S * (1 + len(nodes) // 64) + 30
        for connection, reply in request_all(used, "probe", timeout_s=limit_s, message=peers):
            if isinstance(reply, AgentError):
                raise LaunchError(f"{connection.name}: cannot probe the other hosts: {reply}")
            for name, address, peer_port in peers(connection)["peers"]:
                result = reply["results"][name]
                fault = Fault(
                    connection.name, name, address, peer_port, result["stage"], result["error"]
                )
                if not fault.stage:
                    mesh.seconds[connection.name, name] = result["seconds"]
                elif name == RENDEZVOUS:
                    mesh.unmet.append(fault)
                else:
                    mesh.faults.append(fault)
    return mesh


@contextlib.contextmanager
def _listening(
    nodes: Mapping[str, Node],
    connections: Sequence[Connection],
    rendezvous_port: int,
) -> Iterator[tuple[dict[str, int], str]]:
    """Every host answers probes in the block; host -> its fresh port, and the token of probes."""
    token = secrets.token_hex(8)
    ports: dict[str, int] = {}

    def listen(connection: Connection) -> dict[str, Any]:
        port = rendezvous_port if 0 in connection.hosts else 0
        return {"address": nodes[connection.name].address, "port": port, "token": token}

    try:
        for connection, reply in request_all(connections, "listen", timeout_s=30, message=listen):
            if isinstance(reply, AgentError):
                raise LaunchError(
                    f"{connection.name}: cannot listen on {nodes[connection.name].address}: {reply}"
                )
            ports[connection.name] = reply["port"]
        yield ports, token
    finally:
        # Waited for: ranks listen on the same port.
        alive = [connection for connection in connections if connection.lost_at is None]
        list(request_all(alive, "listen", timeout_s=10, message=lambda _: {"address": ""}))


@dataclass(frozen=True)
class AllReduce:
    """Ranks that met as those of a training do, and what an all-reduce of them takes."""

    world: int
    connect_s: float
    latency_s: float
    """Seconds of an all-reduce of 8 bytes."""
    seconds: float
    """Seconds of an all-reduce of ``MEGABYTES``."""

    @property
    def gbit_per_s(self) -> float:
        """The rate at which a ring of them sends and receives: ``2 (n - 1) / n`` times the data."""
        return 2 * (self.world - 1) / self.world * MEGABYTES * 8e-3 / self.seconds


def measure_all_reduce(
    spec: LaunchSpec,
    nodes: Mapping[str, Node],
    connections: Sequence[Connection],
) -> AllReduce:
    """Start a rank for each slot on its host (NCCL on GPUs, else gloo), and time all-reduces.

    Raises:
        LaunchError: a rank failed, with its last line.
    """
    plan, source = spec.plan, ALL_REDUCE.read_text(encoding="utf-8")
    gpus = gpus_of_hosts(spec)

    def request(connection: Connection) -> dict[str, Any]:
        name, index = connection.name, connection.hosts[0]
        env = {k: v for k, v in rank_env(spec, index).items() if k not in RESERVED}
        if name in nodes and (interface := nodes[name].interface):
            env |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        if name in gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[name])
        ranks = [rank.rank for rank in plan.ranks if rank.host in connection.hosts]
        backend = "nccl" if plan.on_gpus else "gloo"
        words = {
            "master": spec.rendezvous(index), "ranks": ranks, "world": plan.world_size,
            "backend": backend, "megabytes": MEGABYTES, "env": env, "source": source,
        }  # fmt: skip
        return {
            "python": spec.python_on(index), "program": source, "arguments": [json.dumps(words)],
        }  # fmt: skip

    used = [connection for connection in connections if connection.hosts]
    results: dict[str, dict[str, float]] = {}
    problems = []
    for connection, reply in request_all(used, "survey", timeout_s=180, message=request):
        error = str(reply) if isinstance(reply, AgentError) else reply["facts"].get("error")
        if error or isinstance(reply, AgentError):
            problems.append(f"{connection.name}: ranks do not reduce together: {error}")
        else:
            results[connection.name] = reply["facts"]
    if problems:
        raise LaunchError("\n".join(problems))
    # The slowest counts: all wait for it.
    slowest = {key: max(result[key] for result in results.values()) for key in _TIMES}
    return AllReduce(plan.world_size, **slowest)


_TIMES = ("connect_s", "latency_s", "seconds")
_ERRORS = {
    "ETIMEDOUT": "no answer",
    "ECONNREFUSED": "refused",
    "EHOSTUNREACH": "no route to the host",
    "ENETUNREACH": "no route to its network",
    "ECONNRESET": "the connection was closed",
    "EPROTO": "another program answers",
    "gaierror": "its name has no address",
}
_SYMPTOMS = {
    "connect": "no connection",
    "byte": "a connection opens, but one byte does not pass",
    "send": "a connection opens and one byte passes both ways, but 64 KiB sent there do not arrive",
    "receive": "a connection opens and one byte passes both ways, but 64 KiB sent back do not "
    "arrive",
}
"""Stage of a fault -> what is seen of it."""
_OTHER_NETWORK = "set address and interface of the hosts to a network that connects all of them."


def mesh_problems(mesh: Mesh) -> list[str]:
    """A sentence for each connection that fails (alike ones to a host together), then the likely
    causes with their fixes, each once. Pure."""
    first = next(iter(mesh.nodes), "")
    # A rendezvous that is reached loses what the other connections to its host lose.
    reached = [fault for fault in mesh.unmet if fault.stage in ("send", "receive")]
    mesh_faults = mesh.faults or [dataclasses.replace(fault, target=first) for fault in reached]
    problems = [
        f"{fault.source}: cannot connect to {first} at {fault.address} port {fault.port} "
        f"({_ERRORS.get(fault.error, fault.error)}), the rendezvous of the ranks. Set "
        "hardware.master_addr (behind NAT, hardware.reach) to an address of it that all hosts "
        "reach, or open the ports between the hosts in the firewall."
        for fault in mesh.unmet
        if fault not in reached
    ]
    groups: dict[tuple[str, str, str], list[Fault]] = {}
    for fault in mesh_faults:
        groups.setdefault((fault.target, fault.stage, fault.error), []).append(fault)
    causes = [_cause(mesh, faults[0]) for faults in groups.values()]
    problems += [_observation(mesh, faults) for faults in groups.values()]
    return [*problems, *dict.fromkeys(causes)]


def _observation(mesh: Mesh, faults: Sequence[Fault]) -> str:
    """What passed and what did not, in connections to one host that fail in the same way."""
    fault, target = faults[0], mesh.nodes[faults[0].target]
    sources = [similar_fault.source for similar_fault in faults]
    names = ", ".join(sources[:NAMES])
    if len(sources) > NAMES:
        names += f" and {plural(len(sources) - NAMES, 'more host')}"
    text = (
        f"{names} -> {target.name} at {fault.address} ({target.interface}, port {fault.port}): "
        f"{_SYMPTOMS[fault.stage]} ({_ERRORS.get(fault.error, fault.error)})."
    )
    if fault.stage != "connect":
        return text
    if any((target.name, source) in mesh.seconds for source in sources):
        text += " The other direction works."
    met = {source for source, name in mesh.seconds if name == RENDEZVOUS}
    if target.name == next(iter(mesh.nodes)) and met.intersection(sources):
        text += " The port of the rendezvous is open there, this one is not."
    return text


def _cause(mesh: Mesh, fault: Fault) -> str:
    """The likely cause of a fault, and its fix."""
    source, target = mesh.nodes[fault.source], mesh.nodes[fault.target]
    if fault.stage in ("send", "receive"):
        # In one order, so that the two directions have one cause.
        first, last = sorted((source, target), key=lambda node: node.name)
        mtu = 1500 if max(first.mtu, last.mtu) > 1500 else 1400  # less than now: else a tunnel
        return (
            f"Large packets are lost: the MTU is {first.mtu} on {first.name} ({first.interface}) "
            f"and {last.mtu} on {last.name} ({last.interface}), and the network between them takes "
            "less. Set one MTU on all hosts and switches, e.g. on each host: ip link set dev "
            f"{last.interface} mtu {mtu}."
        )
    if fault.stage == "byte":
        return (
            f"Another machine, or a proxy, answers at {fault.address} instead of {target.name}: "
            + _OTHER_NETWORK
        )
    if fault.error in ("ENETUNREACH", "gaierror"):
        return f"{source.name} has no way to {fault.address}: {_OTHER_NETWORK}"
    cause = "A firewall between the hosts drops it, or there is no route between the addresses."
    if fault.error == "ECONNREFUSED":
        cause = (
            "The host does listen there: a firewall rejects it, or another machine has the address "
            "(NAT, an address used twice)."
        )
    lowest, highest = target.ports
    return (
        f"{cause} Ranks listen on any port from {lowest} to {highest}: allow all TCP between the "
        "hosts in the firewall of each, e.g. iptables -I INPUT -p tcp -s NETWORK_OF_THE_HOSTS -j "
        f"ACCEPT. Else {_OTHER_NETWORK}"
    )
