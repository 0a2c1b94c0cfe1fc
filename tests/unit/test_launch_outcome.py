"""Verdicts: which of many failures is the cause."""

# Logs stand as they are printed.
# ruff: noqa: E501
from __future__ import annotations

from typing import Any

import pytest

from llmx.failures.diagnose import Failure
from llmx.launch.supervision.classify import classify
from llmx.launch.supervision.outcome import (
    Evidence,
    RankExit,
    all_finished,
    exit_code_of,
)
from llmx.launch.supervision.progress import hang_failure
from llmx.plan import make_plan
from llmx.plan.types import Plan
from tests.launches import experiment

RESET = "RuntimeError: [../gloo/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1"
NO_YAML = (
    "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'yaml'"
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Ranks 0 and 1 on node-a, rank 2 on node-b."""
    return make_plan(experiment("pdsh", (2, 1)))


def failed(time: float, message: str, *, kind: str = "RuntimeError", **more: Any) -> Any:
    error = {"type": kind, "message": message, "traceback": f"Traceback\n{kind}: {message}",
             "category": "crash", "time": time, **more}  # fmt: skip
    return {"state": "failed", "time": time, "error": error}


def cut_off(time: float) -> Any:
    """A rank that lost its connections."""
    return failed(time, RESET, category="comm")


STOPPED = Failure("interrupted", "stopped by Ctrl-C", stopped_by="user", time=100.0)


def state(name: str, time: float = 200.0) -> dict[str, Any]:
    return {"state": name, "time": time, "error": None}


def test_success_needs_every_rank(plan: Plan) -> None:
    statuses = {rank: state("finished") for rank in range(3)}
    assert classify(Evidence(statuses=statuses), plan).kind == "ok"
    del statuses[2]
    assert not all_finished(Evidence(statuses=statuses), plan)
    assert classify(Evidence(statuses=statuses, runner_code=0), plan).kind == "crash"


KILLED_2 = "srun: error: node-b: task 2: Killed"


@pytest.mark.parametrize(
    ("statuses", "more", "expected"),
    [
        # The earliest failure is shown.
        ({0: failed(110.0, "second"), 1: state("interrupted"), 2: failed(100.0, "first")}, {}, ("crash", 2)),
        # node-b's clock is a minute ahead, so its 150 was our 90.
        ({0: failed(100.0, "here"), 2: failed(150.0, "there")}, {"offsets_s": {0: 0.0, 2: 60.0}}, ("crash", 2)),
        # A broken connection is not the cause, unless there is no other.
        ({0: cut_off(100.0), 1: failed(101.0, "boom")}, {}, ("crash", 1)),
        ({0: cut_off(100.0), 1: state("interrupted")}, {}, ("comm", 0)),
        # A silent death is the cause of broken connections.
        ({0: cut_off(100.0), 2: state("training")}, {"exits": {2: RankExit(100.4, oom_kills=1)}}, ("oom", 2)),
        # No agent sees the far host (Slurm); the near ranks only lose their connections.
        ({0: cut_off(100.0), 2: state("training")}, {"launcher_log": KILLED_2}, ("crash", 2)),
        # An exit after a final word is no death.
        (
            {0: failed(100.0, "boom"), 1: state("interrupted"), 2: state("finished")},
            {"exits": {rank: RankExit(99.0) for rank in range(3)}},
            ("crash", 0),
        ),
        # A lost host explains broken connections.
        ({0: cut_off(100.0), 2: state("training")}, {"lost_hosts": {"node-b": 99.0}}, ("host_lost", None)),
        # A failure before the interrupt stays one; what follows it is none.
        ({0: failed(99.0, "boom"), 1: state("interrupted")}, {"stopped": STOPPED}, ("crash", 0)),
        ({0: state("interrupted"), 1: cut_off(101.0)}, {"stopped": STOPPED}, ("interrupted", None)),
        # Ended by somebody else, and what followed; the launcher ends the neighbours of a failed rank.
        ({0: cut_off(100.5), 2: state("interrupted", 100.0)}, {}, ("interrupted", 2)),
        ({0: cut_off(100.0), 1: state("interrupted", 101.0)}, {}, ("comm", 0)),
    ],
)  # fmt: skip
def test_the_cause_among_what_the_ranks_say(
    statuses: dict[int, Any], more: dict[str, Any], expected: tuple[str, int | None], plan: Plan
) -> None:
    outcome = classify(Evidence(statuses=statuses, **more), plan)
    assert (outcome.kind, outcome.rank) == expected
    if outcome.rank is not None or outcome.kind == "host_lost":
        assert outcome.host == ("node-a" if outcome.rank in (0, 1) else "node-b")
    said = statuses.get(-1 if outcome.rank is None else outcome.rank, {}).get("error") or {}
    assert outcome.traceback == said.get("traceback", "")


def test_who_asked_for_the_end_is_named(plan: Plan) -> None:
    assert classify(Evidence(stopped=STOPPED), plan) == STOPPED
    by_signal = Evidence(statuses={2: state("interrupted")}, runner_code=1)
    assert "SIGTERM" in classify(by_signal, plan).cause


FAULT = 'step 10\nFatal Python error: Segmentation fault\n\nThread 0x1:\n  File "x.py", line 3 in f'


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        ({"log": FAULT}, "sigsegv", "SIGSEGV"),
        ({"log": NO_YAML}, "module", "No module named 'yaml'"),
        # Where its agent started it, its code is known.
        ({"code": -9, "log": "step 10\n"}, "killed", "SIGKILL"),
        ({"code": 1, "log": "ModuleNotFoundError: No module named 'llmx'\n"}, "module", "No module named 'llmx'"),
        ({"code": 7, "log": "step 10\n  x = f(y)\n    return g(x)\n"}, "", "exit code 7, no traceback, last lines: step 10 | x = f(y) | return g(x)"),
        ({"code": 3}, "", "rank 2 on node-b exited with code 3 before it wrote a line"),
        # Without log and status it is explained by its launcher.
        ({"launcher": "node-b: bash: line 1: cd: /runs/x: No such file or directory"}, "worker_missing", "does not see"),
        ({"launcher": "node-b: frob: the lock is held\npdsh@node-a: node-b: ssh exited with exit code 1"}, "", "rank 2 on node-b ended before it wrote a log"),
        ({"launcher": "[ERROR] ['python'] exits with return code = -9"}, "killed", "SIGKILL"),
    ],
)  # fmt: skip
def test_a_rank_that_ended_without_a_status(
    given: dict[str, Any], name: str, words: str, plan: Plan
) -> None:
    """Rank 2, without a word in its status."""
    exits = {2: RankExit(100.0, code=given.get("code"))}
    logs = {2: given["log"]} if "log" in given else {}
    evidence = Evidence(exits=exits, rank_logs=logs, launcher_log=given.get("launcher", ""))
    outcome = classify(evidence, plan)
    assert (outcome.rank, outcome.host, outcome.name) == (2, "node-b", name)
    assert outcome.kind == ("config" if name in ("module", "worker_missing") else "crash")
    assert words in outcome.cause
    start = {FAULT: "Fatal Python error", NO_YAML: "Traceback"}.get(given.get("log", ""), "")
    assert outcome.traceback.startswith(start)


def test_a_rank_with_a_status_and_no_word_was_killed(plan: Plan) -> None:
    evidence = Evidence(exits={2: RankExit(100.0)}, statuses={2: state("training")})
    assert classify(evidence, plan).name == "killed"


def test_a_rank_that_a_full_disk_struck_dumb(plan: Plan) -> None:
    """It could write neither status nor log; what others saw of it, and earlier, is no cause."""
    exits = {0: RankExit(100.0, disk_free=0), 2: RankExit(99.5, disk_free=10**9)}
    outcome = classify(Evidence(exits=exits, rank_logs={2: "Traceback\n  return func(*ar"}), plan)
    assert (outcome.kind, outcome.rank, outcome.host) == ("disk_full", 0, "node-a")
    assert "node-a is full" in outcome.cause


def test_start_timeout_names_ranks_and_hosts(plan: Plan) -> None:
    evidence = Evidence(statuses={0: state("starting")}, start_timeout_s=5.0)
    assert "rank 1, 2 on node-a, node-b" in classify(evidence, plan).cause
    evidence.launcher_log = "ssh: connect to host 10.0.0.2 port 22: Connection refused"
    assert "ssh" in classify(evidence, plan).cause


UNKNOWN = "Traceback (most recent call last):\n  File 'x', line 1, in f\nKeyError: 'frobnicate'\n"


@pytest.mark.parametrize(
    ("log", "code", "kind", "rank", "words"),
    [
        # DeepSpeed's runner ends with 0 although a rank died of a signal.
        ("[ERROR] ['python'] exits with return code = -11", 0, "crash", None, "SIGSEGV"),
        (KILLED_2, 137, "crash", 2, "SIGKILL"),
        ("srun: error: node-b: tasks 1-2: Killed", 137, "crash", 1, "SIGKILL"),
        (NO_YAML, 1, "config", None, "No module named 'yaml'"),
        ("mpirun noticed that process rank 1 with PID 0 on node node-a exited on signal 9", 137, "crash", 1, "SIGKILL"),
        (f"srun: error: node-a: task 0: Terminated\n{KILLED_2}", 137, "crash", 2, "SIGKILL"),
        # The error of an unknown failure, and not the exit.
        (f"{UNKNOWN}[ERROR] [launch.py:325:sigkill_handler] ['python'] exits with return code = 1", 1, "crash", None, ": KeyError: 'frobnicate'"),
    ],
)  # fmt: skip
def test_the_launchers_word_where_no_rank_has_said_any(
    log: str, code: int, kind: str, rank: int | None, words: str, plan: Plan
) -> None:
    outcome = classify(Evidence(launcher_log=log, runner_code=code), plan)
    assert (outcome.kind, outcome.rank) == (kind, rank)
    assert words in outcome.cause
    assert outcome.traceback.startswith("Traceback") == log.startswith("Traceback")


def test_exit_codes() -> None:
    launched = {
        "ok": 0,
        "crash": 1,
        "oom": 1,
        "comm": 1,
        "data": 3,
        "disk_full": 3,
        "interrupted": 130,
    }
    assert {outcome: exit_code_of(outcome, launched=True) for outcome in launched} == launched
    assert [exit_code_of(outcome, launched=False) for outcome in ("config", "comm")] == [2, 4]


def test_launchers_that_die_while_their_ranks_train_on(plan: Plan) -> None:
    """Then the supervisor ends the ranks, which is nobody's wish to end the run."""
    statuses = {rank: state("interrupted", 206.0) for rank in range(3)}
    log = "pdsh@node-a: node-b: ssh exited with exit code 255"
    evidence = Evidence(statuses=statuses, runner_code=255, launcher_log=log, ended_at=203.0)
    outcome = classify(evidence, plan)
    assert outcome.kind in ("crash", "comm")
    assert "asked to end" not in outcome.cause
    statuses[1] = state("interrupted", 201.0)
    assert classify(evidence, plan).kind == "interrupted", "by somebody else, before"


def test_a_hang_is_a_verdict_of_its_own(plan: Plan) -> None:
    why = "its process has been stopped for 61 s"
    hang = hang_failure(plan, 2, why, "stack", silent="no progress", is_loading=False)
    assert (hang.kind, hang.rank, hang.host) == ("hang", 2, "node-b")
    assert hang.cause == f"no progress; rank 2 on node-b: {why}"
    assert classify(Evidence(statuses={0: state("training")}, hang=hang), plan) == hang
    # What the ranks say when they are ended for it does not count; what they said before does.
    asked = Evidence(statuses={0: state("interrupted", 103.0)}, hang=hang, ended_at=102.0)
    assert classify(asked, plan).kind == "hang"
    outcome = classify(Evidence(statuses={1: failed(50.0, "x", step=7)}, hang=hang), plan)
    assert (outcome.kind, outcome.step) == ("crash", 7)
