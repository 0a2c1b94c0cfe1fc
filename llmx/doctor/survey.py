"""Facts of a host that ranks depend on: printed as one JSON line by the Python of the ranks.

Standard library only, one file: the supervisor sends its text to every host, where the
environment's own Python runs it, so that a host needs neither llmx nor the code.

    python llmx/doctor/survey.py /path/of/the/run [/path/of/the/package/llmx]
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import resource
import shutil
import sys
import time
from importlib import metadata

COMPARED = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "safetensors")
STALE_LOCK_S = 600


def survey(run_dir: str, package: str = "") -> dict:
    """The facts, as plain values. ``package``: the directory of llmx's code."""
    return {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "packages": {name: version(name) for name in COMPARED},
        "nccl": sorted(
            f"{dist.metadata['Name']}=={dist.version}"
            for dist in metadata.distributions()
            if (dist.metadata["Name"] or "").startswith("nvidia-nccl")
        ),
        "gpus": count_gpus(),
        "gpu_names": gpu_names(),
        "driver": nvidia_driver(),
        "cpu": cpu_model(),
        "free_bytes": free_bytes(run_dir),
        "shm_bytes": size_bytes("/dev/shm"),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "ninja": which("ninja"),
        "compiler": any(which(name) for name in ("c++", "g++", "clang++")),
        "stale_locks": stale_locks(),
        "code": code_hash(package),
    }


def which(name: str) -> bool:
    """Whether a rank finds the program: beside its Python first, however this one was started."""
    beside = os.path.dirname(sys.executable)  # noqa: PTH120
    return shutil.which(name, path=f"{beside}:{os.environ.get('PATH', '')}") is not None


def code_hash(package: str) -> str | None:
    """Of every source below a directory, by name and content; None where there is none."""
    if not package:
        return None
    found = hashlib.blake2b(digest_size=6)
    paths = sorted(glob.glob(f"{glob.escape(package)}/**/*.py", recursive=True))  # noqa: PTH207
    for path in paths:
        with open(path, "rb") as stream:  # noqa: PTH123
            content = stream.read()
        name = os.path.relpath(path, package)
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest() if paths else None


def version(name: str) -> str | None:
    """Of an installed package; None without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def count_gpus() -> int | None:
    """GPUs of the NVIDIA driver; None without a driver."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))  # noqa: PTH208
    except OSError:
        return None


def gpu_names(directory: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """The ``Model:`` of each GPU that the driver lists, in its order."""
    names = []
    for path in sorted(glob.glob(f"{directory}/*/information")):  # noqa: PTH207
        found = re.search(r"^Model:\s*(.+)$", _text(path), re.MULTILINE)
        if found:
            names.append(found.group(1).strip())
    return names


def nvidia_driver(path: str = "/proc/driver/nvidia/version") -> str | None:
    """``570.86.15``, else the whole line where it has another form; None without a driver."""
    line = _text(path).split("\n", 1)[0].strip()
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", line)
    return found.group(0) if found else line or None


def cpu_model(path: str = "/proc/cpuinfo") -> str | None:
    """The CPU's name and its widest vector instructions, which choose the kernels."""
    text = _text(path)
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    known = set((flags.group(1) if flags else "").split())
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in known]
    return " ".join([name.group(1).strip() if name else "unknown", *wide]) if text else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:  # noqa: PTH123
            return stream.read()
    except OSError:
        return ""


def free_bytes(path: str) -> int:
    """Free on the disk of the nearest directory above ``path`` that exists."""
    while path and not os.path.isdir(path):  # noqa: PTH112
        path = os.path.dirname(path)  # noqa: PTH120
    return shutil.disk_usage(path or "/").free


def size_bytes(path: str) -> int:
    """Size of a mounted file system; 0 where it is not there."""
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return 0


def stale_locks() -> list[str]:
    """Locks of extension builds that nobody finishes: a run hangs at "Loading extension module"."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser(  # noqa: PTH111
        "~/.cache/torch_extensions"
    )
    found = []
    for lock in glob.glob(f"{root}/*/lock") + glob.glob(f"{root}/*/*/lock"):  # noqa: PTH207
        try:
            if time.time() - os.path.getmtime(lock) > STALE_LOCK_S:  # noqa: PTH204
                found.append(lock)
        except OSError:
            continue
    return sorted(found)


if __name__ == "__main__":
    print(json.dumps(survey(*(sys.argv[1:3] or ["/"]))))
