"""Questions that need torch, asked before a launch: of a process of its own, as this one loads
neither torch nor transformers. Answers are kept in the cache by all that they depend on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from llmx.config import Experiment
from llmx.config.user_code import user_task
from llmx.run.rundir import write_json
from llmx.run.scratch import scratch_directory

PACKAGES = ("torch", "transformers")


def ask(exp: Experiment, program: str, given: str, *words: str, timeout_s: float) -> Any:
    """What ``python -m program FILE ANSWER words`` wrote to ANSWER as JSON, ``given`` in FILE; what
    it had written by then, if it failed or took longer. None where there is nothing: no torch here,
    or code of the Hub, which only the ranks run."""
    if exp.model.trust_remote_code or not all(map(importlib.util.find_spec, PACKAGES)):
        return None
    with scratch_directory() as directory:
        file, answer = directory / "given", directory / "answer.json"
        file.write_text(given, encoding="utf-8")
        # No GPU is touched before the launch, and nothing is downloaded.
        environment = {
            **os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if (task := user_task(exp.task)) is not None:
            paths = [str(task.root), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [sys.executable, "-m", program, str(file), str(answer), *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=True,
            )
        try:
            return json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def cache_file(folder: str, parts: Mapping[str, Any]) -> Path:
    """Where an answer is kept that depends on ``parts``."""
    text = json.dumps(parts, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    root = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()
    return root / folder / f"{name}.json"


def keep(path: Path, answer: Mapping[str, Any]) -> None:
    """Written where it is looked for; where that cannot be, it is asked again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, answer)


def hash_of(files: Iterable[Path]) -> str:
    """Of code that an answer depends on; a file that is not there counts as empty."""
    code = hashlib.sha256()
    for file in files:
        with contextlib.suppress(OSError):
            code.update(file.read_bytes())
    return code.hexdigest()


def config_file(path: str | None) -> str | None:
    """Of a local model: another one may be written to the same directory."""
    try:
        return (Path(path or "").expanduser() / "config.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
