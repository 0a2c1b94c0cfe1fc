"""What runs: the code with its commit and a hash of every file, packages, devices and variables."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llmx
from llmx.hardware.survey import cpu_model, gpu_names, nvidia_driver, toolkit_of_torch, version
from llmx.run.provenance.differences import NUMERIC_PACKAGES

PACKAGES = (*NUMERIC_PACKAGES, "hydra-core", "omegaconf", "wandb")
NCCL_PACKAGES = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
NUMERIC_PREFIXES = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "TORCH_", "PYTORCH_",
    "TORCHINDUCTOR_", "TRITON_", "DS_", "ONEDNN_", "DNNL_", "NVIDIA_TF32",
)  # fmt: skip
_OTHER = (
    "DS_ACCELERATOR",
    "NCCL_SOCKET_IFNAME",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "CUDA_HOME",
    "CUDA_PATH",
)
"""Variables with such a prefix that say where, not how, or that the plan says already."""


def machine_facts() -> dict[str, Any]:
    """Driver, CUDA of torch, NCCL by package, names of the GPUs, and CPU of this machine."""
    cuda, rocm = toolkit_of_torch("cuda"), toolkit_of_torch("hip")
    return {
        "nvidia_driver": nvidia_driver(),
        "cuda": f"ROCm {rocm}" if rocm and not cuda else cuda,
        "nccl": {name: installed for name in NCCL_PACKAGES if (installed := version(name))},
        "gpus": gpu_names(),
        "cpu": cpu_model(),
    }


def packages() -> dict[str, str | None]:
    """Name -> installed version, null where it is not installed."""
    return {name: version(name) for name in PACKAGES}


def numeric_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the ranks that may change numbers."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(NUMERIC_PREFIXES) and name not in _OTHER
    }


UNTRACKED_BYTES = 1 << 20
"""Python files that git does not know are recorded with their text, up to so much in all."""

_DIFF = (
    "-c", "core.quotepath=off", "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff",
    "--no-textconv", "--no-relative", "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip
"""As ``git apply`` reads it, whatever the user's own configuration says."""


def code_files(package: Path | None = None) -> dict[str, str]:
    """``llmx/...py`` -> a hash of its bytes, of every Python file of the running package."""
    package = package or Path(llmx.__file__).resolve().parent
    return {
        f"llmx/{path.relative_to(package).as_posix()}": hashlib.blake2b(
            path.read_bytes(), digest_size=8
        ).hexdigest()
        for path in sorted(package.rglob("*.py"))
    }


def git(directory: Path, *args: str, timeout_s: float = 20.0) -> bytes | None:
    """The output of git there; None where it fails, or is not installed."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(directory), *args],
            capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit, diff of tracked files and the Python files git does not know; None outside one.

    ``diff`` is null where it is not UTF-8 (it could not be applied again). ``untracked``:
    path from the root of the checkout -> text, null for a file whose text is not recorded.
    """
    commit = git(directory, "rev-parse", "HEAD")
    # An installed llmx may lie inside somebody else's checkout: only its own code counts.
    tracked = git(directory, "ls-files", "--error-unmatch", "__init__.py")
    if commit is None or tracked is None:
        return None
    root = Path((git(directory, "rev-parse", "--show-toplevel") or b"").decode().strip())
    try:
        diff: str | None = (git(directory, *_DIFF) or b"").decode("utf-8")
    except UnicodeDecodeError:
        diff = None
    return {
        "commit": commit.decode().strip(),
        "root": str(root),
        "diff": diff,
        "untracked": _untracked(root, package=directory),
    }


def _untracked(root: Path, *, package: Path) -> dict[str, str | None]:
    """Text only of files that are part of the package: others are not run by llmx."""
    listed = git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py") or b""
    texts: dict[str, str | None] = {}
    left = UNTRACKED_BYTES
    for name in listed.decode("utf-8", "replace").split("\0"):
        if not name:
            continue
        path, text = root / name, None
        if path.resolve().is_relative_to(package.resolve()):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                text = None
            if text is not None and len(text) > left:
                text = None
            left -= len(text or "")
        texts[name] = text
    return texts
