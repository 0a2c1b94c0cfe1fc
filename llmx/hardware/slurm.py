"""What Slurm says: the nodes of an allocation, their GPUs, its user and its end.

``hardware=slurm`` takes the hosts of a run from it: ``salloc -N2 --gpus-per-node=8``, then
``python -m llmx hardware=slurm``. ``launch.transport=slurm`` checks its hosts against it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmx.config.schema import DeviceConfig, HardwareConfig, HostConfig
from llmx.errors import ConfigError
from llmx.hardware.detect import match_device, usable_gpus

COMMAND_S = 30.0
"""Time for the controller to answer."""
_NODE_LINE = re.compile(r"^\s+Nodes=(\S+) CPU_IDs=\S* Mem=\S+ GRES=(\S*)", re.MULTILINE)
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")
OUTSIDE = "unset SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NODELIST to work outside an allocation"


@dataclass(frozen=True)
class Allocation:
    """A job that has, had or waits for nodes."""

    job: str
    state: str
    """The state as Slurm writes it (``RUNNING``); ``UNKNOWN`` for a number that Slurm does not
    know any more."""
    user_id: int | None = None
    gpus: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Node -> allocated GPUs, in the order of the nodes."""
    tasks: int = 1
    """The tasks of the whole job."""
    ends_at: float | None = None
    """Its time limit, seconds since the epoch."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of its nodes."""
        return tuple(self.gpus)

    def problem(self) -> str:
        """Why no run of this user can start in it: value, rule and fix; empty where one can."""
        if self.state == "PENDING":
            return (
                f"SLURM_JOB_ID={self.job}: that job still waits for its nodes. Wait until "
                f"`squeue --job {self.job}` shows R, or {OUTSIDE}."
            )
        if self.state != "RUNNING":
            state = "Slurm does not know it any more"
            if self.state != "UNKNOWN":
                state = f"its state is {self.state}"
            return (
                f"SLURM_JOB_ID={self.job}: that job has ended ({state}), and its nodes are free "
                f"for others. Allocate new ones (salloc) and start there, or {OUTSIDE}."
            )
        if self.user_id not in (None, os.getuid()):
            return (
                f"SLURM_JOB_ID={self.job}: that job is of another user (id {self.user_id}), and "
                f"you are {os.getuid()}. Set it to a job of yours, or {OUTSIDE}."
            )
        return ""


