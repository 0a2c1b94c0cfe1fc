"""Facts of a host that ranks depend on: printed as one JSON line by the Python of the ranks.

Standard library only, one file: the supervisor sends its text to every host, where the
environment's own Python runs it, so that a host needs neither llmx nor the code.

    python llmx/hardware/survey.py /path/of/the/run [/path/of/the/package/llmx] ['{"torch": true}']

The third argument asks for what takes time: ``torch`` imports it, in a process of its own,
``aio`` compiles a line against libaio, ``nvme`` names a directory to look at, ``gpu_processes``
lists what runs on the GPUs, and their state; ``remove`` names stale locks to be removed first;
``env`` has variables of the ranks. ``known`` has the facts of an earlier survey that was asked the
same: what takes time is taken from it while the environment is the same (``stamp``), all else is
looked at again.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata, util
from typing import Any

COMPARED = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "safetensors")
MODULES = ("flash_attn", "flash_attn_interface", "bitsandbytes")
"""Modules of kernels; looked for without importing them."""
STALE_LOCK_S = 600
"""Age of a lock that nobody holds any more."""
GPU_STATE = {
    "gpu": "index",
    "uuid": "uuid",
    "used_mib": "memory.used",
    "total_mib": "memory.total",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "slowed_by": "REASONS.active",
    "power_limit_w": "power.limit",
    "usual_power_limit_w": "power.default_limit",
    "pcie_gen": "pcie.link.gen.max",
    "lanes": "pcie.link.width.current",
    "usual_lanes": "pcie.link.width.max",
    "celsius": "temperature.gpu",
}
"""Name -> field of ``nvidia-smi --query-gpu``."""
TORCH = """
import json, torch
print(json.dumps({
    "cuda": torch.version.cuda,
    "arch_list": torch.cuda.get_arch_list() or torch._C._cuda_getArchFlags().split()
    if torch.version.cuda else [],
    "works": torch.cuda.is_available(),
    "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()) if torch.version.cuda else "",
}))
"""
"""``get_arch_list`` is empty where no GPU can be used, as with a driver that is too old."""
TORCH_S = 90


def survey(run_dir: str, package: str = "", needs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The facts, as plain values. ``package``: the directory of llmx's code; ``needs``: what is
    looked at besides."""
    needs = needs or {}
    os.environ.update(needs.get("env") or {})  # compilers and locks are where ranks look for them
    removed = remove_locks(needs.get("remove") or [])
    stamp = environment_stamp()
    earlier = needs.get("known") or {}
    if earlier.get("stamp") != stamp:
        earlier = {}
    build = earlier.get("torch_build") or {}

    def once(name: str, find: Callable[[], Any]) -> Any:
        return earlier.get(name) or find()

    return {
        "stamp": stamp,
        "removed": removed,
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "packages": {name: version(name) for name in COMPARED},
        "nccl": sorted(
            f"{dist.metadata['Name']}=={dist.version}"
            for dist in metadata.distributions()
            if (dist.metadata["Name"] or "").startswith("nvidia-nccl")
        ),
        "gpus": count_gpus(),
        "gpu_names": gpu_names(),
        "capabilities": once("capabilities", compute_capabilities),
        "torch_build": (build if build.get("works") else torch_build())
        if needs.get("torch")
        else {"cuda": toolkit_of_torch("cuda")},
        "driver": nvidia_driver(),
        "cpu": cpu_model(),
        **space_facts(run_dir),
        "container": container(),
        "shm_bytes": size_bytes("/dev/shm"),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": infiniband_ports(),
        "gpu_processes": gpu_processes() if needs.get("gpu_processes") else [],
        "gpu_states": gpu_states() if needs.get("gpu_processes") else [],
        "ninja": which("ninja"),
        "compiler": any(which(name) for name in ("c++", "g++", "clang++")),
        "nvcc": once("nvcc", nvcc),
        "skips_cuda_check": os.environ.get("DS_SKIP_CUDA_CHECK") == "1",
        "libaio": once("libaio", has_libaio) if needs.get("aio") else None,
        "nvme": directory_facts(needs["nvme"]) if needs.get("nvme") else None,
        "modules": [name for name in MODULES if has_module(name)],
        "stale_locks": stale_locks(),
        "code": code_hash(package),
    }


