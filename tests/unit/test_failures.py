"""Known failures, by the messages as they are really printed; and ``python -m llmx explain``."""

# Messages stand as they are printed, however long.
# ruff: noqa: E501
from __future__ import annotations

import io
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.explain import HARMLESS, judge, measure
from llmx.cli.main import main
from llmx.config import known_keys
from llmx.failures.diagnose import (
    NOTES,
    OUTCOMES,
    OWN_ERRORS,
    ROWS,
    diagnose,
    fill,
    find_failure,
    signal_in_log,
)
from llmx.failures.page import markdown
from llmx.failures.row import Row, Weight
from llmx.launch.supervision.classify import classify
from llmx.launch.supervision.outcome import Evidence
from llmx.plan import make_plan
from llmx.plan.types import Plan
from llmx.redact import redact
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.train.status import RankStatus
from tests import tracked_run
from tests.launches import experiment


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Ranks 0 and 1 on node-a, rank 2 on node-b."""
    return make_plan(experiment("pdsh", (2, 1)))


TRACEBACK = "Traceback (most recent call last):\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
RESET = "[../gloo/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1"
MESSAGES = [(row, message) for row in ROWS for message in row.messages]


def failed(kind: str, message: str, *, time: float = 1.0, **more: Any) -> dict[str, Any]:
    """The status of a rank."""
    trace = f'{TRACEBACK}  File "x.py", line 1\n{kind}: {message}'
    error = {"type": kind, "message": message, "traceback": trace, "category": "", "time": time}
    return {"state": "failed", "time": time, "error": {**error, **more}}


@pytest.mark.parametrize(("row", "message"), MESSAGES, ids=[row.name for row, _ in MESSAGES])
def test_known_messages(row: Row, message: str, plan: Plan) -> None:
    """As text, with harmless lines before and after it, as a rank reports it, and in the file of a
    rank that failed, while another rank reports what followed from it."""
    kind, _, rest = message.partition(": ")
    noise = "\n".join(HARMLESS)
    for found in (
        diagnose(f"some line\n{message}\n"),
        diagnose(f"{noise}\n{message}\n{noise}"),
        diagnose(noise, error_type=kind, message=rest),
        diagnose(error_type=kind, message=rest, category="crash"),
        diagnose(error_type=kind, message=rest, category=row.outcome),
    ):
        assert (found.name, found.kind) == (row.name, row.outcome)
        assert found.cause
        assert found.fix
        assert not re.search(r"\{\w+\}", found.cause + found.fix)
    trace = f'{TRACEBACK}  File "x.py", line 1\n{message}\n'
    statuses = {
        0: failed("RuntimeError", RESET, time=99.0),
        1: failed(kind, rest, time=100.0, traceback=trace),
    }
    outcome = classify(Evidence(statuses=statuses, launcher_log=noise), plan)
    if row.weight < Weight.CONSEQUENCE:
        assert (outcome.name, outcome.rank) == (row.name, 1)
    else:
        assert outcome.rank == 0


def test_what_nccl_prints_before_python_raises(plan: Plan) -> None:
    """The error of the rank has no more than ``unhandled system error``; its log has the cause."""
    raised = "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error"
    status = failed("torch.distributed.DistBackendError", raised)
    for printed, name in (
        ("bootstrap.cc:37 NCCL WARN Bootstrap : no socket interface found", "interface_missing"),
        ("shm.h:28 NCCL WARN Call to posix_fallocate failed: No space left on device", "shm_full"),
    ):
        log = f"node-a:7:7 [0] {printed}\n{status['error']['traceback']}"
        assert classify(Evidence(statuses={0: status}, rank_logs={0: log}), plan).name == name


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


def test_the_page_of_all_failures_has_each() -> None:
    page = markdown()
    assert re.findall(r"^### (\w+)$", page, re.M) == [row.name for row in ROWS]
    assert all(message in page for row in ROWS for message in row.messages)


def test_what_the_catalogue_says_is_no_credential() -> None:
    """Its texts are shown through ``redact``."""
    texts = [*NOTES.values(), *(text for row in ROWS for text in (row.cause, row.fix, row.llmx))]
    for text in map(fill, texts):
        assert redact(text) == text


POOL = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='{}', port=443): Max retries exceeded with url: /x"
DIRECT = "\n\nThe above exception was the direct cause of the following exception:\n\n"
HANDLING = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
FRAME = f"{TRACEBACK}  File 'x.py', line 3, in f\n"
GPU_2 = "CUDA out of memory. Tried to allocate 448.00 MiB. GPU 2 has a total capacity of 79.15 GiB of which 301.00 MiB is free. Of the allocated memory {} is allocated by PyTorch, and {} is reserved by PyTorch but unallocated."
NCCL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.26.2"


@pytest.mark.parametrize(
    ("log", "name", "said"),
    [
        # Of chained exceptions the last decides, unless it only wraps or names the one before.
        (f"{FRAME}KeyError: 'question'{HANDLING}{FRAME}TypeError: unsupported operand", "", "TypeError: unsupported operand"),
        (f"{FRAME}FileNotFoundError: [Errno 2] No such file or directory: 'c.pt'{HANDLING}{FRAME}{OOM}", "cuda_oom", OOM),
        (f"{FRAME}pyarrow.lib.ArrowInvalid: JSON parse error: Column(/x) changed from string to array in row 4{DIRECT}{FRAME}datasets.exceptions.DatasetGenerationError: An error occurred", "arrow_types", "ArrowInvalid"),
        (f"{FRAME}socket.gaierror: [Errno -3] Temporary failure in name resolution{DIRECT}{FRAME}{POOL.format('data.example.org')}", "network", "outside of this network"),
        ("  x error: subprocess-exited-with-error\n      Traceback (most recent call last):\n        File 'setup.py', line 22\n      ModuleNotFoundError: No module named 'torch'\n      [end of output]", "build_isolation", "--no-build-isolation"),
        # The lines of a vLLM engine have a prefix; what waits for it says less.
        (f"(EngineCore_DP0 pid=9) ERROR 02-08 14:20:12 [core.py:946] {TRACEBACK}(EngineCore_DP0 pid=9) ERROR 02-08 14:20:12 [core.py:946]   File 'x.py', line 9\n(EngineCore_DP0 pid=9) ERROR 02-08 14:20:13 [core.py:946] ZeroDivisionError: division by zero\n{FRAME}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}", "", "ZeroDivisionError: division by zero"),
        # A refusal belongs to the host that answered.
        ("wandb.errors.errors.CommError: failed to upsert bucket: returned error 401 Unauthorized: {}", "wandb_login", "Weights & Biases"),
        ("ValueError: API key must be 40 characters long, yours was 86", "wandb_login", "40 characters"),
        ("botocore.exceptions.ClientError: An error occurred (403) when calling the HeadObject operation: Forbidden", "access_denied", "object store"),
        ("requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://mlflow.corp.local/api", "access_denied", "mlflow.corp.local refuses"),
        ("requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/x/y", "hub_login", "on the Hub"),
        ("openai.RateLimitError: Error code: 429 - {'error': 'x'}", "hub_limit", "a server limits"),
        # A private address is not the internet.
        (POOL.format("192.168.10.15"), "local_server", "192.168.10.15:443"),
        (POOL.format("wandb.corp.internal"), "local_server", "wandb.corp.internal:443"),
        (POOL.format("data.example.org"), "network", "outside of this network"),
        (f"{TRACEBACK}  File '/x/trl/extras/vllm_client.py', line 9\nrequests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('Remote end closed'))", "vllm_server", "or it ended"),
        # Fragmented is what lies idle in a large part of the GPU.
        (f"torch.OutOfMemoryError: {GPU_2.format('76.92 GiB', '512.25 MiB')}", "cuda_oom", "is full"),
        (f"torch.OutOfMemoryError: {GPU_2.format('44.10 GiB', '31.85 GiB')}", "oom_fragmented", "fragmented"),
        # What NCCL names, and what another rank raised, comes before its general error.
        (f"{FRAME}{NCCL}\nLast error:\nCuda failure 2 'out of memory'", "cuda_oom", "is full"),
        (f"[rank0]: {TRACEBACK}[rank0]: {NCCL}\n[rank1]: {TRACEBACK}[rank1]: KeyError: 'expert-9'", "", "KeyError: 'expert-9'"),
        (f"{NCCL}\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer gpu-2<51412>", "peer_died", "broke"),
        (f"{FRAME}TypeError: unsupported format\nException in thread NetStatThr:\n{TRACEBACK}  File 'site-packages/wandb/x.py', line 2\nBrokenPipeError: [Errno 32] Broken pipe", "", "TypeError"),
        (f"^C{TRACEBACK}  File '/x/torch/utils/file_baton.py', line 49, in wait\nKeyboardInterrupt", "extension_lock", "lock file"),
        ("docker: Error response from daemon: manifest for x not found: manifest unknown.", "docker", "docker cannot"),
        ("docker: Error response from daemon: Bind for 0.0.0.0:8000 failed: port is already allocated.", "port_in_use", "a port"),
        ("docker: Error response from daemon: failed to create task: unknown\nnvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update", "driver_old", "too old"),
        # What a shell says of its own start-up does not explain a traceback.
        (f"/etc/profile.d/x.sh: line 12: /etc/modulefiles/list: Permission denied\n{FRAME}TypeError: build() missing 1 argument", "", "TypeError"),
        # Of several ranks the first error; what another one saw of it before does not count.
        (f"[rank0]: {TRACEBACK}[rank1]: {TRACEBACK}[rank0]: RuntimeError: Broken pipe\n[rank1]: {OOM}\n[rank2]: RuntimeError: CUDA error: device-side assert triggered", "cuda_oom", OOM),
        ("ERROR:root:the frob is broken\nERROR:torch.distributed.elastic:failed (exitcode: 1) local_rank: 1 (pid: 12202) of binary: python", "", "ERROR:root:the frob is broken"),
        # Of communication.
        (f"{FRAME}RuntimeError: NCCL error in: ../NCCLUtils.hpp:133, invalid argument, NCCL version 2.14.3\nInvalid config blocking attribute value -2147483648", "nccl_versions", ""),
        (f"{FRAME}RuntimeError: [enforce fail at ../gloo/transport/tcp/device.cc:208] ifa != nullptr. Unable to find address for: eth0", "interface_missing", "eth0"),
        (f"{FRAME}RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1691, invalid usage, NCCL version 2.19.3\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000", "gpu_twice", ""),
        (f"{FRAME}RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:400, internal error\nLast error:\nBootstrap : no socket interface found", "interface_missing", ""),
        (f"{FRAME}RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error", "gloo_mesh", ""),
        (f"{FRAME}RuntimeError: [../gloo/transport/tcp/pair.cc:144] connectFullMesh failed, Connection refused, remote=[127.0.1.1]:34123", "gloo_loopback", ""),
        ("ssh: connect to host 10.0.0.2 port 2202: Connection refused", "ssh_refused", "10.0.0.2 port 2202"),
        # What is like a known failure in one word only.
        ("OSError: [Errno 11] Resource temporarily unavailable", "", "OSError"),
        (f"[INFO|2026-01-05 10:00:00] llamafactory.hparams.parser:143 >> Set `ddp_find_unused_parameters` to False in DDP training since LoRA is enabled.\n[rank0]: {TRACEBACK}[rank0]: {OOM}", "cuda_oom", OOM),
        (f"[rank1]: {TRACEBACK}[rank1]: ZeroDivisionError: division by zero\n[rank0]: {TRACEBACK}[rank0]: RuntimeError: Connection reset by peer", "", "ZeroDivisionError"),
        ("RuntimeError: torch.cat(): expected a non-empty list of Tensors", "", "RuntimeError"),
        ("FileExistsError: [Errno 17] File exists: 'results/run1'", "", "FileExistsError"),
        ("ImportError: cannot import name 'helper' from 'utils' (/job/utils.py)", "", "ImportError"),
        ("google.api_core.exceptions.ResourceExhausted: Quota exceeded for GPUs", "", "Quota exceeded"),
    ],
)  # fmt: skip
def test_which_error_decides(log: str, name: str, said: str) -> None:
    found = diagnose(log=log)
    assert (found.name, said in found.cause + found.fix) == (name, True)


def test_harmless_lines_alone_are_no_failure() -> None:
    assert find_failure("\n".join(HARMLESS)) is None


def known_in(log: str) -> Any:
    match = find_failure(log)
    assert match is not None
    assert match.row is not None
    return match


DAMAGED = (
    "None of the 1 checkpoints in /runs/x/checkpoints can be used (step 50: "
    "rank-00001.safetensors: damaged, it has 401 bytes, expected 4001 bytes)."
)
LINE_41 = "rows.jsonl, line 41: not JSON (Expecting value). Correct the line."
SEQ_LEN = "data.seq_len=4096: the model has 512 positions. Set data.seq_len=512."


@pytest.mark.parametrize(
    ("kind", "said", "outcome", "cause", "fix"),
    [
        # A message may mention a word of the catalogue and mean something else.
        ("DataError", "row 3: No space left on device", "data", "row 3: No space left on device", ""),
        ("RecordError", LINE_41, "data", LINE_41, ""),
        # It has the fix.
        ("ConfigError", SEQ_LEN, "config", SEQ_LEN, ""),
        ("CheckpointError", DAMAGED, "data", f"CheckpointError: {DAMAGED}", "--check.*good copy.*step=N.*step=0"),
    ],
)  # fmt: skip
def test_what_a_rank_says_of_llmx_stands(
    kind: str, said: str, outcome: str, cause: str, fix: str
) -> None:
    trace = f"{TRACEBACK}  File 'x'\nllmx.errors.{kind}: {said}"
    found = diagnose(trace, error_type=kind, message=said, traceback=trace, category=outcome)
    assert (found.kind, found.cause, found.name) == (outcome, cause, "")
    assert re.fullmatch(f".*{fix}.*" if fix else "", found.fix)


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
    found = diagnose(signal=number, oom_kills=oom_kills)
    assert found.kind == outcome
    assert word in found.cause


def test_the_memory_limit_of_a_job() -> None:
    """Slurm kills as anybody does; only its own word says that it was the limit."""
    log = "srun: error: node-b: task 1: Killed\nslurmstepd: error: Detected 1 oom_kill event in StepId=1.0."
    found = diagnose(signal=signal_in_log(log), log=log)
    assert (found.kind, found.name) == ("oom", "slurm_memory")


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


@given(st.text(), st.text(), st.text(), st.sampled_from(["", "crash", "nonsense", *OUTCOMES]))
def test_always_an_answer(kind: str, message: str, log: str, category: str) -> None:
    found = diagnose(error_type=kind, message=message, log=log, category=category)
    assert found.kind in OUTCOMES
    assert found.cause.strip() or kind.strip() == message.strip() == ""
    assert found.fix or kind in OWN_ERRORS


def test_errors_of_communication_through_the_file_of_a_rank(plan: Plan, tmp_path: Path) -> None:
    """As rank 1 writes it; the other one saw its connection break before, by its clock."""
    run_dir = RunDir(tmp_path)
    for message, name in (
        ("[enforce fail at ../gloo/transport/tcp/device.cc:208] ifa != nullptr. Unable to find address for: eth0", "interface_missing"),
        ("NCCL error in: ProcessGroupNCCL.cpp:1691, invalid usage, NCCL version 2.19.3\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000", "gpu_twice"),
    ):  # fmt: skip
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
    match = known_in("\n".join(f"{prefix.format(n=n)}{line}" for n, line in enumerate(lines)))
    assert (match.row.name, match.line) == ("disk_full", lines[-1])


TORCHRUN = f"""\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 3, in <module>
[rank1]:     main()
[rank1]: {OOM}
E1128 12:00:01.000000 139 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 1 (pid: 42) of binary: /opt/bin/python
Traceback (most recent call last):
  File "/opt/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 42)
