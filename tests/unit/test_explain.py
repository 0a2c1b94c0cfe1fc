"""``python -m llmx explain``: logs of other programs, and run directories.

``pytest tests/unit/test_explain.py``
"""

# Logs stand as they are printed.
# ruff: noqa: E501
from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.explain import judge, measure
from llmx.cli.main import main
from llmx.run.rundir import RunDir, write_json
from tests import tracked_run

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TORCHRUN = f"""\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 3, in <module>
[rank1]:     main()
[rank1]: {OOM}
W1128 12:00:00.000000 139 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 41 closing signal SIGTERM
E1128 12:00:01.000000 139 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 1 (pid: 42) of binary: /opt/bin/python
Traceback (most recent call last):
  File "/opt/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 42)
  error_file: <N/A>
============================================================
"""
ACCELERATE = f"""\
Traceback (most recent call last):
  File "/job/train.py", line 3, in <module>
    main()
{OOM}
  0%|          | 0/100 [00:02<?, ?it/s]
Traceback (most recent call last):
  File "/opt/bin/accelerate", line 8, in <module>
    sys.exit(main())
  File "/opt/lib/python3.11/site-packages/accelerate/commands/launch.py", line 763, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['/opt/bin/python', 'train.py']' returned non-zero exit status 1.
"""
LLAMA_FACTORY = f"""\
[INFO|2026-01-05 10:00:00] llamafactory.hparams.parser:143 >> Set `ddp_find_unused_parameters` to False in DDP training since LoRA is enabled.
[WARNING|2026-01-05 10:00:01] llamafactory.extras.misc:154 >> Version checking has been disabled, may lead to unexpected behaviors.
[rank0]: Traceback (most recent call last):
[rank0]:   File "/job/src/llamafactory/launcher.py", line 23, in <module>
[rank0]:     launch()
[rank0]: {OOM}
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
    [(TORCHRUN, 4), (ACCELERATE, 4), (LLAMA_FACTORY, 6), (DEEPSPEED, 5)],
    ids=["torchrun", "accelerate", "llama_factory", "deepspeed"],
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
    assert shown.endswith("more: docs/failures.md#cuda_oom\n")


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
    ("log", "shown"),
    [
        ("Traceback (most recent call last):\n  File 'x', line 1\nKeyError: 3\n", "  line 3: KeyError: 3"),
        ("step 1\nstep 2\n", "unknown: there is no error in it"),
    ],
)  # fmt: skip
def test_what_is_not_known_shows_its_line(
    log: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(log)
    assert main(["explain", str(path)]) == 1
    assert shown in capsys.readouterr().out


def test_what_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", str(tmp_path / "train.log")]) == 2
    assert "No such file or directory. Give the file of a log" in capsys.readouterr().err
    assert main(["explain", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err


def failed_run(path: Path, **result: Any) -> RunDir:
    run = tracked_run.write_start(path)
    trace = f"Traceback (most recent call last):\n  File 'x', line 1\n{OOM}"
    error = {"type": "OutOfMemoryError", "message": OOM, "traceback": trace, "time": 1.0}
    write_json(run.rank_status(0), {"rank": 0, "state": "failed", "error": error})
    if result:
        write_json(run.result, tracked_run.result("oom", traceback=trace, **result))
    return run


def test_a_run_shows_its_own_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = failed_run(tmp_path / "run", cause="memory!", fix="less", failure="cuda_oom")
    assert main(["explain", str(run.root)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cause (oom): memory!", f"  {OOM}", "fix: less", "more: docs/failures.md#cuda_oom",
    ]  # fmt: skip


def test_a_run_without_a_result_shows_what_its_ranks_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = failed_run(tmp_path / "run")
    assert main(["explain", str(run.root)]) == 0
    assert capsys.readouterr().out.startswith("cause (oom): the GPU's memory is full")


def test_real_failures(real_data: Path) -> None:
    """Those that were held out are explained as well as those that rows were written from."""
    for held_out, results in measure(real_data / "failures").items():
        verdicts = [judge(name, row) for name, row, _ in results]
        behind = [judge(name, row) for name, _, rows in results for row in rows]
        for found in (verdicts, behind):
            assert found.count("wrong") == 0
            assert found.count("right") >= (0.9 if held_out else 1) * len(found)
