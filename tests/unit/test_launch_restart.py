"""Whether a run is started again: the decision, hangs, fewer hosts, and the records."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from llmx.config.schema import Experiment, LaunchConfig, TaskConfig
from llmx.errors import ConfigError, LaunchError
from llmx.failures.diagnose import Failure
from llmx.launch.agents.agent import _disk_free as agent_disk_free
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision import supervisor as supervisor_module
from llmx.launch.supervision.attempt import local_disk_failure
from llmx.launch.supervision.backoff import Backoff, HostSelection, disk_problem, without_hosts
from llmx.launch.supervision.console import Console, RunLog
from llmx.launch.supervision.journal import (
    Journal,
    append_line,
    read_attempts,
    read_resume,
    supervisor_lock,
    write_resume,
)
from llmx.launch.supervision.outcome import AttemptRecord
from llmx.launch.supervision.progress import Progress, find_stuck_rank, main_stack
from llmx.launch.supervision.restart import Decision, decide
from llmx.launch.supervision.signals import ShutdownRequest
from llmx.launch.supervision.supervisor import Supervisor
from llmx.plan import ds_config, make_plan
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, read_json
from llmx.run.snapshot import run_token, write_identity
from tests.launches import experiment, spec_of

LAUNCH = LaunchConfig(max_restarts=3, restart_backoff_s=10, restart_backoff_max_s=25)


def ended(kind: str, cause: str = "", *, name: str = "", **steps: Any) -> AttemptRecord:
    """An attempt that is over."""
    outcome = {key: steps.pop(key) for key in ("step", "lost_hosts") if key in steps}
    return AttemptRecord(Failure(kind, cause, name=name, **outcome), **steps)


BOOM = ended("crash", "ValueError: boom 17", first_step=0, last_step=57)
KILLED = ended("crash", "SIGKILL", name="killed", first_step=0, last_step=57)
LOST = ended("host_lost", "node-b", first_step=0, last_step=3, lost_hosts=("node-b",))
GONE = ended("host_lost", "node-b: no route", launched=False, lost_hosts=("node-b",))
START = dataclasses.replace(BOOM, first_step=None, last_step=None)
NAN = ended("nan", "loss is nan", first_step=50, last_step=56, saved_step=50, step=57)


def after(*history: AttemptRecord, launch: LaunchConfig = LAUNCH, **task: Any) -> Decision:
    return decide(history, launch, TaskConfig(**task))


def at(record: AttemptRecord, last_step: int | None, **outcome: Any) -> AttemptRecord:
    """The attempt with another last step, or outcome."""
    changed = dataclasses.replace(record.outcome, **outcome)
    return dataclasses.replace(record, outcome=changed, last_step=last_step)


OOM_HOST = at(BOOM, 57, kind="oom", name="kernel_oom")


@pytest.mark.parametrize(
    ("history", "action", "why"),
    [
        ([ended("ok")], "finished", ""),
        ([KILLED, ended("interrupted")], "stop", ""),
        # It would come again.
        *(([at(BOOM, 57, kind=kind)], "stop", "again") for kind in ("config", "data", "oom")),
        # An error before the first step recurs; a killed process or a lost connection does not.
        ([START], "stop", "before the first step"),
        *(([at(START, None, kind=k)], "restart", "") for k in ("comm", "host_lost", "orphaned")),
        ([at(START, None, name="killed")], "restart", ""),
        # Later, when an earlier attempt has trained, it gets one more try.
        ([KILLED, START], "restart", ""),
        ([KILLED, START, START], "stop", "before the first step in 2 attempts"),
        # Not launched: at first it is the user's to see; later a host may just be away.
        ([GONE], "stop", ""),
        # The same failure at the same step; another number is the same one.
        (
            [BOOM, at(BOOM, 57, cause="ValueError: boom 18")], "stop",
            "the same failure at step 57 in 2 attempts: it would occur again",
        ),
        ([BOOM, at(BOOM, 58)], "restart", ""),
        ([BOOM, at(BOOM, 57, cause="KeyError: 'x'")], "restart", ""),
        ([KILLED, KILLED], "restart", ""),
        ([LOST, LOST], "restart", ""),
        # The host's own OOM killer, once.
        ([OOM_HOST], "restart", ""),
        ([OOM_HOST, at(OOM_HOST, 90)], "stop", "2 times"),
    ],
)  # fmt: skip
def test_what_follows(history: list[AttemptRecord], action: str, why: str) -> None:
    decision = after(*history)
    assert decision.action == action
    assert why in decision.why


def test_what_may_pass_is_tried_again() -> None:
    waits_for = {"host_lost": "hosts", "disk_full": "disk"}
    for outcome in ("crash", "comm", "host_lost", "hang", "disk_full", "nan"):
        decision = after(at(BOOM, 57, kind=outcome))
        assert (decision.action, decision.restart, decision.wait_s) == ("restart", 1, 10)
        assert decision.wait_for == waits_for.get(outcome, "")
    assert (after(KILLED, GONE).action, after(KILLED, GONE).wait_for) == ("restart", "hosts")


def test_the_budget_and_the_back_off() -> None:
    assert after(KILLED, launch=LaunchConfig(max_restarts=0)).why == "launch.max_restarts=0"
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


def test_divergence() -> None:
    assert (after(NAN).action, after(NAN).skip_steps) == ("restart", ())
    stopped = after(NAN, NAN)
    assert stopped.action == "stop"
    assert "diverged at step 57 again" in stopped.why
    assert after(NAN, NAN, on_divergence="skip").skip_steps == (57,)
    assert after(NAN, NAN, on_divergence="rollback").skip_steps == tuple(range(51, 58))
    assert after(NAN, at(NAN, 56, step=60), on_divergence="skip").skip_steps == ()
    unknown = at(NAN, 56, step=None)
    assert after(unknown, unknown, on_divergence="skip").action == "stop"


def states(*pairs: tuple[str, int]) -> dict[int, dict[str, Any]]:
    return {rank: {"state": state, "step": step} for rank, (state, step) in enumerate(pairs)}


def training(*steps: int) -> dict[int, dict[str, Any]]:
    return states(*(("training", step) for step in steps))


def test_a_hang_is_seen() -> None:
    progress = Progress(hang_timeout_s=None)
    progress.update(training(4, 4), 50.0)
    progress.update(training(5, 5), 100.0)
    assert progress.stuck_s(699.0) is None
    assert progress.stuck_s(701.0) == 601.0
    progress.update(training(5, 6), 702.0)
    assert progress.stuck_s(1301.0) is None
    for step_s in (1.0, 100.0, 100.0):
        progress.add_step_time(step_s, 702.0)
    assert progress.timeout_s() == 2000.0


def test_the_first_step_may_take_long() -> None:
    """Of an attempt that goes on from step 120, too; and slow steps need no logged one."""
    for timeout_s, limit_s in ((None, 600.0), (30.0, 30.0)):
        progress = Progress(hang_timeout_s=timeout_s)
        progress.update(states(("loading", 0), ("loading", 0)), 0.0)
        progress.update(training(120, 120), 50.0)
        assert progress.timeout_s() == 6 * limit_s
        progress.update(training(121, 120), 60.0)
        assert progress.timeout_s() == limit_s
    slow = Progress(hang_timeout_s=None)
    for step in range(4):
        slow.update(training(step, step), 100.0 + 500.0 * step)
    assert slow.timeout_s() == 20 * 500.0


def test_a_step_is_overdue() -> None:
    """After ten usual ones, and 20 s; after 60 s where none has ended. Not while ranks save."""
    for step_s, limit_s in ((0.03, 20.0), (5.0, 50.0), (None, 60.0)):
        progress = Progress(hang_timeout_s=None)
        progress.update(training(3, 3), 100.0)
        if step_s is not None:
            progress.add_step_time(step_s, 100.0)
        assert progress.overdue_s(100.0 + limit_s - 1) is None
        assert progress.overdue_s(101.0 + limit_s) == 1 + limit_s
        progress.update(states(("saving", 3), ("training", 3)), 102.0)
        assert progress.overdue_s(500.0) is None


def test_a_hang_is_not_seen_where_none_can_be() -> None:
    for timeout_s, first in ((5.0, "loading"), (5.0, "starting"), (5.0, "failed"), (0, "training")):
        progress = Progress(hang_timeout_s=timeout_s)
        progress.update(states((first, 0), ("training", 0)), 0.0)
        assert progress.stuck_s(1e6) is None
    saving = Progress(hang_timeout_s=5.0)
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
    same, fresh = training(5, 5), {0: 1.0, 1: 2.0}
    assert find_stuck_rank(same, {0: waiting, 1: waiting}, fresh) == (None, "")
    assert find_stuck_rank(same, {0: waiting}, fresh)[0] == 1  # stopped: it writes no stack
    assert find_stuck_rank(same, {}, {0: 1.0, 1: 61.0})[0] == 1
    behind = find_stuck_rank(training(6, 5), {}, fresh)
    assert behind == (1, "it is at step 5, others are at step 6")
    rank, why = find_stuck_rank(same, {0: reading, 1: waiting}, fresh)
    assert rank == 0
    assert why == "the others wait in a collective, it is in read (/x/llmx/data/store.py:12)"


def two_and_one() -> Experiment:
    exp = experiment("ssh", (2, 1))
    exp.model.tokenizer = "demo"
    return exp


def test_fewer_hosts_at_the_same_global_batch() -> None:
    exp = two_and_one()
    plan = make_plan(exp)
    smaller, planned = without_hosts(exp, plan, {"node-a"})
    assert [host.name for host in planned.hosts] == ["node-b"]
    assert planned.master_addr == plan.hosts[1].address
    assert planned.batch.global_batch == smaller.batch.global_batch == plan.batch.global_batch
    with pytest.raises(ConfigError, match="cannot be cut into equal micro steps of 2 ranks"):
        without_hosts(exp, plan, {"node-b"})  # 3 samples; 1 at once is what the user allows
    exp.batch.micro_batch = 2
    again = without_hosts(exp, plan, {"node-b"})[1]
    assert (again.world_size, again.batch.global_batch) == (2, plan.batch.global_batch)
    with pytest.raises(ConfigError, match="no host is left"):
        without_hosts(exp, plan, {"node-a", "node-b"})


@pytest.mark.parametrize("sums", ["fp32", "bf16"])
def test_fewer_hosts_sum_gradients_as_before(sums: str) -> None:
    exp = two_and_one()
    exp.zero.stage, exp.precision = 2, "auto"
    plan = make_plan(exp)
    assert (plan.precision, plan.grad_accum_dtype) == ("bf16", "fp32")  # auto, with this memory
    plan = dataclasses.replace(plan, grad_accum_dtype=sums)  # as it would be with less
    smaller, planned = without_hosts(exp, plan, {"node-a"})
    assert planned.grad_accum_dtype == make_plan(smaller).grad_accum_dtype == sums
    exp.hardware.devices["v100"] = dataclasses.replace(
        exp.hardware.devices["a100"], precisions=["fp32", "fp16"]
    )
    exp.hardware.hosts[1].device = "v100"
    with pytest.raises(ConfigError, match="would train in fp16 instead of bf16"):
        without_hosts(exp, plan, {"node-a"})


def test_the_identity_and_the_secret_token_are_kept(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    token, made = run_token(run_dir), write_identity(run_dir)
    assert write_identity(run_dir) == made == read_json(run_dir.identity)["run_id"]
    assert run_token(run_dir) == token
    (path,) = tmp_path.glob(".token-*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # Of somebody else's run directory: it would become a part of a command of Slurm.
    run_dir.identity.write_text('{"run_id": "x\\"; system(\\"id\\") \\"", "created": 1}')
    assert write_identity(run_dir).isalnum()
    assert run_token(run_dir) != token, "a copy becomes a run of its own"


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; root only."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    made = subprocess.run(mount, capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_disk_that_has_become_read_only(small_disk: Path) -> None:
    spec = spec_of(experiment("local", (1,), "cpu"), run_dir=RunDir(small_disk))
    assert disk_problem(spec, None) == ""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert disk_problem(spec, None) == "cannot be written"
    assert agent_disk_free(str(small_disk)) == 0


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            continue


def test_a_full_disk_loses_no_attempt(small_disk: Path) -> None:
    """And a line is appended whole or not at all."""
    run_dir, lines = RunDir(small_disk), small_disk / "lines.jsonl"
    lines.write_text('{"n": 0}\n{"torn')
    journal = Journal(run_dir)
    journal.state("running", attempt=1)
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        append_line(lines, {"n": 1, "long": "x" * 5000})
    assert lines.read_text() == '{"n": 0}\n{"torn'
    append_line(lines, {"n": 2})  # there is room in its last block
    assert json.loads(lines.read_text().splitlines()[-1]) == {"n": 2}
    journal.add_attempt({"attempt": 1, "outcome": "disk_full"})
    journal.state("waiting", attempt=1, why="a disk was full")
    assert read_json(run_dir.supervisor)["state"] == "running"
    assert read_attempts(run_dir) == []
    assert (journal.restarts, len(journal.attempts)) == (0, 1)
    (small_disk / "filler").unlink()
    journal.state("preparing", attempt=2)
    journal.add_attempt({"attempt": 2, "outcome": "ok"})
    assert [line["attempt"] for line in read_attempts(run_dir)] == [1, 2]
    assert read_json(run_dir.supervisor)["state"] == "preparing"


def hosts_of(directory: Path, stream: io.StringIO, **launch: Any) -> HostSelection:
    """node-a is here, node-b refuses every connection."""
    exp = experiment("ssh", (1, 1), "cpu", host_wait_s=0.2, **launch)
    exp.model.tokenizer, exp.run_dir = "demo", str(directory)
    exp.batch.global_batch, exp.batch.accumulation = 4, None
    near, far = exp.hardware.hosts
    near.address, far.address, far.ssh_port = "127.0.0.1", "127.0.0.2", 1
    spec = spec_of(exp)
    log = RunLog(spec.run_dir.supervisor_log, Console(stream))
    return HostSelection(spec, Backoff(log, Journal(spec.run_dir), ShutdownRequest()))


def test_a_host_that_is_away(tmp_path: Path) -> None:
    """Real ssh, to a port where nobody listens."""
    stream = io.StringIO()
    waited = hosts_of(tmp_path, stream).select()
    assert waited is not None
    assert waited.cause == "node-b did not come back within 0:00 (launch.host_wait_s)"
    assert "launch.elastic=true" in waited.fix
    assert stream.getvalue() == "waiting for node-b to answer over ssh; giving up in 0:00\n"

    elastic = hosts_of(tmp_path, stream, elastic=True)
    elastic.full_spec.exp.model.kind = "llama"
    elastic.full_spec.exp.model.config = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 256,
    }  # fmt: skip
    assert elastic.select() is None
    assert elastic.spec.plan.world_size == 1
    assert Plan.from_dict(read_json(elastic.spec.run_dir.plan)) == elastic.spec.plan
    written, exp = read_json(elastic.spec.run_dir.ds_config), elastic.spec.exp
    assert written["train_batch_size"] == 4
    assert written == ds_config(exp.model, exp.zero, exp.optim, elastic.spec.plan)
    # Buckets follow the model's width, as at the first attempt; without it they would be 4096^2.
    assert written["zero_optimization"]["reduce_bucket_size"] == 2_000_000
    assert stream.getvalue().splitlines()[-1] == (
        "continuing without node-b (launch.elastic): 1 rank, the same global batch of 4 in 4 micro "
        "steps"
    )
    # The next time, too: it is looked for once more, but not waited for.
    assert elastic.select() is None
    assert elastic.spec.plan.world_size == 1
    impossible = hosts_of(tmp_path, stream, elastic=True)
    impossible.full_spec.exp.precision = "auto"
    impossible.full_spec.exp.model.tokenizer = None
    gone = impossible.select()
    assert gone is not None
    assert gone.kind == "host_lost"
    assert "the run cannot continue without node-b: model.tokenizer" in stream.getvalue()


class Scripted:
    """An attempt that ends as scripted, and records the step that it was to begin at."""

    script: ClassVar[list[AttemptRecord | OSError]] = []
    began: ClassVar[list[int | None]] = []
    monitor = None

    def __init__(self, *_: Any, step: int | None, **__: Any) -> None:
        self.step = step

    def run(self) -> AttemptRecord:
        self.began.append(self.step)
        end = self.script.pop(0)
        if isinstance(end, OSError):
            raise end
        return end


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchSpec:
    """Of a run whose attempts are scripted; real ones are in ``tests/integration``."""
    monkeypatch.setattr(supervisor_module, "Attempt", Scripted)
    Scripted.began = []
    exp = experiment("local", (1,), "cpu", restart_backoff_s=0.0)
    exp.run_dir, exp.tracking.kinds = str(tmp_path), []
    return spec_of(exp)


def test_where_it_was_told_to_begin_until_a_checkpoint_comes_after(spec: LaunchSpec) -> None:
    """Hosts with private disks still have the later ones, which the user went back from."""
    write_resume(spec.run_dir, step=120, skip_steps=[], attempt=1)
    killed = dataclasses.replace(KILLED, first_step=120, last_step=125, saved_step=120)
    saved = dataclasses.replace(killed, last_step=135, saved_step=130, new_checkpoint=True)
    Scripted.script = [killed, killed, saved, AttemptRecord(Failure("ok"))]
    result = Supervisor(spec, stream=io.StringIO()).run()
    assert (result.outcome, result.restarts) == ("ok", 3)
    assert Scripted.began == [120, 120, 120, None]


def test_a_disk_that_fails_between_two_attempts(spec: LaunchSpec) -> None:
    """There is a result, whatever happens to this process itself."""
    Scripted.script = [KILLED, OSError(errno.ESTALE, "Stale file handle", "/mnt/run/ssh_config")]
    stream, run_dir = io.StringIO(), spec.run_dir
    Supervisor(spec, stream=stream).run()
    written = read_json(run_dir.result)
    assert written["outcome"] == "disk_full"
    assert "/mnt/run/ssh_config: Stale file handle" in written["cause"]
    assert f"python -m llmx resume {run_dir.root}" in stream.getvalue()
    assert read_json(run_dir.supervisor)["state"] == "finished"
    assert [line["decision"] for line in read_attempts(run_dir)] == ["restart"]


def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    error = OSError(errno.EDQUOT, "Disk quota exceeded", "/x/y")
    full = local_disk_failure(error, RunDir(tmp_path))
    assert (full.kind, full.cause) == ("disk_full", "/x/y: Disk quota exceeded")
