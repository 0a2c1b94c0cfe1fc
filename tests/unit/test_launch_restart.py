"""Whether a run is started again: the decision, hangs, fewer hosts, and the records.

``pytest tests/unit/test_launch_restart.py``
"""

from __future__ import annotations

import dataclasses
import io
import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmx.config.schema import LaunchConfig, TaskConfig
from llmx.errors import ConfigError, LaunchError
from llmx.launch.supervision.backoff import Backoff, HostSelection, without_hosts
from llmx.launch.supervision.classify import classify
from llmx.launch.supervision.console import Console, RunLog
from llmx.launch.supervision.hang import HangDetector, find_stuck_rank, main_stack
from llmx.launch.supervision.journal import (
    Journal,
    read_attempts,
    read_resume,
    supervisor_lock,
    write_resume,
)
from llmx.launch.supervision.outcome import AttemptRecord, Evidence, Hang, Outcome
from llmx.launch.supervision.restart import Decision, decide
from llmx.launch.supervision.signals import ShutdownRequest
from llmx.plan import ds_config, make_plan
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, read_json
from llmx.run.snapshot import run_token, write_identity
from tests.unit.test_launch_render import experiment, spec_of

LAUNCH = LaunchConfig(max_restarts=3, restart_backoff_s=10, restart_backoff_max_s=25)


def ended(kind: str, cause: str = "", *, name: str = "", **steps: Any) -> AttemptRecord:
    """An attempt that is over."""
    outcome = {key: steps.pop(key) for key in ("step", "lost_hosts") if key in steps}
    return AttemptRecord(Outcome(kind, cause, name=name, **outcome), **steps)


BOOM = ended("crash", "ValueError: boom 17", first_step=0, last_step=57)
KILLED = ended("crash", "SIGKILL", name="killed", first_step=0, last_step=57)
LOST = ended("host_lost", "node-b", first_step=0, last_step=3, lost_hosts=("node-b",))


def after(*history: AttemptRecord, launch: LaunchConfig = LAUNCH, **task: Any) -> Decision:
    return decide(history, launch, TaskConfig(**task))


def at(record: AttemptRecord, last_step: int | None, **outcome: Any) -> AttemptRecord:
    """The attempt with another last step, or outcome."""
    changed = dataclasses.replace(record.outcome, **outcome)
    return dataclasses.replace(record, outcome=changed, last_step=last_step)


def test_the_good_end_and_the_users_end() -> None:
    assert after(ended("ok")).action == "finished"
    assert after(KILLED, ended("interrupted")).action == "stop"
    assert after(KILLED, launch=LaunchConfig(max_restarts=0)).why == "launch.max_restarts=0"


@pytest.mark.parametrize("outcome", ["config", "data", "oom"])
def test_what_would_come_again_stops(outcome: str) -> None:
    decision = after(at(BOOM, 57, kind=outcome))
    assert decision.action == "stop"
    assert "again" in decision.why


@pytest.mark.parametrize("outcome", ["crash", "comm", "host_lost", "hang", "disk_full", "nan"])
def test_what_may_pass_is_tried_again(outcome: str) -> None:
    decision = after(at(BOOM, 57, kind=outcome))
    assert (decision.action, decision.restart, decision.wait_s) == ("restart", 1, 10)
    wanted = {"host_lost": "hosts", "disk_full": "disk"}.get(outcome, "")
    assert decision.wait_for == wanted


def test_before_the_first_step() -> None:
    """An error there recurs; a killed process or a lost connection does not."""
    start = dataclasses.replace(BOOM, first_step=None, last_step=None)
    assert "before the first step" in after(start).why
    for outcome in ("comm", "host_lost", "orphaned"):
        assert after(at(start, None, kind=outcome)).action == "restart"
    assert after(at(start, None, name="killed")).action == "restart"
    # Later, when an earlier attempt has trained, it gets one more try.
    assert after(KILLED, start).action == "restart"
    assert after(KILLED, start, start).action == "stop"


def test_not_launched() -> None:
    """The first time it is the user's to see at once; later a host may just be away."""
    gone = ended("host_lost", "node-b: no route", launched=False, lost_hosts=("node-b",))
    assert after(gone).action == "stop"
    assert (after(KILLED, gone).action, after(KILLED, gone).wait_for) == ("restart", "hosts")


def test_the_same_failure_at_the_same_step_twice_stops() -> None:
    other_address = at(BOOM, 57, cause="ValueError: boom 18")
    decision = after(BOOM, other_address)
    assert decision.action == "stop"
    assert decision.why == "the same failure at step 57 in 2 attempts: it would occur again"
    assert after(BOOM, at(BOOM, 58)).action == "restart"
    assert after(BOOM, at(BOOM, 57, cause="KeyError: 'x'")).action == "restart"
    assert after(KILLED, KILLED).action == "restart"
    assert after(LOST, LOST).action == "restart"


