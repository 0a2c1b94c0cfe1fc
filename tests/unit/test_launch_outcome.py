"""Verdicts: which of many failures is the cause.

``pytest tests/unit/test_launch_outcome.py``
"""

# Logs stand as they are printed.
# ruff: noqa: E501
from __future__ import annotations

from typing import Any

import pytest

from llmx.launch.supervision.classify import classify
from llmx.launch.supervision.outcome import Evidence, RankExit, all_finished, exit_code_of
from llmx.plan import make_plan
from llmx.plan.types import Plan
from tests.unit.test_launch_render import experiment

RESET = "RuntimeError: [../gloo/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Ranks 0 and 1 on node-a, rank 2 on node-b."""
    return make_plan(experiment("pdsh", (2, 1)))


def failed(
    time: float, message: str, *, kind: str = "RuntimeError", category: str = "crash"
) -> Any:
    error = {"type": kind, "message": message, "traceback": f"Traceback\n{kind}: {message}",
             "category": category, "time": time}  # fmt: skip
    return {"state": "failed", "time": time, "error": error}


def state(name: str, time: float = 200.0) -> dict[str, Any]:
    return {"state": name, "time": time, "error": None}


FINISHED = {0: state("finished"), 1: state("finished"), 2: state("finished")}


def test_success_needs_every_rank(plan: Plan) -> None:
    assert classify(Evidence(statuses=dict(FINISHED)), plan).kind == "ok"
    partial = {0: state("finished"), 1: state("finished")}
    assert not all_finished(Evidence(statuses=partial), plan)
    assert classify(Evidence(statuses=partial, runner_code=0), plan).kind == "crash"


def test_exit_code_0_is_no_success(plan: Plan) -> None:
    """DeepSpeed's runner ends with 0 although a rank died of a signal."""
    log = "[ERROR] ['python'] exits with return code = -11"
    outcome = classify(Evidence(runner_code=0, launcher_log=log), plan)
    assert outcome.kind == "crash"
    assert "SIGSEGV" in outcome.cause


def test_the_earliest_failure_is_shown(plan: Plan) -> None:
    statuses = {
        0: failed(110.0, "second"),
        1: state("interrupted"),
        2: failed(100.0, "first", kind="ValueError"),
    }
    outcome = classify(Evidence(statuses=statuses), plan)
    assert (outcome.rank, outcome.host) == (2, "node-b")
    assert "first" in outcome.traceback


def test_clocks_are_corrected(plan: Plan) -> None:
    """node-b's clock is a minute ahead, so its 150 was our 90."""
    statuses = {0: failed(100.0, "here"), 2: failed(150.0, "there")}
    evidence = Evidence(statuses=statuses, offsets_s={0: 0.0, 2: 60.0})
    assert classify(evidence, plan).rank == 2


def test_a_broken_connection_is_not_the_cause(plan: Plan) -> None:
    statuses = {0: failed(100.0, RESET, category="comm"), 1: failed(101.0, "boom")}
    outcome = classify(Evidence(statuses=statuses), plan)
    assert (outcome.rank, outcome.kind) == (1, "crash")


def test_a_broken_connection_alone_is_reported(plan: Plan) -> None:
    statuses = {0: failed(100.0, RESET, category="comm"), 1: state("interrupted")}
    outcome = classify(Evidence(statuses=statuses), plan)
    assert (outcome.rank, outcome.kind) == (0, "comm")


def test_a_silent_death_is_the_cause_of_broken_connections(plan: Plan) -> None:
    statuses = {0: failed(100.0, RESET, category="comm"), 2: state("training")}
    log = "exits with return code = -9"
    evidence = Evidence(
        statuses=statuses, exits={2: RankExit(100.4, oom_kills=1)}, launcher_log=log
    )
    outcome = classify(evidence, plan)
    assert (outcome.rank, outcome.host, outcome.kind) == (2, "node-b", "oom")


