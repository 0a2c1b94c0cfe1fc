"""The recording: the facts of every case, and where they were recorded; one fact a line."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.conftest import GOLDEN, REPOSITORY

FILE = GOLDEN / "behaviour.json"

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "tiktoken", "numpy", "safetensors")
CPU_FLAGS = (
    "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "asimd", "bf16", "sve",
)  # fmt: skip
"""Those by which numeric libraries choose their kernels."""
VARIABLES = ("OMP_", "MKL_", "ATEN_", "ONEDNN_", "DNNL_", "TORCH_", "PYTORCH_", "DS_")


@dataclass
class Recording:
    """Facts by case, and the environment that they were recorded in."""

    environment: dict[str, Any]
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    commit: str = ""
    """The last one that changed the package, its configuration or its launchers."""

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a recording; FileNotFoundError where there is none."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(content["environment"], content["cases"], content["commit"])

    def save(self, path: Path) -> None:
        """Write it, a fact a line, so that a diff shows which one changed."""

        def lines(values: dict[str, Any]) -> str:
            return ",\n".join(
                f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
                for name, value in values.items()
            )

        cases = ",\n".join(
            f" {json.dumps(name)}: {{\n{lines(facts)}\n }}" for name, facts in self.cases.items()
        )
        path.write_text(
            f'{{"commit": {json.dumps(self.commit)},\n"environment": {{\n'
            f'{lines(self.environment)}\n}},\n"cases": {{\n{cases}\n}}}}\n',
            encoding="utf-8",
        )


def environment() -> dict[str, Any]:
    """What floating-point results depend on beside the code."""
    import torch

    cpu = _cpu_info()
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    variables = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
    }
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
        "machine": platform.machine(),
        "cpu": cpu.get("model name", ""),
        "cpu_flags": [name for name in CPU_FLAGS if name in flags],
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        # One thread a rank: set for every run.
        "variables": variables | {"OMP_NUM_THREADS": "1"},
    }


def _cpu_info() -> dict[str, str]:
    """The first processor of ``/proc/cpuinfo``."""
    place = Path("/proc/cpuinfo")
    text = place.read_text(encoding="utf-8", errors="replace") if place.is_file() else ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def commit() -> str:
    """Of the code that is run, with ``changed`` where it has uncommitted changes."""

    def git(*words: str) -> str:
        argv = ["git", "-C", str(REPOSITORY), *words, "--", "llmx", "conf", "launchers"]
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()

    found = git("log", "-1", "--format=%h %s")
    return f"{found} (changed)" if git("status", "--porcelain") else found