def test_the_budget_and_the_back_off() -> None:
    failures = [at(KILLED, step) for step in (10, 20, 30, 40)]
    waits = [after(*failures[:count]).wait_s for count in (1, 2, 3)]
    assert waits == [10, 20, 25]
    last = after(*failures)
    assert last.action == "stop"
    assert last.why == "3 restarts in a row without a new checkpoint (launch.max_restarts=3)"


def test_a_new_checkpoint_gives_the_budget_back() -> None:
    history: list[AttemptRecord] = []
    for step in range(10, 200, 10):
        history.append(dataclasses.replace(KILLED, last_step=step, new_checkpoint=True))
        decision = after(*history)
        assert (decision.action, decision.restart, decision.wait_s) == ("restart", 1, 10)
    for restart in (2, 3):
        history.append(at(KILLED, 201))
        assert after(*history).restart == restart
    assert after(*history, at(KILLED, 202)).action == "stop"


def test_the_hosts_own_oom_killer_once() -> None:
    killed = at(BOOM, 57, kind="oom", name="kernel_oom")
    assert after(killed).action == "restart"
    assert after(killed, at(killed, 90)).action == "stop"


NAN = ended("nan", "loss is nan", first_step=50, last_step=56, saved_step=50, step=57)


def test_divergence() -> None:
    assert (after(NAN).action, after(NAN).skip_steps) == ("restart", ())
    stopped = after(NAN, NAN)
    assert stopped.action == "stop"
    assert "diverged at step 57 again" in stopped.why
    assert after(NAN, NAN, on_divergence="skip").skip_steps == (57,)
    assert after(NAN, NAN, on_divergence="rollback").skip_steps == tuple(range(51, 58))
    elsewhere = at(NAN, 56, step=60)
    assert after(NAN, elsewhere, on_divergence="skip").skip_steps == ()
    unknown = at(NAN, 56, step=None)
    assert after(unknown, unknown, on_divergence="skip").action == "stop"


def states(*pairs: tuple[str, int]) -> dict[int, dict[str, Any]]:
    return {rank: {"state": state, "step": step} for rank, (state, step) in enumerate(pairs)}


def test_a_hang_is_seen() -> None:
    detector = HangDetector(None)
    detector.update(states(("training", 4), ("training", 4)), 50.0)
    detector.update(states(("training", 5), ("training", 5)), 100.0)
    assert detector.stuck_s(699.0) is None
    assert detector.stuck_s(701.0) == 601.0
    detector.update(states(("training", 5), ("training", 6)), 702.0)
    assert detector.stuck_s(1301.0) is None
    for step_s in (1.0, 100.0, 100.0):
        detector.add_step_time(step_s, 702.0)
    assert detector.timeout_s() == 2000.0


def test_the_first_step_may_take_long() -> None:
    """Of an attempt that goes on from step 120, too; and slow steps need no logged one."""
    for timeout_s, limit_s in ((None, 600.0), (30.0, 30.0)):
        detector = HangDetector(timeout_s)
        detector.update(states(("loading", 0), ("loading", 0)), 0.0)
        detector.update(states(("training", 120), ("training", 120)), 50.0)
        assert detector.timeout_s() == 6 * limit_s
        detector.update(states(("training", 121), ("training", 120)), 60.0)
        assert detector.timeout_s() == limit_s
    slow = HangDetector(None)
    for step in range(4):
        slow.update(states(("training", step), ("training", step)), 100.0 + 500.0 * step)
    assert slow.timeout_s() == 20 * 500.0


def test_a_hang_is_not_seen_where_none_can_be() -> None:
    for first in ("loading", "starting", "failed"):
        detector = HangDetector(5.0)
        detector.update(states((first, 0), ("training", 0)), 0.0)
        assert detector.stuck_s(1e6) is None
    never = HangDetector(0)
    never.update(states(("training", 1)), 0.0)
    assert never.stuck_s(1e6) is None
    saving = HangDetector(5.0)
    saving.update(states(("saving", 9), ("finished", 9)), 0.0)
    assert saving.stuck_s(29.0) is None
    assert saving.stuck_s(31.0) == 31.0


DUMP = """step 5
Thread 0x00007f01 (most recent call first):
  File "/x/llmx/train/status.py", line 90 in _beat

Current thread 0x00007f02 (most recent call first):
{frames}
  File "/x/llmx/worker.py", line 60 in main
"""
COLLECTIVE = '  File "/x/torch/distributed/distributed_c10d.py", line 2810 in all_reduce'
READING = '  File "/x/llmx/data/store.py", line 12 in read'


