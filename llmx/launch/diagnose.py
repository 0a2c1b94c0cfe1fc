"""Finds the typed outcome, cause and fix of a failure in the logs and errors of a rank.

Pure: text in, ``Diagnosis`` out. Each row of ``KNOWN_FAILURES`` was seen on real clusters or
provoked on purpose; the tests hold the message as it is printed. Earlier rows win, so the specific
ones come first. ``{name}`` in a cause or a fix is filled from the group of that name.

    python -m llmx.launch.diagnose < RUN_DIR/logs/rank-001.log
"""

from __future__ import annotations

import re
import signal as signals
import sys
from dataclasses import dataclass

from llmx.config.schema import FAILURES


@dataclass(frozen=True)
class Known:
    """How a known failure is recognised in a text, and what to say of it."""

    name: str
    outcome: str
    pattern: str
    cause: str
    fix: str
    consequence: bool = False
    """Usually follows from another rank's death; never the first thing to look at."""


MEMORY_LADDER = (
    "in this order: batch.micro_batch=1 (accumulation keeps the global batch), "
    "model.activation_checkpointing=true, zero=stage2, zero=stage2_offload, zero=stage3, "
    "zero.hpz_partition_size=1, zero=stage3_offload, zero=infinity. `dry_run=true` "
    "shows the predicted memory"
)

