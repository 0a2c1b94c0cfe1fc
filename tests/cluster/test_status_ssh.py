"""``status`` and ``watch`` of a run on another machine, where llmx is not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from llmx.run.rundir import write_json
from tests import tracked_run
from tests.cluster.netns import Cluster, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
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
    with out.open("w") as stream:
        watching = near.popen([*llmx, *words], env=code, stdout=stream, stderr=stream)

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
    with out.open("w") as stream:
        words = ["attach", f"node-b:{work}/runs/one", *there]
        attached = near.popen([*llmx, *words], env=code, stdout=stream, stderr=stream)
    wait_until(lambda: "step 40" in out.read_text(), timeout_s=20, what="its console")
    stopped = near.run([*llmx, "stop", f"node-b:{work}/runs/one", *there], env=code)
    assert "interrupted: by a test" in stopped.stdout
    assert attached.wait(20) == 130, out.read_text()
    again = near.run([*llmx, "stop", f"node-b:{work}/runs/one", *there], env=code, check=False)
    assert (again.returncode, "it has ended (interrupted)" in again.stderr) == (2, True)
