"""Known failures, by the messages as they are really printed.

``pytest tests/unit/test_diagnose.py``
"""

# Messages stand as they are printed, however long.
# ruff: noqa: E501
from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmx.launch.diagnose import (
    KNOWN_FAILURES,
    OUTCOMES,
    OWN_ERRORS,
    Failure,
    diagnose,
    signal_in_log,
)

# (row, outcome, message)
MESSAGES = [
    ("cuda_oom", "oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB of which 1.06 GiB is free."),
    ("cuda_oom", "oom", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("host_oom", "oom", "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"),
    ("disk_full", "disk_full", "OSError: [Errno 28] No space left on device: '/runs/x/checkpoints/step-10/model.safetensors'"),
    ("disk_full", "disk_full", "OSError: [Errno 122] Disk quota exceeded"),
    ("shm_full", "disk_full", "RuntimeError: unable to write to file </torch_1_2>: No space left on device (28) in /dev/shm"),
    ("shm_full", "disk_full", "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm)."),
    ("open_files", "config", "OSError: [Errno 24] Too many open files"),
    ("worker_missing", "config", "/opt/venv/bin/python3: can't open file '/home/ada/llmx/llmx/worker.py': [Errno 2] No such file or directory"),
    ("worker_missing", "config", "FileNotFoundError: [Errno 2] No such file or directory: '/runs/x/config.yaml'"),
    ("worker_missing", "config", "node-b: bash: line 1: cd: /runs/x: No such file or directory"),
    ("python_missing", "config", "node-b: bash: line 1: /opt/venv/bin/python3: No such file or directory"),
    ("ninja", "config", "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)"),
    ("compiler", "config", "FileNotFoundError: [Errno 2] No such file or directory: 'g++'"),
    ("compiler", "config", "subprocess.CalledProcessError: Command '['which', 'c++']' returned non-zero exit status 1."),
    ("cuda_home", "config", "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root."),
    ("cuda_mismatch", "config", "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 11.8 does not match the version torch was compiled with 12.4"),
    ("cuda_library", "config", "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
    ("stale_extension", "config", "ImportError: /root/.cache/torch_extensions/py311_cpu/cpu_adam/cpu_adam.so: undefined symbol: _ZN3c105ErrorC2E"),
    ("module", "config", "/opt/venv/bin/python3: Error while finding module specification for 'llmx.worker' (ModuleNotFoundError: No module named 'llmx')"),
    ("module", "config", "ModuleNotFoundError: No module named 'transformers'"),
    ("ssh_refused", "comm", "ssh: connect to host 10.0.0.2 port 22: Connection refused"),
    ("ssh_route", "comm", "ssh: connect to host 10.0.0.2 port 2202: No route to host"),
    ("ssh_route", "comm", "ssh: connect to host node-b port 22: Connection timed out"),
    ("ssh_name", "config", "ssh: Could not resolve hostname node-x: Name or service not known"),
    ("ssh_key", "config", "ada@10.0.0.2: Permission denied (publickey,password)."),
    ("ssh_host_key", "config", "Host key verification failed."),
    ("launcher_missing", "config", "RuntimeError: launcher 'pdsh' not installed."),
    ("launcher_missing", "config", "bash: orted: command not found"),
    ("mpi_slots", "config", "There are not enough slots available in the system to satisfy the 4\nslots that were requested by the application:"),
    ("mpi_daemons", "comm", "ORTE was unable to reliably start one or more daemons."),
    ("slurm_request", "config", "srun: error: Unable to allocate resources: Requested node configuration is not available"),
    ("slurm_request", "config", "srun: error: Unable to create step for job 3: Invalid generic resource (gres) specification"),
    ("slurm_memory", "oom", "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed."),
    ("slurm_memory", "oom", "srun: error: node-b: task 1: Out Of Memory"),
    ("slurm_time", "interrupted", "slurmstepd: error: *** STEP 12.0 ON node-a CANCELLED AT 2026-01-31T10:20:30 DUE TO TIME LIMIT ***"),
    ("slurm_node", "host_lost", "srun: error: Node failure on node-b"),
    ("slurm_busy", "config", "srun: Job 12 step creation temporarily disabled, retrying (Requested nodes are busy)"),
    ("slurm_unreachable", "comm", "srun: error: Unable to contact slurm controller (connect failure)"),
    ("arguments", "crash", "worker.py: error: unrecognized arguments: --local_rank=0"),
    ("port_in_use", "comm", "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
    ("nccl_two_builds", "config", "torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:133, invalid argument, NCCL version 2.14.3 Invalid config blocking attribute value -2147483648"),
    ("gloo_loopback", "comm", "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"),
    ("gloo_loopback", "comm", "RuntimeError: [../gloo/transport/tcp/pair.cc:144] gloo connect: Connection refused, remote=[127.0.1.1]:34123"),
    ("gloo_interface", "config", "RuntimeError: [enforce fail at ../gloo/transport/tcp/device.cc:208] ifa != nullptr. Unable to find address for: eth7"),
    ("nccl_system", "comm", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."),
    ("nccl_system", "comm", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, internal error, NCCL version 2.19.3\nncclInternalError: Internal check failed."),
    ("rendezvous", "comm", "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 29500)."),
    ("rendezvous", "comm", "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/2 clients joined."),
    ("collective_timeout", "comm", "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800112 milliseconds before timing out."),
    ("collective_timeout", "comm", "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
    ("peer_died", "comm", "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer"),
    ("peer_died", "comm", "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.77.0.2]:12345"),
    ("index", "data", "IndexError: index out of range in self"),
    ("index", "data", "torch.AcceleratorError: CUDA error: device-side assert triggered"),
    ("precision", "config", "ValueError: Type bf16 is not supported on your device."),
    ("cuda_driver", "config", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
    ("cuda_driver", "config", "RuntimeError: CUDA error: invalid device ordinal"),
    ("cuda_build", "config", "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    ("gpu_twice", "config", "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000"),
    ("cuda_hardware", "crash", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("hub_offline", "data", "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files."),
    ("hub_gated", "data", "OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/meta-llama/Llama-2-7b-hf.\n401 Client Error."),
    ("nan", "nan", "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."),
    ("permission", "config", "PermissionError: [Errno 13] Permission denied: '/runs/x'"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "outcome", "message"), MESSAGES, ids=[m[0] for m in MESSAGES])
def test_known_messages(row: str, outcome: str, message: str) -> None:
    kind, _, rest = message.partition(": ")
    for failure in (
        Failure(log=f"some line\n{message}\n"),
        Failure(error_type=kind, message=rest, category="crash"),
        Failure(error_type=kind, message=rest, category=outcome),
    ):
        found = diagnose(failure)
        assert (found.name, found.outcome) == (row, outcome)
        assert found.cause
        assert found.fix
        assert "{" not in found.cause + found.fix


def test_every_row_has_a_real_message() -> None:
    assert {row.name for row in KNOWN_FAILURES} == {message[0] for message in MESSAGES}


def test_groups_are_filled_in() -> None:
    found = diagnose(Failure(log="ssh: connect to host 10.0.0.2 port 2202: Connection refused"))
    assert "10.0.0.2 port 2202" in found.cause


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


@given(st.text(), st.text(), st.text(), st.sampled_from(["", "crash", "nonsense", *OUTCOMES]))
def test_always_an_answer(kind: str, message: str, log: str, category: str) -> None:
    found = diagnose(Failure(error_type=kind, message=message, log=log, category=category))
    assert found.outcome in OUTCOMES
    assert found.cause.strip() or kind.strip() == message.strip() == ""
    assert found.fix or kind in OWN_ERRORS


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