def environment_stamp() -> str:
    """Another one after an installation, a restart of the host, with other GPUs, another driver or
    compiler, and for other variables that decide which of them are used."""
    roots = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    programs = [shutil.which(name) or "" for name in ("nvidia-smi", "nvcc", "c++", "g++")]
    parts = [sys.version, sys.executable, _text("/proc/sys/kernel/random/boot_id")]
    parts += [str(nvidia_driver()), str(count_gpus()), *gpu_names()]
    for path in [*sys.path, *roots, *programs, "/usr/local/cuda", "/usr/include/libaio.h"]:
        try:
            parts.append(f"{os.path.realpath(path)} {os.stat(path).st_mtime_ns}")  # noqa: PTH116
        except OSError:
            parts.append(path)
    names = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CFLAGS", "LDFLAGS")
    parts += [os.environ.get(name, "") for name in (*names, "CUDA_VISIBLE_DEVICES")]
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def which(name: str) -> bool:
    """Whether a rank finds the program: beside its Python first, however this one was started."""
    beside = os.path.dirname(sys.executable)  # noqa: PTH120
    return shutil.which(name, path=f"{beside}:{os.environ.get('PATH', '')}") is not None


def code_hash(package: str) -> str | None:
    """The hash of every source below a directory, by name and content; None where there is none."""
    if not package:
        return None
    digest = hashlib.blake2b(digest_size=6)
    paths = sorted(glob.glob(f"{glob.escape(package)}/**/*.py", recursive=True))  # noqa: PTH207
    for path in paths:
        with open(path, "rb") as stream:  # noqa: PTH123
            content = stream.read()
        name = os.path.relpath(path, package)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest() if paths else None


def version(name: str) -> str | None:
    """The version of an installed package; None without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def has_module(name: str) -> bool:
    """Whether a module could be imported; it is not."""
    try:
        return util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def compute_capabilities() -> list[float]:
    """The compute capability of each GPU by the driver's own program; empty without it."""
    lines = nvidia_smi("--query-gpu=compute_cap").split("\n")
    return [float(line) for line in lines if re.fullmatch(r"\s*[0-9]+\.[0-9]+\s*", line)]


def nvidia_smi(query: str) -> str:
    """What the driver's own program answers, as CSV; empty without GPUs, and where it fails."""
    words = ["nvidia-smi", "--format=csv,noheader,nounits", query]
    return "" if count_gpus() is None else output_of(words, timeout_s=30)


def output_of(words: list[str], *, timeout_s: float) -> str:
    """The output of a program; empty where it fails or is not there."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def torch_build() -> dict[str, Any]:
    """The build of torch in its own words: CUDA, the GPUs it has code for, the NCCL it loads."""
    output = output_of([sys.executable, "-c", TORCH], timeout_s=TORCH_S)
    try:
        return dict(json.loads(output.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return {"cuda": toolkit_of_torch("cuda")}


def toolkit_of_torch(name: str) -> str | None:
    """The version of ``cuda`` or ``hip`` (ROCm) that torch is built for, without importing it; None
    where it is for another one."""
    try:
        spec = util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        return None
    text = _text(os.path.join(os.path.dirname(spec.origin), "version.py"))  # noqa: PTH118, PTH120
    match = re.search(rf"""^{name}\b[^=\n]*= *['"]([0-9.]+)""", text, re.MULTILINE)
    return match.group(1) if match else None


def nvcc() -> str | None:
    """Version of the CUDA compiler where torch looks for it; None without one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    program = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")  # noqa: PTH118
    output = output_of([program or "/usr/local/cuda/bin/nvcc", "-V"], timeout_s=30)
    match = re.search(r"release ([0-9]+\.[0-9]+)", output)
    return match.group(1) if match else None


def has_libaio() -> bool:
    """Whether a program can be compiled and linked against libaio, as DeepSpeed does."""
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        return False
    flags = (os.environ.get("CFLAGS", "") + " " + os.environ.get("LDFLAGS", "")).split()
    with tempfile.TemporaryDirectory(prefix="llmx-survey-") as directory:
        source = os.path.join(directory, "aio.cpp")  # noqa: PTH118
        with open(source, "w") as stream:  # noqa: PTH123
            stream.write("#include <libaio.h>\nint main() { return io_submit(0, 0, nullptr); }\n")
        program = os.path.join(directory, "aio")  # noqa: PTH118
        output_of([compiler, source, *flags, "-laio", "-o", program], timeout_s=60)
        return os.path.exists(program)  # noqa: PTH110


def directory_facts(path: str) -> dict[str, Any]:
    """Whether the directory, or the nearest one above it that exists, is writable, and its free
    bytes."""
    existing = nearest_directory(path)
    try:
        with tempfile.TemporaryFile(dir=existing):
            writable = True
    except OSError:
        writable = False
    return {"writable": writable, "free_bytes": shutil.disk_usage(existing).free}


def space_facts(run_dir: str) -> dict[str, Any]:
    """Free bytes where checkpoints are written, how many of them lie there, and the RAM that is
    available."""
    checkpoints = os.path.join(run_dir, "checkpoints")  # noqa: PTH118
    return {
        "free_bytes": shutil.disk_usage(nearest_directory(checkpoints)).free,
        "checkpoints": len(glob.glob(f"{glob.escape(checkpoints)}/step-*/")),  # noqa: PTH207
        "ram_available_bytes": ram_available(),
    }


def container() -> str:
    """The kind of container that this host is, by its marks; empty where there are none."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    marks = {
        "/.dockerenv": "Docker",
        "/run/.containerenv": "Podman",
        "/.singularity.d": "Apptainer",
    }
    return next((kind for path, kind in marks.items() if os.path.exists(path)), "")  # noqa: PTH110