"""
ACCELERATE = f"""\
Traceback (most recent call last):
  File "/job/train.py", line 3, in <module>
    main()
{OOM}
  0%|          | 0/100 [00:02<?, ?it/s]
Traceback (most recent call last):
  File "/opt/bin/accelerate", line 8, in <module>
subprocess.CalledProcessError: Command '['/opt/bin/python', 'train.py']' returned non-zero exit status 1.
"""
DEEPSPEED = f"""\
[2026-01-05 10:00:00,123] [WARNING] [runner.py:220:fetch_hostfile] Unable to find hostfile, will proceed with training with local resources only.
node-b: Traceback (most recent call last):
node-a: RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer
node-b:   File "train.py", line 3, in <module>
node-b: {OOM}
node-b: [2026-01-05 10:00:09,820] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 1635
node-b: [2026-01-05 10:00:10,107] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', '--local_rank=1'] exits with return code = 1
pdsh@node-a: node-b: ssh exited with exit code 1
"""


@pytest.mark.parametrize(
    ("log", "line"),
    [(TORCHRUN, 4), (ACCELERATE, 4), (DEEPSPEED, 5)],
    ids=["torchrun", "accelerate", "deepspeed"],
)
def test_logs_of_other_programs(
    log: str, line: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(log)
    assert main(["explain", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("cause (oom): the GPU's memory is full\n")
    assert f"  line {line}: {OOM}\n" in shown
    assert "\nfix: " in shown
    assert "batch.micro_batch=1" in shown


def test_standard_input_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(TORCHRUN.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["explain", "-", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["known"], found["name"], found["outcome"]) == (True, "cuda_oom", "oom")
    assert found["lines"] == [{"number": 4, "text": OOM}]


@pytest.mark.parametrize(
    ("log", "code", "shown"),
    [
        ("Traceback (most recent call last):\n  File 'x', line 1\nKeyError: 3\n", 1, "  line 3: KeyError: 3"),
        ("step 1\nstep 2\n", 1, "unknown: there is no error in it"),
        (None, 2, "No such file or directory. Give the file of a log"),
    ],
)  # fmt: skip
def test_what_is_not_known_shows_its_line(
    log: str | None, code: int, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    if log is not None:
        path.write_text(log)
    assert main(["explain", str(path)]) == code
    assert shown in "".join(capsys.readouterr())
    assert main(["explain", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err


def failed_run(path: Path, **result: Any) -> RunDir:
    run = tracked_run.write_start(path)
    trace = f"{TRACEBACK}  File 'x', line 1\n{OOM}"
    write_json(run.rank_status(0), {"rank": 0, **failed("OutOfMemoryError", OOM, traceback=trace)})
    if result:
        write_json(run.result, tracked_run.result("oom", traceback=trace, **result))
    return run


def test_a_run_shows_its_own_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a result, what its ranks left."""
    run = failed_run(tmp_path / "run", cause="memory!", fix="less", failure="cuda_oom")
    assert main(["explain", str(run.root)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["cause (oom): memory!", f"  {OOM}", "fix: less"]
    run.result.unlink()
    assert main(["explain", str(run.root)]) == 0
    assert capsys.readouterr().out.startswith("cause (oom): the GPU's memory is full")


def test_real_failures(real_data: Path) -> None:
    """Those that were held out are explained as well as those that rows were written from."""
    for held_out, results in measure(real_data / "failures").items():
        verdicts = [judge(name, row) for name, row, _ in results]
        behind = [judge(name, row) for name, _, rows in results for row in rows]
        for found in (verdicts, behind):
            assert found.count("wrong") <= (0.04 if held_out else 0) * len(found)
            assert found.count("right") >= (0.8 if held_out else 1) * len(found)
