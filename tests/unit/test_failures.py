"""Known failures, by the messages as they are really printed.

``pytest tests/unit/test_failures.py``
"""

# Messages stand as they are printed, however long.
# ruff: noqa: E501
from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.explain import HARMLESS
from llmx.config import known_keys
from llmx.failures.catalogue import ROWS
from llmx.failures.diagnose import (
    OUTCOMES,
    OWN_ERRORS,
    Failure,
    diagnose,
    find_failure,
    signal_in_log,
    signal_of_silent_death,
)
from llmx.failures.page import markdown
from llmx.failures.row import Row, Weight
from llmx.launch.supervision.classify import classify
from llmx.launch.supervision.outcome import Evidence
from llmx.plan import make_plan
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, read_json
from llmx.train.status import RankStatus
from tests.unit.test_launch_render import experiment


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Ranks 0 and 1 on node-a, rank 2 on node-b."""
    return make_plan(experiment("pdsh", (2, 1)))


MESSAGES = [(row, message) for row in ROWS for message in row.messages]


@pytest.mark.parametrize(("row", "message"), MESSAGES, ids=[row.name for row, _ in MESSAGES])
def test_known_messages(row: Row, message: str) -> None:
    """As text, with harmless lines before and after it, and as a rank reports it."""
    kind, _, rest = message.partition(": ")
    noise = "\n".join(HARMLESS)
    for failure in (
        Failure(log=f"some line\n{message}\n"),
        Failure(log=f"{noise}\n{message}\n{noise}"),
        Failure(error_type=kind, message=rest, log=noise),
        Failure(error_type=kind, message=rest, category="crash"),
        Failure(error_type=kind, message=rest, category=row.outcome),
    ):
        found = diagnose(failure)
        assert (found.name, found.outcome) == (row.name, row.outcome)
        assert found.cause
        assert found.fix
        assert not re.search(r"\{\w+\}", found.cause + found.fix)


@pytest.mark.parametrize(("row", "message"), MESSAGES, ids=[row.name for row, _ in MESSAGES])
def test_known_messages_as_they_arrive_in_a_run(row: Row, message: str, plan: Plan) -> None:
    """In the file of a rank that failed, while another rank reports what followed from it."""
    error = {"type": message.partition(": ")[0], "message": message.partition(": ")[2],
             "traceback": f"Traceback (most recent call last):\n  File \"x.py\", line 1\n{message}\n",
             "category": "", "time": 100.0}  # fmt: skip
    reset = "RuntimeError: [../gloo/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1"
    lost = {**error, "type": "RuntimeError", "message": reset, "traceback": reset, "time": 99.0}
    statuses = {
        0: {"state": "failed", "time": 99.0, "error": lost},
        1: {"state": "failed", "time": 100.0, "error": error},
    }
    found = classify(Evidence(statuses=statuses, launcher_log="\n".join(HARMLESS)), plan)
    if row.weight < Weight.CONSEQUENCE:
        assert (found.name, found.rank) == (row.name, 1)
    else:
        assert found.rank == 0


def test_what_nccl_prints_before_python_raises(plan: Plan) -> None:
    """The error of the rank has no more than ``unhandled system error``; its log has the cause."""
    raised = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error"
    error = {
        "type": "DistBackendError",
        "message": raised,
        "traceback": f'Traceback (most recent call last):\n  File "x.py"\n{raised}',
        "category": "",
        "time": 1.0,
    }
    statuses = {0: {"state": "failed", "time": 1.0, "error": error}}
    for printed, name in (
        ("node-a:7:7 [0] bootstrap.cc:37 NCCL WARN Bootstrap : no socket interface found", "interface_missing"),
        ("node-a:7:7 [0] init.cc:99 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000", "gpu_twice"),
        ("node-a:7:7 [0] shm.h:28 NCCL WARN Call to posix_fallocate failed: No space left on device", "shm_full"),
    ):  # fmt: skip
        log = f"{printed}\n{error['traceback']}"
        assert classify(Evidence(statuses=statuses, rank_logs={0: log}), plan).name == name


def test_rows_are_typed_and_named_once() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {row.outcome for row in ROWS} <= set(OUTCOMES)
    assert all(row.messages for row in ROWS)


def test_keys_of_llmx_that_rows_name_exist() -> None:
    groups = "adapter|batch|checkpoint|data|hardware|launch|model|optim|task|tracking|zero"
    names = set(known_keys())
    for row in ROWS:
        for key in re.findall(rf"(?<![\w.])(?:{groups})\.[a-z_.]+[a-z_]", row.llmx):
            key = re.sub(r"\.(env)\..*", r".\1", key)
            assert key in names, f"{row.name}: {key}"


def test_the_page_of_all_failures_is_current(golden) -> None:
    """docs/failures.md: ``make docs`` (or recording the golden files) writes it anew."""
    golden("../../docs/failures.md", markdown())


def test_groups_are_filled_in() -> None:
    found = diagnose(Failure(log="ssh: connect to host 10.0.0.2 port 2202: Connection refused"))
    assert "10.0.0.2 port 2202" in found.cause


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("Traceback (most recent call last):\n  File \"x.py\", line 1, in f\nKeyError: 'frobnicate'\n[ERROR] [launch.py:325:sigkill_handler] ['python'] exits with return code = 1", "KeyError: 'frobnicate'"),
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   File \"x.py\"\n[rank1]: ZeroDivisionError: division by zero\n[rank0]: Traceback (most recent call last):\n[rank0]:   File \"x.py\"\n[rank0]: RuntimeError: Connection reset by peer", "ZeroDivisionError: division by zero"),
        ("ERROR:root:the frob is broken\nERROR:torch.distributed.elastic:failed (exitcode: 1) local_rank: 1 (pid: 12202) of binary: python", "ERROR:root:the frob is broken"),
    ],
)  # fmt: skip
def test_of_an_unknown_failure_the_true_error_is_shown(log: str, line: str) -> None:
    found = diagnose(Failure(log=log))
    assert (found.name, found.cause) == ("", line)


def test_harmless_lines_alone_are_no_failure() -> None:
    assert find_failure("\n".join(HARMLESS)) is None


def test_the_first_error_is_the_cause() -> None:
    """Of several ranks; what another rank saw of it before does not count."""
    log = (
        "[rank0]: Traceback (most recent call last):\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank0]:   File "x.py", line 3, in reduce\n'
        '[rank1]:   File "x.py", line 3, in step\n'
        "[rank0]: RuntimeError: Broken pipe\n"
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "[rank2]: RuntimeError: CUDA error: device-side assert triggered\n"
    )
    match = find_failure(log)
    assert match is not None
    assert match.row is not None
    assert (match.row.name, match.lines[0].number) == ("cuda_oom", 6)


def test_what_the_rank_says_stands() -> None:
    """A message may mention a word of the catalogue and mean something else."""
    found = diagnose(
        Failure(error_type="DataError", message="row 3: No space left on device", category="data")
    )
    assert (found.outcome, found.name) == ("data", "")


@pytest.mark.parametrize(
    ("number", "oom_kills", "outcome", "word"),
    [
        (signal.SIGKILL, 1, "oom", "OOM killer"),
        (signal.SIGKILL, 0, "crash", "SIGKILL"),
        (signal.SIGBUS, 0, "disk_full", "/dev/shm"),
        (signal.SIGILL, 0, "config", "another type of CPU"),
        (signal.SIGSEGV, 0, "crash", "SIGSEGV"),
        (99, 0, "crash", "signal 99"),
    ],
)
def test_signals(number: int, oom_kills: int, outcome: str, word: str) -> None:
    found = diagnose(Failure(signal=number, oom_kills=oom_kills))
    assert found.outcome == outcome
    assert word in found.cause


def test_the_memory_limit_of_a_job() -> None:
    """Slurm kills as anybody does; only its own word says that it was the limit."""
    log = "srun: error: node-b: task 1: Killed\nslurmstepd: error: Detected 1 oom_kill event in StepId=1.0."
    found = diagnose(Failure(signal=signal_in_log(log), log=log))
    assert (found.outcome, found.name) == ("oom", "slurm_memory")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("[ERROR] [launch.py:335:sigkill_handler] ['python', '-u'] exits with return code = -9", 9),
        ("mpirun noticed that process rank 1 with PID 0 on node node-b exited on signal 9 (Killed).", 9),
        ("srun: error: node-b: task 1: Killed", 9),
        ("srun: error: node-b: task 1: Segmentation fault", 11),
        ("srun: error: node-b: tasks 2-3: Killed", 9),
        ("srun: error: node-b: tasks 0,2: Bus error", 7),
        ("pdsh@node-a: node-b: ssh exited with exit code 137", 9),
        ("[ERROR] ['python', '-u'] exits with return code = 1", 0),
        ("srun: error: node-b: task 1: Exited with exit code 1", 0),
        ("", 0),
    ],
)  # fmt: skip
def test_signals_in_launchers_logs(log: str, expected: int) -> None:
    assert signal_in_log(log) == expected


def test_a_rank_without_a_log_was_not_killed_for_all_we_know() -> None:
    assert signal_of_silent_death("") == 0
    assert signal_of_silent_death("step 3\n") == signal.SIGKILL


@given(st.text(), st.text(), st.text(), st.sampled_from(["", "crash", "nonsense", *OUTCOMES]))
def test_always_an_answer(kind: str, message: str, log: str, category: str) -> None:
    found = diagnose(Failure(error_type=kind, message=message, log=log, category=category))
    assert found.outcome in OUTCOMES
    assert found.cause.strip() or kind.strip() == message.strip() == ""
    assert found.fix or kind in OWN_ERRORS


def test_a_row_of_the_catalogue_does_not_replace_an_error_of_llmx() -> None:
    said = "rows.jsonl, line 41: not JSON (Expecting value). Correct the line."
    trace = f"Traceback (most recent call last):\n  File 'x'\nllmx.errors.RecordError: {said}"
    found = diagnose(Failure("RecordError", said, trace, "data", log=trace))
    assert (found.outcome, found.cause, found.name) == ("data", said, "")


def test_an_error_of_llmx_is_its_message_which_has_the_fix() -> None:
    said = "data.seq_len=4096: the model has 512 positions. Set data.seq_len=512."
    found = diagnose(Failure(error_type="ConfigError", message=said, category="config"))
    assert (found.outcome, found.cause, found.fix) == ("config", said, "")


def test_damaged_checkpoints_are_named_with_what_can_be_done() -> None:
    said = (
        "None of the 1 checkpoints in /runs/x/checkpoints can be used (step 50: "
        "rank-00001.safetensors: damaged, it has 401 bytes, expected 4001 bytes)."
    )
    found = diagnose(
        Failure(
            error_type="CheckpointError",
            message=said,
            traceback=f"Traceback (most recent call last):\n  ...\nllmx.checkpoint.manifest.CheckpointError: {said}",
            category="data",
        )
    )
    assert (found.outcome, found.cause) == ("data", f"CheckpointError: {said}")
    for words in ("--check", "good copy", "step=N", "step=0"):
        assert words in found.fix


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("NCCL error in: ../NCCLUtils.hpp:133, invalid argument, NCCL version 2.14.3\nInvalid config blocking attribute value -2147483648", "nccl_two_builds"),
        ("[enforce fail at ../gloo/transport/tcp/device.cc:208] ifa != nullptr. Unable to find address for: eth0", "interface_missing"),
        ("NCCL error in: ProcessGroupNCCL.cpp:1691, invalid usage, NCCL version 2.19.3\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000", "gpu_twice"),
        ("NCCL error in: ProcessGroupNCCL.cpp:400, internal error\nLast error:\nBootstrap : no socket interface found", "interface_missing"),
        ("Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error", "gloo_mesh"),
        ("[../gloo/transport/tcp/pair.cc:144] connectFullMesh failed, Connection refused, remote=[127.0.1.1]:34123", "gloo_loopback"),
    ],
)  # fmt: skip
def test_errors_of_communication_through_the_file_of_a_rank(
    message: str, name: str, plan: Plan, tmp_path: Path
) -> None:
    """As rank 1 writes it; the other one saw its connection break before, by its clock."""
    run_dir = RunDir(tmp_path)
    for rank, text in ((0, "Connection reset by peer"), (1, message)):
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            RankStatus(run_dir, rank=rank).fail(error)
    statuses = {rank: read_json(run_dir.rank_status(rank)) for rank in (0, 1)}
    outcome = classify(Evidence(statuses=statuses), plan)
    assert (outcome.name, outcome.rank) == (name, 1)


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank1]: ", "[default0]:", "0: ", "node-a: ", "trainer-1  | ", "[1,0]<stderr>:",
        "2026-01-01T00:00:0{n}.1234567Z stderr F ", "[2026-01-01 00:00:0{n}] ",
        "Nov 25 18:29:0{n} node-a train[12]: ", "\x1b[36m(Worker pid=9, ip=10.0.0.1)\x1b[0m ",
    ],
)  # fmt: skip
def test_prefixes_of_ranks_hosts_and_times(prefix: str) -> None:
    lines = [
        "  3%|3         | 1/30 [00:01<00:20]Traceback (most recent call last):",
        '  File "x.py", line 3, in f',
        "    torch.load(path)",
        "OSError: [Errno 28] No space left on device",
    ]
    match = find_failure("\n".join(f"{prefix.format(n=n)}{line}" for n, line in enumerate(lines)))
    assert match is not None
    assert match.row is not None
    assert (match.row.name, match.line) == ("disk_full", lines[-1])