def ram_available(root: str = "/") -> int | None:
    """The RAM that is left on the host and in this process's control groups, which are what a
    container or a job is killed by; None where the kernel does not say.

    A job of Slurm or a service is in a group far below the root. In a container the names may be
    those of the host, and only the root is there.
    """
    meminfo = re.search(r"^MemAvailable:\s*(\d+) kB", _text(f"{root}proc/meminfo"), re.MULTILINE)
    if meminfo is None:
        return None
    available = [int(meminfo.group(1)) * 1024]
    for line in _text(f"{root}proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            mounted, files = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # version 1
            mounted = "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = group.strip("/").split("/")
        for count in range(len(parts) + 1):
            at = "/".join([f"{root}{mounted}", *parts[:count]])
            limit, used = (_text(f"{at}/{name}").strip() for name in files[:2])
            if limit.isdigit():
                # The kernel frees pages of files before it kills anything.
                stat = _text(f"{at}/memory.stat")
                pages = re.search(rf"^{files[2]} (\d+)$", stat, re.MULTILINE)
                cached = int(pages.group(1)) if pages else 0
                free = int(limit) - (int(used) if used.isdigit() else 0) + cached
                available.append(max(0, free))
    return min(available)


def count_gpus(root: str = "/") -> int | None:
    """GPUs of the driver of NVIDIA, else of that of AMD; None without a driver."""
    try:
        return len(os.listdir(f"{root}proc/driver/nvidia/gpus"))  # noqa: PTH208
    except OSError:  # nodes of AMD's driver are also CPUs, whose id is 0
        nodes = glob.glob(f"{root}sys/class/kfd/kfd/topology/nodes/*/gpu_id")  # noqa: PTH207
        return sum(_text(node).strip() not in ("", "0") for node in nodes) or None


def gpu_processes() -> list[dict[str, Any]]:
    """Processes that use memory of a GPU, by the driver: GPU, MiB, pid, user and command."""
    apps = nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory")
    index_of = dict(re.findall(r"(\S+), *(\d+)", nvidia_smi("--query-gpu=uuid,index")))
    return [
        {
            "gpu": index_of.get(uuid, "0"),
            "uuid": uuid,
            "mib": int(mib),
            "pid": int(pid),
            **_process(int(pid)),
        }
        for uuid, pid, mib in re.findall(r"(\S+), *(\d+), *(\d+)", apps)
    ]


def gpu_states() -> list[dict[str, Any]]:
    """The state of each GPU by the driver (``parse_gpu_states``); empty without one."""
    for reasons in ("clocks_throttle_reasons", "clocks_event_reasons"):  # renamed with driver 535
        fields = ",".join(GPU_STATE.values()).replace("REASONS", reasons)
        if states := parse_gpu_states(nvidia_smi(f"--query-gpu={fields}")):
            return states
    return []


def parse_gpu_states(text: str) -> list[dict[str, Any]]:
    """A line of ``nvidia-smi --query-gpu`` for each GPU: index and UUID, then numbers; None where a
    GPU does not tell."""
    states = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(GPU_STATE) and words[0].isdigit():
            values = [*words[:2], *map(_value, words[2:])]
            states.append(dict(zip(GPU_STATE, values)))  # noqa: B905 (Python 3.9)
    return states


def _value(word: str) -> float | None:
    """``12``, ``250.00``, ``0x0000000000000004``; None for ``[N/A]``."""
    try:
        return int(word, 16) if word.startswith("0x") else float(word)
    except ValueError:
        return None


def infiniband_ports(root: str = "/sys/class/infiniband") -> list[dict[str, Any]]:
    """The ports of InfiniBand and RoCE adapters."""
    ports = []
    for path in sorted(glob.glob(f"{root}/*/ports/*")):  # noqa: PTH207
        adapter, _, port = path[len(root) + 1 :].split("/")
        ports.append(
            {
                "port": f"{adapter}:{port}",
                "state": _text(f"{path}/state").strip().partition(": ")[2],
                "rate": _text(f"{path}/rate").strip(),
            }
        )
    return ports


def _process(pid: int) -> dict[str, str]:
    """User and command of a process."""
    command = _text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:80]
    try:
        import pwd

        user = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name  # noqa: PTH116
    except (KeyError, OSError):
        user = "another user"
    return {"user": user, "command": command or "in a container"}