def test_who_is_waited_for() -> None:
    waiting, reading = DUMP.format(frames=COLLECTIVE), DUMP.format(frames=READING)
    assert main_stack(reading).splitlines()[1] == READING
    same = states(("training", 5), ("training", 5))
    fresh = {0: 1.0, 1: 2.0}
    assert find_stuck_rank(same, {0: waiting, 1: waiting}, fresh) == (None, "")
    assert find_stuck_rank(same, {0: waiting}, fresh)[0] == 1  # stopped: it writes no stack
    assert find_stuck_rank(same, {}, {0: 1.0, 1: 61.0})[0] == 1
    behind = states(("training", 6), ("training", 5))
    assert find_stuck_rank(behind, {}, fresh) == (1, "it is at step 5, others are at step 6")
    rank, why = find_stuck_rank(same, {0: reading, 1: waiting}, fresh)
    assert rank == 0
    assert why == "the others wait in a collective, it is in read (/x/llmx/data/store.py:12)"


def test_a_hang_is_a_verdict_of_its_own() -> None:
    plan = make_plan(experiment("ssh", (2, 1)))
    hang = Hang(100.0, 61.0, 5, 2, "its process has been stopped for 61 s", "stack")
    outcome = classify(Evidence(statuses=states(("training", 5)), hang=hang), plan)
    assert (outcome.kind, outcome.rank, outcome.host) == ("hang", 2, "node-b")
    assert "no rank made progress for 61 s after step 5; rank 2 on node-b: its" in outcome.cause
    # What the ranks say when they are ended for it does not count.
    asked = {0: {"state": "interrupted", "time": 103.0}}
    evidence = Evidence(statuses=asked, hang=hang, ended_at=102.0)
    assert classify(evidence, plan).kind == "hang"
    error = {"type": "ValueError", "message": "x", "category": "crash", "time": 50.0, "step": 7}
    failed = {1: {"state": "failed", "error": error}}
    outcome = classify(Evidence(statuses=failed, hang=hang), plan)
    assert (outcome.kind, outcome.step) == ("crash", 7)


def test_fewer_hosts_at_the_same_global_batch() -> None:
    exp = experiment("ssh", (2, 1))
    exp.model.tokenizer = "demo"
    plan = make_plan(exp)
    smaller, planned = without_hosts(exp, plan, {"node-a"})
    assert [host.name for host in planned.hosts] == ["node-b"]
    assert planned.batch.global_batch == plan.batch.global_batch
    assert planned.master_addr == plan.hosts[1].address
    assert smaller.batch.global_batch == plan.batch.global_batch
    with pytest.raises(ConfigError, match="cannot be cut into equal micro steps of 2 ranks"):
        without_hosts(exp, plan, {"node-b"})  # 3 samples; 1 at once is what the user allows
    exp.batch.micro_batch = 2
    again = without_hosts(exp, plan, {"node-b"})[1]
    assert (again.world_size, again.batch.global_batch) == (2, plan.batch.global_batch)
    with pytest.raises(ConfigError, match="no host is left"):
        without_hosts(exp, plan, {"node-a", "node-b"})


@pytest.mark.parametrize("sums", ["fp32", "bf16"])
def test_fewer_hosts_sum_gradients_as_before(sums: str) -> None:
    exp = experiment("ssh", (2, 1))
    exp.model.tokenizer = "demo"
    exp.zero.stage, exp.precision = 2, "auto"
    plan = make_plan(exp)
    assert (plan.precision, plan.grad_accum_dtype) == ("bf16", "fp32")  # auto, with this memory
    plan = dataclasses.replace(plan, grad_accum_dtype=sums)  # as it would be with less
    smaller, planned = without_hosts(exp, plan, {"node-a"})
    assert planned.grad_accum_dtype == sums
    assert make_plan(smaller).grad_accum_dtype == sums
    exp.hardware.devices["v100"] = dataclasses.replace(
        exp.hardware.devices["a100"], precisions=["fp32", "fp16"]
    )
    exp.hardware.hosts[1].device = "v100"
    with pytest.raises(ConfigError, match="would train in fp16 instead of bf16"):
        without_hosts(exp, plan, {"node-a"})