def ask(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command of Slurm; one that cannot be run, or takes too long, has failed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        try:
            return subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
        except OSError as error:
            return subprocess.CompletedProcess(argv, 1, "", f"{argv[0]}: {error.strerror}")
    return subprocess.CompletedProcess(argv, 1, "", f"{argv[0]}: no answer in {COMMAND_S:.0f} s")


def output_of(argv: Sequence[str]) -> str:
    """The output of a command of Slurm; empty where it fails."""
    done = ask(argv)
    return done.stdout if done.returncode == 0 else ""


def read_allocation(job: str) -> Allocation | None:
    """The allocation of a job; None where Slurm does not answer."""
    done = ask(["scontrol", "show", "job", "--details", job])
    if done.returncode != 0:
        return Allocation(job, "UNKNOWN") if "Invalid job id" in done.stderr else None
    allocation = parse_allocation(job, done.stdout)
    gpus: dict[str, int] = {}
    for nodes, count in allocation.gpus.items():
        gpus |= dict.fromkeys(_expanded(nodes), count)
    return dataclasses.replace(allocation, gpus=gpus)


def parse_allocation(job: str, text: str) -> Allocation:
    """Read ``scontrol show job --details``; several nodes stand as one word (``gpu[01-04]``)."""
    values = dict(re.findall(r"(\w+)=(\S+)", text))
    user = re.search(r"UserId=[^\s(]*\((\d+)\)", text)
    gpus = {}
    for nodes, gres in _NODE_LINE.findall(text):
        gpus[nodes] = sum(map(int, _GPUS.findall(gres)))
    if not gpus and values.get("NodeList", "(null)") != "(null)":
        gpus = {values["NodeList"]: 0}
    tasks, end = values.get("NumTasks", ""), None
    with contextlib.suppress(ValueError):
        end = time.mktime(time.strptime(values.get("EndTime", ""), "%Y-%m-%dT%H:%M:%S"))
    return Allocation(
        job,
        values.get("JobState", "UNKNOWN"),
        user_id=int(user[1]) if user else None,
        gpus=gpus,
        tasks=int(tasks) if tasks.isdecimal() else 1,
        ends_at=end,
    )


def _expanded(nodes: str) -> list[str]:
    """The names in a list as Slurm writes it."""
    if not re.search(r"[\[,]", nodes):
        return [nodes] if nodes else []
    return output_of(["scontrol", "show", "hostnames", nodes]).split()


def hardware_of_allocation(
    hardware: HardwareConfig, *, environ: Mapping[str, str] = os.environ
) -> HardwareConfig:
    """``kind: slurm`` made explicit: the nodes of the allocation.

    Outside one the hosts are those that a job would ask for (``hardware.nodes``, ``slots``,
    ``device``), and ``kind`` stays ``slurm``: they have no names yet.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return _requested(hardware)
    allocation = read_allocation(job)
    if allocation is None:
        raise ConfigError(
            f"hardware=slurm: Slurm does not answer (scontrol show job {job}). Try it in this "
            "shell, or list the hosts in a hardware file."
        )
    if problem := allocation.problem():
        raise ConfigError(problem)
    nodes = allocation.nodes
    if hardware.nodes not in (None, len(nodes)):
        raise ConfigError(
            f"hardware.nodes={hardware.nodes}, but job {job} has {len(nodes)} ({', '.join(nodes)})."
            " Leave hardware.nodes out: inside an allocation all of its nodes are used."
        )
    device, devices = _device(hardware, allocation)
    on_cpus = device in devices and devices[device].accelerator == "cpu"
    tasks = max(1, allocation.tasks // len(nodes))
    hosts = [
        HostConfig(
            name=name,
            slots=tasks if on_cpus else gpus,
            device=device,
            interface=hardware.interface,
        )
        for name, gpus in allocation.gpus.items()
    ]
    without = [host.name for host in hosts if not host.slots]
    if without:
        raise ConfigError(
            f"hardware.device={device}: job {job} has no GPU on {', '.join(without)}. Ask for GPUs "
            "(salloc --gpus-per-node=8), or leave hardware.device out to train on the CPUs."
        )
    return dataclasses.replace(hardware, kind="static", nodes=None, hosts=hosts, devices=devices)


def _requested(hardware: HardwareConfig) -> HardwareConfig:
    missing = [key for key in ("nodes", "slots", "device") if getattr(hardware, key) is None]
    if missing:
        raise ConfigError(
            "hardware=slurm: there is no allocation here (SLURM_JOB_ID is not set). Start in one "
            "(salloc, sbatch); or say what a job would ask for, for `plan` and "
            "launch.slurm.submit=true: hardware.nodes=2 hardware.slots=8 hardware.device=a100_80g "
            f"(not set: {', '.join(missing)})."
        )
    hosts = [
        HostConfig(name=f"node-{number}", slots=hardware.slots or 1, device=hardware.device or "")
        for number in range(1, (hardware.nodes or 0) + 1)
    ]
    return dataclasses.replace(hardware, hosts=hosts)


def _device(
    hardware: HardwareConfig, allocation: Allocation
) -> tuple[str, dict[str, DeviceConfig]]:
    """The device type of the nodes, and all device types."""
    devices = dict(hardware.devices)
    if hardware.device:
        return hardware.device, devices
    gpu = None
    if any(allocation.gpus.values()):
        gpus = usable_gpus()
        if socket.gethostname().split(".")[0] not in allocation.nodes or not gpus:
            raise ConfigError(
                f"hardware=slurm: job {allocation.job} has GPUs, and this machine cannot tell "
                "their type. Set hardware.device=NAME (python -m llmx help hardware/devices), or "
                "start on one of its nodes."
            )
        gpu = gpus[0]
    name, devices[name] = match_device(gpu, devices)
    return name, devices