KNOWN_FAILURES: tuple[Known, ...] = (
    # Memory and disk.
    Known(
        "cuda_oom",
        "oom",
        r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
        r"|CUDNN_STATUS_ALLOC_FAILED|CUDA error: out of memory",
        "the GPU's memory is full",
        MEMORY_LADDER,
    ),
    Known(
        "shm_full",
        "disk_full",
        r"(/dev/shm|shm_open|shared memory).{0,200}(No space left|Bus error|Errno 28)"
        r"|(No space left|Errno 28).{0,200}/dev/shm|insufficient shared memory \(shm\)",
        "/dev/shm of the host is full or too small",
        "give containers more of it (docker run --shm-size=8g), or remove what dead runs left: "
        "ls -la /dev/shm",
    ),
    Known(
        "disk_full",
        "disk_full",
        r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]|ENOSPC",
        "the disk is full (or the quota is used up)",
        "free some space or set run_dir and data.cache_dir to a larger disk; `df -h` shows them",
    ),
    Known(
        "host_oom",
        "oom",
        r"DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|\[Errno 12\]"
        r"|^MemoryError|cudaHostAlloc|unable to allocate .{0,40}pinned",
        "the host's RAM is full",
        "offload less (zero.offload_optimizer, zero.offload_param), zero.pin_memory=false, fewer "
        "ranks on the host, or zero=infinity to use an NVMe disk",
    ),
    Known(
        "open_files",
        "config",
        r"Too many open files|\[Errno 24\]",
        "more files are open than the limit of the user allows",
        "raise it (ulimit -n 65536) or use fewer processes: data.num_workers=4",
    ),
    # Files, modules and versions that differ between hosts.
    Known(
        "worker_missing",
        "config",
        r"can't open file '(?P<path>[^']*worker\.py)'"
        r"|No such file or directory: '(?P<file>[^']*config\.yaml)'"
        r"|(bash|sh):.{0,20} cd: (?P<dir>[^:\n]+): No such file",
        "a host does not see the code or the run directory",
        "there is no shared file system: set launch.sync=rsync, or put run_dir on a shared one",
    ),
    Known(
        "python_missing",
        "config",
        r"(?P<python>/\S*python[\d.]*): (No such file|not found|command not found)",
        "{python} does not exist on a host",
        "install the same environment at the same path on every host, or set launch.python",
    ),
    Known(
        "ninja",
        "config",
        r"Ninja is required to load C\+\+ extensions",
        "DeepSpeed cannot build an extension: ninja is missing",
        "pip install ninja on that host, or use optim=adamw, which needs no extension",
    ),
    Known(
        "compiler",
        "config",
        r"No such file or directory: '(?P<a>g\+\+|c\+\+|gcc|cc)'"
        r"|(?P<b>g\+\+|c\+\+|gcc): (command )?not found"
        r"|Command '\['which', '(?P<c>g\+\+|c\+\+)'\]' returned non-zero",
        "DeepSpeed cannot build an extension: a C++ compiler is missing",
        "apt-get install g++ on that host, or use optim=adamw, which needs no extension",
    ),
    Known(
        "cuda_home",
        "config",
        r"CUDA_HOME environment variable is not set|CUDA_HOME does not exist|nvcc: not found"
        r"|No such file or directory: '[^']*nvcc'",
        "DeepSpeed cannot build a CUDA extension: the CUDA toolkit is missing",
        "install the toolkit and export CUDA_HOME, or use optim=adamw, which needs no extension",
    ),
    Known(
        "cuda_mismatch",
        "config",
        r"CUDAMismatchException|Installed CUDA version (?P<a>\S+) does not match",
        "the CUDA toolkit of the host differs from the one torch was built with",
        "install the toolkit of torch.version.cuda, or export DS_SKIP_CUDA_CHECK=1 for a minor "
        "difference",
    ),
    Known(
        "cuda_library",
        "config",
        r"(?P<lib>lib(cudart|nccl|cublas|cublasLt|cudnn|cusparse|curand|nvrtc)[^:\s]*\.so[.\d]*): "
        r"cannot open shared object file",
        "a host lacks {lib}, or has another version of it",
        "reinstall torch with the CUDA wheels of this host, and rebuild the extension: "
        "rm -r ~/.cache/torch_extensions",
    ),
    Known(
        "stale_extension",
        "config",
        r"undefined symbol: \S+.{0,300}|cannot open shared object file: .{0,200}torch_extensions",
        "an extension was built against another version of torch",
        "rm -r ~/.cache/torch_extensions (or TORCH_EXTENSIONS_DIR) on that host",
    ),
    Known(
        "module",
        "config",
        r"(ModuleNotFoundError|ImportError): No module named '?(?P<module>[\w.]+)|"
        r"Error while finding module specification for '(?P<spec>[\w.]+)'",
        "a module is missing in the Python of a host",
        "install the same environment on every host; for the code itself launch.sync=rsync",
    ),
    # ssh and launchers.
    Known(
        "ssh_refused",
        "comm",
        r"connect to host (?P<host>\S+) port (?P<port>\d+): Connection refused",
        "nothing listens for ssh on {host} port {port}",
        "start sshd there, or set the right port of the host (hardware.hosts[i].ssh_port)",
    ),
    Known(
        "ssh_route",
        "comm",
        r"connect to host (?P<host>\S+) port (?P<port>\d+): "
        r"(?P<why>No route to host|Network is unreachable|(Connection|Operation) timed out)",
        "{host} does not answer ({why})",
        "check that it is up and that a firewall lets port {port} through",
    ),
    Known(
        "ssh_name",
        "config",
        r"Could not resolve hostname (?P<host>[^\s:]+)",
        "the name {host} cannot be resolved",
        "set the address of the host (hardware.hosts[i].address), or add it to /etc/hosts",
    ),
    Known(
        "ssh_key",
        "config",
        r"Permission denied \((?P<methods>publickey[^)]*)\)|Too many authentication failures",
        "the host does not accept this user's key",
        "ssh-copy-id to it, or set hardware.hosts[i].user and hardware.hosts[i].identity_file",
    ),
    Known(
        "ssh_host_key",
        "config",
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the host key has changed",
        "if it was reinstalled: ssh-keygen -R HOST; else another machine answers",
    ),
    Known(
        "launcher_missing",
        "config",
        r"launcher '(?P<launcher>\w+)' not installed|(?P<program>pdsh|mpirun|srun|orted): "
        r"(command )?not found",
        "the launcher is not installed on every host",
        "scripts/install-system-packages.sh, or choose another launch.transport",
    ),
    Known(
        "mpi_slots",
        "config",
        r"There are not enough slots available in the system",
        "mpirun counts fewer slots than ranks",
        "correct the slots of the hosts, or launch.openmpi_args=[--oversubscribe]",
    ),
    Known(
        "mpi_daemons",
        "comm",
        r"ORTE was unable to reliably start one or more daemons|ORTE has lost communication with "
        r"a remote daemon|orted: (command )?not found",
        "mpirun could not start or lost its daemon on a host",
        "install the same OpenMPI on every host; set hardware.hosts[i].interface to the network "
        "between them",
    ),
    Known(
        "slurm_request",
        "config",
        r"srun: error: (?P<why>.*(Requested node configuration is not available|"
        r"Invalid generic resource|invalid partition|Invalid account|Unable to allocate resources"
        r"|More processors requested).*)",
        "Slurm refuses the request: {why}",
        "compare the hosts and slots with `sinfo -N -o '%N %G %c %T'`; launch.slurm.partition and "
        "launch.slurm.account name the right ones",
    ),
    Known(
        "slurm_memory",
        "oom",
        r"Detected \d+ oom[-_]kill event|task \d+: Out Of Memory|cgroup out-of-memory handler",
        "the memory limit of the Slurm job ended a rank",
        "ask for more (launch.slurm.extra_args=[--mem=0] takes all of a host), offload less, or "
        "fewer ranks on the host",
    ),
    Known(
        "slurm_time",
        "interrupted",
        r"CANCELLED AT \S+ DUE TO (?P<why>TIME LIMIT|PREEMPTION)",
        "Slurm ended the job: {why}",
        "python -m llmx resume continues it; ask for more time with launch.slurm.time_limit",
    ),
    Known(
        "slurm_node",
        "host_lost",
        r"CANCELLED AT \S+ DUE TO NODE FAILURE|[Nn]ode failure on (?P<host>\S+)",
        "Slurm lost a host of the job",
        "`sinfo -R` says which and why; launch.slurm.extra_args=[--exclude=HOST] leaves it out",
    ),
    Known(
        "slurm_busy",
        "config",
        r"step creation (temporarily|still) disabled|Requested nodes are busy",
        "Slurm keeps the ranks waiting: another step holds the hosts or the GPUs of the job",
        "start llmx in the batch script itself, not under srun, or "
        "launch.slurm.extra_args=[--overlap]",
    ),
    Known(
        "slurm_unreachable",
        "comm",
        r"Unable to contact slurm controller|slurm_receive_msg.*Zero Bytes|Munge decode failed",
        "Slurm's controller does not answer",
        "`scontrol ping`; munged must run on every host with one key and one clock",
    ),
    Known(
        "arguments",
        "crash",
        r"error: unrecognized arguments: (?P<arguments>.+)",
        "an argument was not understood: {arguments}",
        "compare RUN_DIR/command.txt with `deepspeed --help`; DeepSpeed 0.19.8 or newer is needed",
    ),
    # The network between ranks.
    Known(
        "port_in_use",
        "comm",
        r"(server socket has failed to (listen|bind)|EADDRINUSE|[Aa]ddress already in use"
        r"|errno: 98)",
        "the port of the rendezvous is taken on the master host",
        "set launch.master_port=0, which takes a free one; a dead run may hold it: "
        "ss -ltnp | grep PORT",
    ),
    Known(
        "nccl_two_builds",
        "config",
        r"Invalid config blocking attribute value",
        "two NCCL builds are on a host, or the hosts have different ones",
        "pip list | grep nvidia-nccl on every host; uninstall the one that torch does not name "
        "(torch.cuda.nccl.version())",
    ),
    Known(
        "gloo_loopback",
        "comm",
        r"connectFullMesh failed|gloo.{0,200}Connection refused, remote=\[?127\.",
        "gloo connects over the wrong interface: a host's name resolves to its loopback",
        "set the interface towards the other hosts (hardware.interface, or of each host)",
    ),
    Known(
        "gloo_interface",
        "config",
        r"Unable to find address for: (?P<name>\S+)|Unable to find interface for: (?P<b>\S+)"
        r"|no (socket )?interface found|NCCL WARN Bootstrap : no socket interface",
        "a host does not have the configured network interface",
        "correct hardware.hosts[i].interface; `ip -br addr` on the host lists them",
    ),
    Known(
        "nccl_system",
        "comm",
        r"ncclSystemError|ncclInternalError|NCCL.{0,80}(internal error|unhandled system error)",
        "NCCL cannot use the network or the memory between the devices",
        "set the interface of the hosts; without InfiniBand hardware.env.NCCL_IB_DISABLE=1, in "
        "containers hardware.env.NCCL_P2P_DISABLE=1; launch.env.NCCL_DEBUG=INFO tells more",
    ),
    Known(
        "rendezvous",
        "comm",
        r"client socket has timed out|timed out.{0,60}(waiting for clients|to connect to)"
        r"|DistStoreError|connection to \S+:\d+ timed out|failed to connect to .{0,60}:\d+",
        "the ranks did not find each other at the master's address and port",
        "set hardware.master_addr to an address of the first host that the others reach; a "
        "firewall must let the ports between the hosts through",
    ),
    Known(
        "collective_timeout",
        "comm",
        r"Watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out"
        r"|Timed out waiting \d+ms for (recv|send) operation",
        "a rank waited for another one for too long",
        "look at the rank that is behind the others: its log and its host; where it only needed "
        "more time, raise launch.comm_timeout_s",
        consequence=True,
    ),
    Known(
        "peer_died",
        "comm",
        r"Connection reset by peer|Connection closed by peer|Broken pipe|Socket closed"
        r"|ncclRemoteError|remote process exited",
        "the connection to another rank broke: that rank died first, or the network did",
        "look for the first failing rank; the logs of all ranks are in RUN_DIR/logs",
        consequence=True,
    ),
    # The device.
    Known(
        "index",
        "data",
        r"device-side assert triggered|index out of range in self|srcIndex < srcSelectDimSize",
        "a token id or a position is outside the model's embedding tables",
        "model.tokenizer must be the model's own, and data.seq_len within its limit; "
        "launch.env.CUDA_LAUNCH_BLOCKING=1 makes the traceback name the operation",
    ),
    Known(
        "precision",
        "config",
        r"Type (?P<type>fp16|bf16) is not supported on your device",
        "a device cannot train in {type}",
        "precision=fp32, or describe the device in hardware.devices (precisions), so that the plan "
        "knows",
    ),
    Known(
        "cuda_build",
        "config",
        r"no kernel image is available",
        "this build of torch has no code for the GPU of this host",
        'on every host: pip install --force-reinstall "torch==2.13.0+cu126" --index-url '
        "https://download.pytorch.org/whl/cu126 for V100s and older, cu130 in both places for "
        "newer ones; torch.cuda.get_arch_list() must have the GPU's compute capability",
    ),
    Known(
        "gpu_twice",
        "config",
        r"Duplicate GPU detected",
        "two ranks took the same GPU",
        "set slots of the host to the number of its GPUs; under Slurm look at --gpus-per-task and "
        "--gpu-bind in launch.slurm.extra_args",
    ),
    Known(
        "cuda_driver",
        "config",
        r"CUDA driver version is insufficient|The NVIDIA driver on your system is too old"
        r"|Found no NVIDIA driver|invalid device ordinal"
        r"|No CUDA GPUs are available",
        "torch cannot use the GPU of this host",
        "`nvidia-smi` must list the GPUs; the driver must be new enough for torch.version.cuda, "
        "and slots no more than its GPUs",
    ),
    Known(
        "cuda_hardware",
        "crash",
        r"uncorrectable ECC error|CUDA error: (unspecified launch failure|an illegal memory access"
        r"|hardware stack error)|GPU has fallen off the bus|Xid",
        "the GPU reports a fault",
        "`nvidia-smi -q -d ECC` and `dmesg | grep Xid` on the host; reboot it or leave it out",
    ),
    # The model and its data.
    Known(
        "hub_offline",
        "data",
        r"couldn't connect to '?https?://[^ ]*huggingface|LocalEntryNotFoundError"
        r"|OfflineModeIsEnabled|Name or service not known.*huggingface",
        "the Hugging Face Hub cannot be reached from the host",
        "download before the run and give the directory (model.path=/abs/dir), with "
        "launch.sync=rsync to bring it to every host",
    ),
    Known(
        "hub_gated",
        "data",
        r"gated repo|401 Client Error|403 Client Error"
        r"|RepositoryNotFoundError|Repository Not Found",
        "the model does not exist on the Hub or needs a login; ranks never see a token",
        "`hf download MODEL --local-dir DIR` once, then model.path=DIR",
    ),
    Known(
        "nan",
        "nan",
        r"loss is (nan|inf|not finite)|non-?finite loss|minimum loss scale already reached"
        r"|Current loss scale already at minimum",
        "the loss is no longer a finite number",
        "a lower optim.lr, a longer warm-up, optim.clip_norm=1.0, or precision=bf16 (fp32) where "
        "the devices can",
    ),
    Known(
        "permission",
        "config",
        r"PermissionError: \[Errno 13\][^\n]*?'(?P<path>[^']+)'",
        "no permission for {path}",
        "give the user the right to it, or set run_dir and data.cache_dir to places of their own",
    ),
)