def remove_locks(locks: list[str]) -> list[str]:
    """Remove those of the locks that still are stale; what was done, in sentences."""
    done = []
    for lock in sorted(set(locks) & set(stale_locks())):
        try:
            os.unlink(lock)  # noqa: PTH108
            done.append(f"removed {lock}")
        except OSError as error:
            done.append(f"{lock} is not removed: {error.strerror}")
    return done


def gpu_names(directory: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """The ``Model:`` of each GPU that the driver lists, in its order."""
    names = []
    for path in sorted(glob.glob(f"{directory}/*/information")):  # noqa: PTH207
        model = re.search(r"^Model:\s*(.+)$", _text(path), re.MULTILINE)
        if model:
            names.append(model.group(1).strip())
    return names


def nvidia_driver(path: str = "/proc/driver/nvidia/version") -> str | None:
    """``570.86.15``, else the whole line where it has another form; None without a driver."""
    line = _text(path).split("\n", 1)[0].strip()
    version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", line)
    return version.group(0) if version else line or None


def cpu_model(path: str = "/proc/cpuinfo") -> str | None:
    """The CPU's name and its widest vector instructions, which choose the kernels."""
    text = _text(path)
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    flag_set = set((flags.group(1) if flags else "").split())
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flag_set]
    return " ".join([name.group(1).strip() if name else "unknown", *wide]) if text else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:  # noqa: PTH123
            return stream.read()
    except OSError:
        return ""


def nearest_directory(path: str) -> str:
    """``path``, or the nearest directory above it that exists."""
    while path and not os.path.isdir(path):  # noqa: PTH112
        path = os.path.dirname(path)  # noqa: PTH120
    return path or "/"


def size_bytes(path: str) -> int:
    """Size of a mounted file system; 0 where it is not there."""
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return 0


def stale_locks() -> list[str]:
    """Locks of extension builds that nobody finishes: a run hangs at "Loading extension module"."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions"
    locks = []
    for lock in glob.glob(f"{root}/*/lock") + glob.glob(f"{root}/*/*/lock"):  # noqa: PTH207
        try:
            if time.time() - os.path.getmtime(lock) > STALE_LOCK_S:  # noqa: PTH204
                locks.append(lock)
        except OSError:
            continue
    return sorted(locks)


if __name__ == "__main__":
    run_directory, code, request = (sys.argv[1:] + ["/", "", "{}"][len(sys.argv) - 1 :])[:3]
    print(json.dumps(survey(run_directory, code, json.loads(request))))