def test_the_identity_is_kept(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    made = write_identity(run_dir)
    assert write_identity(run_dir) == made == read_json(run_dir.identity)["run_id"]
    run_dir.identity.write_text('{"run_id": "0123456789abcdef", "created": 1, "parent": null}')
    assert write_identity(run_dir) == "0123456789abcdef"
    # Of somebody else's run directory: it would become a part of a command of Slurm.
    run_dir.identity.write_text('{"run_id": "x\\"; system(\\"id\\") \\"", "created": 1}')
    assert write_identity(run_dir).isalnum()


def test_the_token_is_secret_and_kept(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    token = run_token(run_dir)
    assert run_token(run_dir) == token
    (path,) = tmp_path.glob(".token-*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    run_dir.identity.unlink()  # a copy becomes a run of its own
    assert run_token(run_dir) != token


def test_one_supervisor_a_run(tmp_path: Path) -> None:
    """Also against another process, and against a copy of the run directory."""
    run_dir, token = RunDir(tmp_path / "run"), write_identity(RunDir(tmp_path / "run"))
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from llmx.launch.supervision.journal import supervisor_lock\n"
        "from llmx.run.rundir import RunDir\n"
        "with supervisor_lock(RunDir(Path(sys.argv[1])), sys.argv[2]):\n"
        "    print('held', flush=True)\n    sys.stdin.readline()\n"
    )
    argv = [sys.executable, "-c", code, str(run_dir.root), token]
    first = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(LaunchError, match=f"process {first.pid} on "):
            supervisor_lock(run_dir, token).__enter__()
        with pytest.raises(LaunchError, match="is a copy of it. Remove run.json"):
            supervisor_lock(RunDir(tmp_path / "copy"), token).__enter__()
    finally:
        first.kill()
        first.wait()
    with supervisor_lock(run_dir, token):
        assert json.loads(run_dir.supervisor_lock.read_text())["host"]


def test_records(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    journal = Journal(run_dir)
    journal.state("waiting", attempt=2, why="a host was lost", until=5.0)
    state = read_json(run_dir.supervisor)
    assert (state["state"], state["attempt"], state["until"]) == ("waiting", 2, 5.0)
    journal.add_attempt({"attempt": 1, "decision": "restart"})
    with run_dir.attempts.open("a") as stream:
        stream.write('{"attempt": 2, "dec')  # torn by a crash
    later = Journal(run_dir)
    later.add_attempt({"attempt": 3, "decision": "finished"})
    assert [line["attempt"] for line in read_attempts(run_dir)] == [1, 3]
    assert later.restarts == 1
    assert read_resume(run_dir) == (None, [])
    write_resume(run_dir, step=120, skip_steps=[132, 131, 132], attempt=4)
    assert read_resume(run_dir) == (120, [131, 132])
    assert read_json(run_dir.resume)["attempt"] == 4


def hosts_of(directory: Path, stream: io.StringIO, **launch: Any) -> HostSelection:
    """node-a is here, node-b refuses every connection."""
    exp = experiment("ssh", (1, 1), "cpu", **launch)
    exp.model.tokenizer, exp.run_dir = "demo", str(directory)
    exp.batch.global_batch, exp.batch.accumulation = 4, None
    near, far = exp.hardware.hosts
    near.address, far.address, far.ssh_port = "127.0.0.1", "127.0.0.2", 1
    run_dir = RunDir(directory)
    spec = dataclasses.replace(spec_of(exp), run_dir=run_dir)
    log = RunLog(run_dir.supervisor_log, Console(stream))
    return HostSelection(spec, Backoff(log, Journal(run_dir), ShutdownRequest()))


def test_a_host_that_is_away(tmp_path: Path) -> None:
    """Real ssh, to a port where nobody listens."""
    stream = io.StringIO()
    waited = hosts_of(tmp_path, stream, host_wait_s=0.2).select()
    assert waited is not None
    assert waited.cause == "node-b did not come back within 0:00 (launch.host_wait_s)"
    assert "launch.elastic=true" in waited.fix
    assert stream.getvalue() == "waiting for node-b to answer over ssh, 0:00 at most\n"

    elastic = hosts_of(tmp_path, stream, host_wait_s=0.2, elastic=True)
    elastic.full_spec.exp.model.kind = "llama"
    elastic.full_spec.exp.model.config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
    }
    assert elastic.select() is None
    assert elastic.spec.plan.world_size == 1
    assert Plan.from_dict(read_json(elastic.spec.run_dir.plan)) == elastic.spec.plan
    written = read_json(elastic.spec.run_dir.ds_config)
    assert written["train_batch_size"] == 4
    assert written == ds_config(
        elastic.spec.exp.model, elastic.spec.exp.zero, elastic.spec.exp.optim, elastic.spec.plan
    )
    # Buckets follow the model's width, as at the first attempt; without it they would be 4096^2.
    assert written["zero_optimization"]["reduce_bucket_size"] == 2_000_000
    assert stream.getvalue().splitlines()[-1] == (
        "continuing without node-b (launch.elastic): 1 rank, the same global batch of 4 in 4 micro "
        "steps"
    )
    # The next time, too: it is looked for once more, but not waited for.
    assert elastic.select() is None
    assert elastic.spec.plan.world_size == 1

    impossible = hosts_of(tmp_path, stream, host_wait_s=0.2, elastic=True)
    impossible.full_spec.exp.precision = "auto"
    impossible.full_spec.exp.model.tokenizer = None
    gone = impossible.select()
    assert gone is not None
    assert gone.kind == "host_lost"
    assert "the run cannot continue without node-b: model.tokenizer" in stream.getvalue()