OUTCOMES = ("ok", *FAILURES)
NOTES = {
    "oom": MEMORY_LADDER,
    "nan": "a lower optim.lr, a longer warm-up, or precision=bf16 where the devices can",
    "comm": "the logs of all ranks are in RUN_DIR/logs; the first one to fail is named here",
    "disk_full": "free some space, or set run_dir to a larger disk",
    "config": "see the traceback; `python -m llmx resume RUN_DIR KEY=VALUE` changes a setting",
    "data": "repair the file that the cause names, then: python -m llmx resume RUN_DIR",
    "crash": "see the traceback; the whole log of the rank is in RUN_DIR/logs",
}
OWN_ERRORS = ("ConfigError", "DataError", "RecordError")
"""Their messages state the fix themselves."""
NOTES_OF_ERRORS = {
    "CheckpointError": "`python -m llmx export RUN_DIR --check` verifies all checkpoints. Put a "
    "good copy of the named file back, or resume from another one (resume RUN_DIR step=N), or "
    "start from the beginning (resume RUN_DIR step=0, which keeps the damaged ones in history/)",
}
"""Of llmx's own errors whose outcome says too little."""


@dataclass(frozen=True)
class Failure:
    """The facts about one failure. Everything may be empty."""

    error_type: str = ""
    message: str = ""
    traceback: str = ""
    category: str = ""
    """What the rank itself called it (docs/development/contracts.md)."""
    signal: int = 0
    """The signal that ended the process; 0 where none did."""
    oom_kills: int = 0
    """How often the kernel's OOM killer struck on that host during the run."""
    log: str = ""
    """The tail of the rank's log, or of the launcher's."""