def test_a_rank_that_died_of_a_fault_says_where(plan: Plan) -> None:
    log = (
        'step 10\nFatal Python error: Segmentation fault\n\nThread 0x1:\n  File "x.py", line 3 in f'
    )
    evidence = Evidence(exits={1: RankExit(100.0)}, rank_logs={1: log})
    outcome = classify(evidence, plan)
    assert "SIGSEGV" in outcome.cause
    assert outcome.traceback.startswith("Fatal Python error")


def test_a_rank_that_a_full_disk_struck_dumb(plan: Plan) -> None:
    """It could write neither status nor log; what others saw of it, and earlier, is no cause."""
    exits = {0: RankExit(100.0, disk_free=0), 2: RankExit(99.5, disk_free=10**9)}
    outcome = classify(Evidence(exits=exits, rank_logs={2: "Traceback\n  return func(*ar"}), plan)
    assert (outcome.kind, outcome.rank, outcome.host) == ("disk_full", 0, "node-a")
    assert "node-a is full" in outcome.cause


def test_a_rank_that_never_came_to_its_status(plan: Plan) -> None:
    log = (
        "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'yaml'"
    )
    outcome = classify(Evidence(exits={1: RankExit(100.0)}, rank_logs={1: log}), plan)
    assert (outcome.kind, outcome.rank) == ("config", 1)


def test_an_exit_after_a_final_word_is_no_death(plan: Plan) -> None:
    statuses = {0: failed(100.0, "boom"), 1: state("interrupted"), 2: state("finished")}
    exits = {rank: RankExit(99.0) for rank in range(3)}
    assert classify(Evidence(statuses=statuses, exits=exits), plan).rank == 0


def test_a_lost_host_explains_broken_connections(plan: Plan) -> None:
    statuses = {0: failed(100.0, RESET, category="comm"), 2: state("training")}
    outcome = classify(Evidence(statuses=statuses, lost_hosts={"node-b": 99.0}), plan)
    assert (outcome.kind, outcome.host, outcome.rank) == ("host_lost", "node-b", None)


def test_interrupted_by_the_user(plan: Plan) -> None:
    statuses = {0: state("interrupted"), 1: failed(101.0, RESET, category="comm")}
    evidence = Evidence(statuses=statuses, interrupted_at=100.0, interrupted_by="Ctrl-C")
    outcome = classify(evidence, plan)
    assert outcome.kind == "interrupted"
    assert "Ctrl-C" in outcome.cause


def test_a_failure_before_the_interrupt_stays_one(plan: Plan) -> None:
    statuses = {0: failed(99.0, "boom"), 1: state("interrupted")}
    evidence = Evidence(statuses=statuses, interrupted_at=100.0)
    assert classify(evidence, plan).kind == "crash"


def test_ended_by_somebody_else(plan: Plan) -> None:
    outcome = classify(Evidence(statuses={2: state("interrupted")}, runner_code=1), plan)
    assert (outcome.kind, outcome.rank) == ("interrupted", 2)
    assert "SIGTERM" in outcome.cause


def test_ended_by_somebody_else_and_what_followed(plan: Plan) -> None:
    statuses = {
        0: failed(100.5, RESET, category="comm"),
        2: state("interrupted", 100.0),
    }
    assert classify(Evidence(statuses=statuses), plan).kind == "interrupted"


def test_the_launcher_ends_the_neighbours_of_a_failed_rank(plan: Plan) -> None:
    statuses = {
        0: failed(100.0, RESET, category="comm"),
        1: state("interrupted", 101.0),
    }
    assert classify(Evidence(statuses=statuses), plan).rank == 0


def test_slurm_knows_who_was_killed(plan: Plan) -> None:
    """No agent sees the far host; the near ranks only lose their connections."""
    statuses = {0: failed(100.0, RESET, category="comm"), 2: state("training")}
    log = "srun: error: node-b: task 2: Killed"
    outcome = classify(Evidence(statuses=statuses, launcher_log=log), plan)
    assert (outcome.rank, outcome.host, outcome.kind) == (2, "node-b", "crash")


