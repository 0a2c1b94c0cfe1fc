"""What ``doctor`` shows of the hosts: of this machine, and of facts that differ."""

from __future__ import annotations

import contextlib
import getpass
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmx.cli import doctor
from llmx.cli.doctor import Report, by_value, leftovers_of, lines_of, network_time, pasteable, run
from llmx.cli.words import parse
from llmx.hardware import survey
from llmx.hardware.compare import runs_on
from llmx.launch.agents.mesh import Fault, Mesh, Node
from llmx.run.rundir import RunDir
from tests.agents import Rig
from tests.composing import composed
from tests.launches import experiment, spec_of


def test_this_machine_as_a_table_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    assert run(parse("doctor", ["hardware=local", "--json"]), stream=out) == 0
    found = json.loads(out.getvalue())
    assert found["ok"]
    (host,) = found["hosts"].values()
    assert host["survey"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert list(tmp_path.iterdir()) == []


def test_errors_come_after_the_table_and_are_counted() -> None:
    nodes = {name: Node(name, "eth0", "10.0.0.1", 1500) for name in "ab"}
    fault = Fault("a", "b", "10.0.0.1", 7, "connect", "ETIMEDOUT")
    mesh = Mesh(nodes, [fault], [], {("b", "a"): 0.001})
    report = Report(["a", "b"], nodes=nodes, mesh=mesh, errors=["no way"], warnings=["a clock"])
    lines = list(lines_of(report))
    assert lines[0] == "  network      eth0 (MTU 1500)"
    assert by_value({"a": "2.13", "b": "2.12", "c": "2.13"}) == "2.13 on a, c; 2.12 on b"
    assert lines[1].startswith("  connections  1 of 2 work")
    assert lines[-3:] == ["✗ no way", "! a clock", "✗ 2 hosts in 0.0 s: 1 error, 1 warning"]


def test_a_command_to_test_ssh_needs_no_run_directory() -> None:
    spec = spec_of(experiment("ssh", (1,)), run_dir=RunDir(Path("/runs/.llmx-doctor-1")))
    text = "node-a: closed. Test it with: ssh -F /runs/.llmx-doctor-1/ssh_config node-a true"
    expected = "ssh -p 2201 -i '/home/ada/.ssh/id cluster' ada@10.0.0.1 true"
    assert pasteable(text, spec) == f"node-a: closed. Test it with: {expected}"


@contextlib.contextmanager
def rank_of(run_dir: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a rank of the run."""
    program = "import signal; print(1, flush=True); signal.pause()"
    words = [sys.executable, "-c", program, "llmx.worker", str(run_dir)]
    environment = {**os.environ, "LLMX_RUN_TOKEN": f"doctor-{os.getpid()}", **env}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline()
        try:
            yield rank
        finally:
            rank.kill()


def test_a_run_that_nobody_supervises(tmp_path: Path) -> None:
    with rank_of(tmp_path) as rank, Rig(tmp_path / "own") as agent:
        ranks = [found for found in agent.ask("busy")["ranks"] if found["pid"] == rank.pid]
    assert [(found["run_dir"], found["is_dead"]) for found in ranks] == [(str(tmp_path), True)]
    (line,) = runs_on("node-a", ranks)
    assert line.startswith(f"node-a: processes of {tmp_path} are here, without an agent")
    assert line.endswith(f"kill -9 {rank.pid}")


def test_leftovers_are_removed_after_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is young, and processes of a job of Slurm, where no agent is, stay."""
    extensions = tmp_path / "extensions"
    words = ["hardware=local", f"launch.env.TORCH_EXTENSIONS_DIR={extensions}", "--fix"]
    monkeypatch.chdir(tmp_path)
    old, young = extensions / "fused_adam" / "lock", extensions / "cpu_adam" / "lock"
    for lock in (old, young):
        lock.parent.mkdir(parents=True)
        lock.touch()
    os.utime(old, (1, 1))
    out, token = io.StringIO(), f"job-{os.getpid()}"
    with (
        rank_of(tmp_path) as dead,
        rank_of(tmp_path, SLURM_JOB_ID="7", LLMX_RUN_TOKEN=token) as in_job,
    ):

        def of_this_test(report: Report) -> dict[str, dict[str, list[Any]]]:
            """Other tests start processes that nobody supervises, too."""
            (host,) = leftovers_of(report).values()
            assert in_job.pid not in host["pids"]
            return {"localhost": {**host, "pids": [pid for pid in host["pids"] if pid == dead.pid]}}

        monkeypatch.setattr(doctor, "leftovers_of", of_this_test)
        monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
        run(parse("doctor", words), stream=out)
        listed = f"  localhost: rm {old}\n  localhost: kill -9 {dead.pid}\nDo that? [y/N] "
        assert listed in out.getvalue()
        assert old.exists()
        assert dead.poll() is None
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
        run(parse("doctor", words), stream=out)
        done = f"! localhost: removed {old}\n! localhost: ended process {dead.pid}\n"
        assert done in out.getvalue()
        assert (old.exists(), young.exists()) == (False, True)
        assert dead.wait(timeout=10) == -9
        assert in_job.poll() is None


def test_the_processes_on_a_gpu_by_the_words_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in *query-gpu*) printf "GPU-a, 0\\nGPU-b, 1\\n";;\n'
        f'*) printf "GPU-b, {os.getpid()}, 30121\\nGPU-a, 7, [N/A]\\n";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(survey, "count_gpus", lambda: 2)
    (process,) = survey.gpu_processes()
    assert (process["gpu"], process["mib"], process["pid"]) == ("1", 30121, os.getpid())
    assert process["user"] == getpass.getuser()
    assert "python" in process["command"]


@pytest.mark.usefixtures("made_up_traces")
def test_the_plan_says_what_a_measured_network_costs() -> None:
    words = ["hardware=a100x2_v100x2", "experiment=opt_1_3b_sft", "batch.micro_batch=1"]
    words += ["batch.accumulation=null", "batch.global_batch=64"]
    slow = network_time(composed([*words, "zero=stage3"]), 5.0)
    assert slow.startswith("By the plan with hardware.network_gbit_per_s=5 a step of this config")
    assert re.search(r" [\d.]+ s wait for communication\.$", slow)