@dataclass(frozen=True)
class Diagnosis:
    """The outcome, cause and fix of a failure, for ``result.json`` and the console."""

    outcome: str
    cause: str
    fix: str
    name: str = ""
    """The known failure; empty where none matched."""
    consequence: bool = False
    """Most likely follows from another rank's failure."""


def diagnose(failure: Failure) -> Diagnosis:
    """The outcome, cause and fix of a failure; never raises, always has a cause."""
    text = "\n".join(part for part in (_headline(failure), failure.traceback) if part)
    matched_row = _find(text)
    if matched_row is None and failure.signal:
        return _killed(failure)
    if matched_row is None and not text:
        matched_row = _find(failure.log)
    # A rank's own typed outcome stands; a row may only make ``crash`` more precise.
    if matched_row is not None and failure.category in ("", "crash", matched_row[0].outcome):
        return _from_row(*matched_row, failure)
    outcome = failure.category if failure.category in OUTCOMES else "crash"
    last_line = (failure.log.strip().splitlines() or [""])[-1].strip()
    cause = _headline(failure) or last_line or "the process ended without an error message"
    if failure.error_type in OWN_ERRORS and failure.message:
        return Diagnosis(outcome, failure.message, "")
    fix = NOTES_OF_ERRORS.get(failure.error_type) or NOTES.get(outcome, NOTES["crash"])
    return Diagnosis(outcome, cause, fix)