def test_start_timeout_names_ranks_and_hosts(plan: Plan) -> None:
    evidence = Evidence(statuses={0: state("starting")}, start_timeout_s=5.0)
    outcome = classify(evidence, plan)
    assert "rank 1, 2 on node-a, node-b" in outcome.cause
    log = "ssh: connect to host 10.0.0.2 port 22: Connection refused"
    evidence.launcher_log = log
    assert "ssh" in classify(evidence, plan).cause


@pytest.mark.parametrize(
    ("log", "rank"),
    [
        ("srun: error: node-b: task 2: Killed", 2),
        ("srun: error: node-b: tasks 1-2: Killed", 1),
        ("mpirun noticed that process rank 1 with PID 0 on node node-a exited on signal 9", 1),
        ("srun: error: node-a: task 0: Terminated\nsrun: error: node-b: task 2: Killed", 2),
    ],
)
def test_the_launchers_word_names_the_rank(log: str, rank: int, plan: Plan) -> None:
    outcome = classify(Evidence(launcher_log=log, runner_code=137), plan)
    assert (outcome.rank, outcome.kind) == (rank, "crash")


def test_a_worker_that_cannot_be_imported(plan: Plan) -> None:
    log = (
        "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'yaml'"
    )
    outcome = classify(Evidence(launcher_log=log, runner_code=1), plan)
    assert outcome.kind == "config"
    assert outcome.traceback.startswith("Traceback")


@pytest.mark.parametrize(
    ("outcome", "launched", "code"),
    [("ok", True, 0), ("crash", True, 1), ("oom", True, 1), ("config", False, 2), ("data", True, 3),
     ("interrupted", True, 130), ("comm", False, 4), ("comm", True, 1),
     ("disk_full", True, 3)],
)  # fmt: skip
def test_exit_codes(outcome: str, launched: bool, code: int) -> None:
    assert exit_code_of(outcome, launched=launched) == code


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


@pytest.mark.parametrize(
    ("log", "name", "words"),
    [
        ("node-b: bash: line 1: cd: /runs/x: No such file or directory", "worker_missing", "does not see"),
        ("node-b: frob: the lock is held\npdsh@node-a: node-b: ssh exited with exit code 1", "", "rank 2 on node-b ended before it wrote a log"),
        ("[ERROR] ['python'] exits with return code = -9", "killed", "SIGKILL"),
    ],
)  # fmt: skip
def test_a_rank_without_log_and_status_is_explained_by_its_launcher(
    log: str, name: str, words: str, plan: Plan
) -> None:
    outcome = classify(Evidence(exits={2: RankExit(100.0)}, launcher_log=log), plan)
    assert (outcome.name, outcome.rank) == (name, 2)
    assert words in outcome.cause


def test_a_rank_with_a_status_and_no_word_was_killed(plan: Plan) -> None:
    evidence = Evidence(exits={2: RankExit(100.0)}, statuses={2: state("training")})
    assert classify(evidence, plan).name == "killed"


def test_an_unknown_failure_shows_its_error_and_not_the_exit(plan: Plan) -> None:
    log = (
        "Traceback (most recent call last):\n  File 'x', line 1, in f\nKeyError: 'frobnicate'\n"
        "[ERROR] [launch.py:325:sigkill_handler] ['python'] exits with return code = 1"
    )
    outcome = classify(Evidence(launcher_log=log, runner_code=1), plan)
    assert outcome.name == ""
    assert outcome.cause.endswith(": KeyError: 'frobnicate'")


@pytest.mark.parametrize(
    ("code", "log", "words"),
    [
        (-9, "step 10\n", "SIGKILL"),
        (-11, "step 10\n", "SIGSEGV"),
        (-9, "", "SIGKILL"),
        (1, "ModuleNotFoundError: No module named 'llmx'\n", "No module named 'llmx'"),
        (3, "", "rank 2 on node-b exited with code 3 before it wrote a line"),
    ],
)
def test_the_exit_code_of_a_rank_is_known(code: int, log: str, words: str, plan: Plan) -> None:
    """Where its agent started it."""
    evidence = Evidence(exits={2: RankExit(100.0, code=code)}, rank_logs={2: log})
    outcome = classify(evidence, plan)
    assert (outcome.rank, outcome.host) == (2, "node-b")
    assert words in outcome.cause
