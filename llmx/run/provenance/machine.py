"""What numbers depend on in this machine: packages, CUDA, NCCL, GPUs, CPU, variables.

Read from files; nothing is imported, and no driver is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from llmx.hardware.survey import cpu_model, gpu_names, nvidia_driver, version

PACKAGES = (
    "torch", "deepspeed", "transformers", "datasets", "tokenizers", "tiktoken", "sentencepiece",
    "accelerate", "safetensors", "peft", "bitsandbytes", "hydra-core", "omegaconf", "numpy",
    "wandb",
)  # fmt: skip
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


@dataclass(frozen=True)
class Machine:
    """Facts of this machine; None or empty where there is none of it."""

    driver: str | None
    cuda: str | None
    """The CUDA that torch was built for."""
    nccl: dict[str, str]
    gpus: list[str]
    """Their names, in the driver's order."""
    cpu: str | None


def this_machine() -> Machine:
    """This machine."""
    return Machine(
        driver=nvidia_driver(),
        cuda=torch_cuda(),
        nccl={name: found for name in NCCL_PACKAGES if (found := version(name))},
        gpus=gpu_names(),
        cpu=cpu_model(),
    )


def packages() -> dict[str, str | None]:
    """Name -> installed version, null where it is not installed."""
    return {name: version(name) for name in PACKAGES}


def torch_cuda() -> str | None:
    """The CUDA (or ROCm) of the installed torch, from its ``version.py``; None for a CPU build."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    for name in ("cuda", "hip"):
        found = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if found:
            return found.group(1) if name == "cuda" else f"ROCm {found.group(1)}"
    return None


def numeric_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Those variables of the ranks that may change numbers."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(NUMERIC_PREFIXES) and name not in _OTHER
    }