def _find(text: str) -> tuple[Known, re.Match[str]] | None:
    """The first known failure in a text, and where it is."""
    for row in KNOWN_FAILURES:
        if match := re.search(row.pattern, text, re.MULTILINE):
            return row, match
    return None


def _from_row(row: Known, match: re.Match[str], failure: Failure) -> Diagnosis:
    groups = {key: value for key, value in match.groupdict().items() if value}
    cause = _fill(row.cause, groups)
    headline = _headline(failure) or _line_of(match)
    if headline not in cause:
        cause = f"{cause} ({_short(headline)})"
    return Diagnosis(row.outcome, cause, _fill(row.fix, groups), row.name, row.consequence)


def _killed(failure: Failure) -> Diagnosis:
    number = failure.signal
    try:
        name = signals.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signals.SIGKILL and failure.oom_kills > 0:
        return Diagnosis(
            "oom",
            "the kernel's OOM killer ended the process (SIGKILL): the host's RAM is full",
            "offload less, zero.pin_memory=false, fewer ranks on the host, zero=stage3 (which "
            "loads the model in shards), or zero=infinity",
            "kernel_oom",
        )
    matched_row = _find(failure.log)
    if number == signals.SIGKILL:
        if matched_row is not None and matched_row[0].name == "slurm_memory":
            return _from_row(*matched_row, failure)
        return Diagnosis(
            "crash",
            "the process was killed (SIGKILL) without a traceback: by hand, or by the memory limit "
            "of a container or a job",
            "`dmesg -T | grep -i kill` on the host shows which; if it was memory, offload less or "
            "raise the limit",
            "killed",
        )
    if number == signals.SIGBUS:
        return Diagnosis(
            "disk_full",
            "the process died of SIGBUS: /dev/shm of the host is full or too small",
            "give containers more of it (docker run --shm-size=8g); df -h /dev/shm",
            "bus_error",
        )
    if number == signals.SIGILL:
        return Diagnosis(
            "config",
            "the process died of SIGILL: an extension was built for another type of CPU",
            "rm -r ~/.cache/torch_extensions (or TORCH_EXTENSIONS_DIR) on that host",
            "illegal_instruction",
        )
    if matched_row is not None:
        return _from_row(*matched_row, failure)
    return Diagnosis("crash", f"the process died of {name}", NOTES["crash"], "signal")


