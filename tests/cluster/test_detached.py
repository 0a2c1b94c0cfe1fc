"""Runs without a terminal, runs that wait for each other, and runs that are looked at from afar."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from llmx.run.rundir import RunDir, read_mapping, write_json
from tests import tracked_run
from tests.cluster.launching import REPOSITORY, SMALL, hardware_of, start_program, write_option
from tests.cluster.netns import Cluster, wait_until


def test_a_run_that_is_left_on_the_cluster_and_one_that_waits_for_it(
    make_cluster: Callable[..., Cluster], need: Callable[..., None], tmp_path: Path
) -> None:
    """The first host is a laptop, which does not see the disk of the other one."""
    need("rsync")
    work = tmp_path / "work"
    work.mkdir()
    cluster = make_cluster(private_paths=[work])
    laptop, far = cluster.hosts
    option = write_option(tmp_path, "far", hardware_of(cluster, (0, 1)))
    run = RunDir(work / "one")
    llmx = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "llmx"]
    start = [*llmx, *SMALL, "hardware=far", option]
    words = [*start, f"run_dir={run.root}", "task.steps=100000", "launch.detach=true"]
    ssh = ["ssh", "-F", str(cluster.ssh_config), "node-b"]
    started = laptop.run([*ssh, shlex.join(words)], check=False)
    assert started.returncode == 0, started.stdout + started.stderr
    there = RunDir(far.path(run.root))
    wait_until(lambda: there.metrics.exists(), timeout_s=120, what="its metrics")

    # The same words from here, once more: it waits for the first one.
    out = tmp_path / "out"
    words = [*start, f"run_dir={work}/two", "task.steps=3", "launch=rsync", "launch.queue=true"]
    waiting = start_program(laptop, words, out)
    text = f"waiting for its turn (launch.queue=true): node-b: is busy with 1 rank of {run.root}"
    wait_until(lambda: text in out.read_text(), timeout_s=60, what=text)
    location = [f"node-b:{run.root}", "--ssh-config", str(cluster.ssh_config)]
    console = tmp_path / "attach.out"
    attached = start_program(laptop, [*llmx, "attach", *location], console)
    wait_until(lambda: "step" in console.read_text(), timeout_s=60, what="its console")
    stopped = laptop.run([*llmx, "stop", *location], check=False)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "interrupted: " in stopped.stdout
    assert attached.wait(timeout=60) == 130, console.read_text()
    assert read_mapping(there.result)["outcome"] == "interrupted"
    assert waiting.wait(timeout=120) == 0, out.read_text()
    assert (laptop.path(work / "two") / "model").is_dir()


# --- ``status`` and ``watch`` of a run on another machine, where llmx is not ---


SUPERVISOR = """
import json, os, socket, sys, time
os.chdir(sys.argv[1])
state = {"state": "running", "pid": os.getpid(), "host": socket.gethostname(), "until": None}
open("supervisor.json", "w").write(json.dumps({**state, "time": time.time(), "why": ""}))
os.makedirs("logs", exist_ok=True)
open("logs/console.log", "w").write("step 40\\n")
while not os.path.exists("stop"):
    time.sleep(0.1)
result = {"outcome": "interrupted", "cause": "by a test", "exit_code": 130}
open("result.json", "w").write(json.dumps(result))
"""


def test_status_and_watch_over_ssh(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    work = tmp_path / "my work"
    work.mkdir()
    cluster = make_cluster(private_paths=[work], hidden={"node-b": [REPOSITORY]})
    near, far = cluster.hosts
    run = tracked_run.write_start(far.path(work / "runs" / "one"))
    records = [r for r in tracked_run.lines() if r["kind"] != "end"]
    tracked_run.append(run, [r for r in records if r.get("step", 0) <= 20])
    # Some process of that host, as the supervisor: process 1 there.
    supervisor = {"state": "running", "attempt": 1, "pid": 1, "host": "node-b", "until": None}

    def breathe() -> None:
        write_json(run.supervisor, {**supervisor, "time": time.time(), "why": ""})

    breathe()
    for rank in range(2):
        status = {"rank": rank, "state": "training", "step": 21, "time": time.time()}
        write_json(run.rank_status(rank), status)
    llmx = [sys.executable, "-m", "llmx"]
    there = ["--ssh-config", str(cluster.ssh_config)]
    code = {"PYTHONPATH": str(REPOSITORY)}

    one = near.run([*llmx, "status", f"root@node-b:{work}/runs/one", *there], env=code)
    assert "training  tiny-演示" in one.stdout
    assert "21 of 40" in one.stdout
    table = near.run([*llmx, "status", f"node-b:{work}/runs", *there], env=code)
    assert "21/40" in table.stdout
    for place, says in ((f"node-b:{work}/none", "no such directory"), ("nowhere:x", "nowhere")):
        failed = near.run([*llmx, "status", place, *there], env=code, check=False)
        assert failed.returncode in (2, 4)
        assert says in failed.stderr
        assert "Traceback" not in failed.stderr

    words = ["watch", f"node-b:{work}/runs/one", "--every", "0.2", *there]
    out = tmp_path / "watch.out"
    watching = start_program(near, [*llmx, *words], out, env=code)

    def until(text: str) -> None:
        def said() -> bool:
            assert watching.poll() is None, out.read_text()
            breathe()
            return text in out.read_text()

        wait_until(said, timeout_s=30, what=f"{text!r} in {out}")

    until("training  step 21/40")
    far.stop_sshd()
    until("no connection (node-b: ")
    far.start_sshd()
    tracked_run.append(run, [r for r in records if r.get("step", 0) > 20])
    until("training  step 40/40")
    write_json(run.result, {**tracked_run.result(), "ended": time.time()})
    write_json(run.supervisor, {**supervisor, "state": "finished", "time": time.time()})
    assert watching.wait(20) == 0, subprocess.list2cmdline(words) + out.read_text()
    assert "finished  step 40/40" in out.read_text()
    wait_until(lambda: not far.processes(), timeout_s=10, what="nothing left on node-b")

    # A run that goes on there without a terminal: its supervisor.
    run.result.unlink()
    far.popen(["python3", "-c", SUPERVISOR, str(work / "runs/one")])
    wait_until(lambda: run.console_log.exists(), timeout_s=10, what="the supervisor")
    words = ["attach", f"node-b:{work}/runs/one", *there]
    attached = start_program(near, [*llmx, *words], out, env=code)
    wait_until(lambda: "step 40" in out.read_text(), timeout_s=20, what="its console")
    stopped = near.run([*llmx, "stop", f"node-b:{work}/runs/one", *there], env=code)
    assert "interrupted: by a test" in stopped.stdout
    assert attached.wait(20) == 130, out.read_text()
    again = near.run([*llmx, "stop", f"node-b:{work}/runs/one", *there], env=code, check=False)
    assert (again.returncode, "it has ended (interrupted)" in again.stderr) == (2, True)
