"""Starts the real command line on a host of the cluster, as a user would.

    run = start_llmx(cluster, tmp_path, slots=(2, 1), overrides=["zero=stage3"])
    assert run.wait(timeout_s=120) == 0, run.output()
    run.result()["outcome"]

The cluster becomes a ``hardware`` option of its own in a config directory of the test.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from llmx.run.rundir import RunDir
from tests.cluster.netns import INTERFACE, Cluster, Host, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = (
    "experiment=demo",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=1",
    "data.max_rows=200",
    "data.eval_samples=0",
    "task.eval_generate=0",
    "task.log_every_steps=5",
    "batch.global_batch=12",
    "batch.micro_batch=2",
    "precision=fp32",
    "tracking.kinds=[]",
)
"""A model that is loaded in a moment: these tests are about processes."""


def hardware_of(
    cluster: Cluster,
    slots: Sequence[int],
    *,
    interface: str | None = INTERFACE,
    reverse: bool = False,
) -> dict[str, Any]:
    """The cluster as a ``hardware`` option; ``reverse`` has rank 0 on the last host. A host with
    no slots is left out: the supervisor may run where no rank does."""
    pairs = list(zip(cluster.hosts, slots, strict=True))
    return {
        "name": "testbed",
        "hosts": [
            {
                "name": host.name,
                "address": host.address,
                "ssh_port": host.ssh_port,
                "identity_file": str(cluster.identity_file),
                "slots": count,
                "device": "cpu",
                "interface": interface,
            }
            for host, count in (reversed(pairs) if reverse else pairs)
            if count
        ],
        "devices": {"cpu": {"accelerator": "cpu", "precisions": ["fp32", "bf16", "fp16"]}},
    }


class LlmxRun:
    """One ``python -m llmx`` on the first host, or on this machine."""

    def __init__(self, host: Host | None, process: subprocess.Popen[Any], run_dir: Path, out: Path):
        self._host, self.process, self.out = host, process, out
        self.dir = RunDir(run_dir)

    @property
    def host(self) -> Host:
        assert self._host is not None
        return self._host

    def wait(self, *, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"not over within {timeout_s:g} s\n{self.output()}") from None

    def output(self) -> str:
        """What the user saw, then the launcher's log: for a failed assertion."""
        text = self.out.read_text(errors="replace")
        log = self.path(self.dir.launcher_log)
        return text + (f"\n--- launcher.log\n{log.read_text()}" if log.exists() else "")

    def path(self, path: Path) -> Path:
        """A file of the run directory as the first host sees it."""
        return self._host.path(path) if self._host else path

    def result(self) -> dict[str, Any]:
        return json.loads(self.path(self.dir.result).read_text())

    def records(self) -> list[dict[str, Any]]:
        path = self.path(self.dir.metrics)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until_step(self, step: int, *, timeout_s: float = 120.0) -> None:
        """Wait until a step is logged, or fail with what the run said."""

        def reached() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"over before step {step}\n{self.output()}")
            return any(r.get("step", -1) >= step for r in self.records() if r["kind"] == "train")

        wait_until(reached, timeout_s=timeout_s, what=f"step {step}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """As the OOM killer would."""
        self.signal(signal.SIGKILL)


def start_llmx(
    cluster: Cluster,
    directory: Path,
    *,
    slots: Sequence[int] = (1, 1),
    overrides: Sequence[str] = (),
    name: str = "run",
    interface: str | None = INTERFACE,
    env: dict[str, str] | None = None,
    reverse: bool = False,
    rank_env: dict[str, str] | None = None,
    devices: Sequence[tuple[str, dict[str, Any]]] = (),
    by_host: dict[str, dict[str, Any]] | None = None,
) -> LlmxRun:
    """Start a run on the first host, its run directory under ``directory``, or as an override says.
    ``devices``: name and description of each used host's device type, where they are not all
    ``cpu``; ``by_host``: further keys of a host."""
    hardware = hardware_of(cluster, slots, interface=interface, reverse=reverse)
    hardware["env"] = rank_env or {}
    for host, (device, about) in zip(hardware["hosts"], devices, strict=False):
        host["device"], hardware["devices"][device] = device, about
    for host in hardware["hosts"]:
        host |= (by_host or {}).get(host["name"], {})
    given = [word.partition("=")[2] for word in overrides if word.startswith("run_dir=")]
    run_dir = Path(given[-1]) if given else directory / name
    out = directory / f"{name}.out"
    argv = [
        sys.executable, "-m", "llmx", *SMALL, f"run_dir={run_dir}",
        f"data.cache_dir={directory / 'cache'}", *overrides,
        write_option(directory, name, hardware),
    ]  # fmt: skip
    if not any(word.startswith("hardware=") for word in overrides):
        argv.append(f"hardware={name}")
    environment = dict(env or {})
    if "launch.transport=openmpi" in overrides:
        # mpirun passes on no path with a blank, and a clone may lie below one.
        link = directory / "repository"
        if not link.exists():
            link.symlink_to(REPOSITORY)
        environment["PYTHONPATH"] = str(link)
    process = start_program(cluster.first, argv, out, env=environment)
    return LlmxRun(cluster.first, process, run_dir, out)


def write_option(directory: Path, name: str, hardware: dict[str, Any]) -> str:
    """Make it ``hardware=NAME``; the word of a command line for it."""
    conf = directory / "conf"
    (conf / "hardware").mkdir(parents=True, exist_ok=True)
    (conf / f"hardware/{name}.yaml").write_text(yaml.safe_dump(hardware))
    return f"--config-dir={conf}"


def start_program(
    host: Host, argv: Sequence[str], out: Path, *, env: dict[str, str] | None = None
) -> subprocess.Popen[Any]:
    """A program on a host, in the directory of the file that it writes to."""
    with out.open("wb") as stream:
        return host.popen(
            argv,
            cwd=str(out.parent),
            env={"OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def is_rank(argv: Sequence[str]) -> bool:
    """Whether a process with these words is a rank; DeepSpeed's launcher and srun are not."""
    return (
        len(argv) > 2
        and argv[-2].endswith(("llmx.worker", "/worker.py"))
        and Path(argv[0]).name.startswith("python")
        and not any("deepspeed" in part for part in argv)
    )


def rank_pids(host: Host) -> list[int]:
    """The ranks on a host, by process number there."""
    return [pid for pid, argv in host.processes().items() if is_rank(argv)]


def nothing_left(cluster: Cluster, *, timeout_s: float = 30.0) -> None:
    """Every host is as empty as before the run, and /dev/shm too."""

    def empty() -> bool:
        return not any(host.processes() for host in cluster.hosts if host.is_up)

    try:
        wait_until(empty, timeout_s=timeout_s, what="no process on any host")
    except TimeoutError as error:
        left = {host.name: host.processes() for host in cluster.hosts if host.is_up}
        raise AssertionError(f"{error}: {left}") from None
    for host in cluster.hosts:
        if host.is_up:
            buffers = list(host.path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
            assert not buffers, f"{host.name}: {buffers}"