def signal_in_log(text: str) -> int:
    """The signal that a launcher's log says a rank died of; 0 where it names none.

    DeepSpeed: ``exits with return code = -9``; mpirun: ``exited on signal 9``; srun:
    ``task 1: Killed``; a shell's 128 + N is taken for N.
    """
    match = re.search(r"exits with return code = -(\d+)", text)
    match = match or re.search(r"exited on signal (\d+)", text)
    if match:
        return int(match[1])
    words = {"Killed": 9, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7}
    match = re.search(rf"tasks? [\d,-]+: ({'|'.join(words)})", text)
    if match:
        return words[match[1]]
    match = re.search(r"exit(?:ed|s)? (?:with )?(?:exit |return )?code[ =:]+(1[2-5]\d)\b", text)
    number = int(match[1]) - 128 if match else 0
    return number if number in (4, 6, 7, 9, 11) else 0


def signal_of_silent_death(log: str) -> int:
    """The signal that ended a rank which left no status, from its own log.

    Ranks run with Python's fault handler, which writes a line for every deadly signal that
    can be caught; one that ended without it and without a traceback was killed outright.
    """
    end = log[-16384:]
    match = re.search(r"Fatal Python error: ([A-Z][a-z]+(?: [a-z]+)*)", end)
    if match:
        words = {"Segmentation fault": 11, "Bus error": 7, "Aborted": 6, "Illegal instruction": 4,
                 "Floating point exception": 8, "Floating-point exception": 8}  # fmt: skip
        return words.get(match[1].strip(), 0)
    return 0 if "Traceback (most recent call last)" in end else int(signals.SIGKILL)


def _headline(failure: Failure) -> str:
    if failure.error_type and failure.message:
        return f"{failure.error_type}: {failure.message}"
    return failure.error_type or failure.message


def _fill(text: str, groups: dict[str, str]) -> str:
    for key, value in groups.items():
        text = text.replace("{" + key + "}", value.strip())
    return text


def _line_of(match: re.Match[str]) -> str:
    text = match.string
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    return text[start : end if end >= 0 else len(text)].strip()


def _short(text: str, limit: int = 300) -> str:
    text = text.splitlines()[0] if text else ""
    return text if len(text) <= limit else text[: limit - 1] + "…"


if __name__ == "__main__":
    diagnosis = diagnose(Failure(log=sys.stdin.read()))
    print(f"{diagnosis.outcome}: {diagnosis.cause}\nfix: {diagnosis.fix}")
