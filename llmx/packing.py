"""Before a launch: can the rows of this model be packed, and can it be trained at all?

The answer comes from a trial on a tiny model (``llmx.models.isolation``), made by a process of its
own, since this one loads neither torch nor transformers. It is kept in the cache by all that it
depends on. Where it cannot be had (no transformers here, a model that only the hosts have, code of
the Hub), the ranks decide at their start; they try in any case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from llmx import snapshot
from llmx.compose import Composed, plan_experiment
from llmx.config import Experiment
from llmx.errors import ConfigError
from llmx.rundir import write_json

PROGRAM = "llmx.models.trial"
TIME_LIMIT_S = 120.0
CODE = ("attention", "choose_way", "isolation", "loss", "tiny", "trial", "varlen")
"""Modules of ``llmx.models`` that an answer depends on."""
PACKAGES = ("torch", "transformers")


def settle_layout(composed: Composed, *, stream: TextIO) -> Composed:
    """With ``data.layout`` as it will be, where that is known; a line says why rows are padded.

    ConfigError for a model that cannot be trained, and for ``data.layout=packed`` where rows would
    see each other. A plan (``dry_run``) takes what the cache knows, and starts nothing. So does a
    run of one of llmx's own kinds (llama, qwen3, ...): no start is worth seconds of waiting for an
    answer that the tests know, and the ranks try it in any case.
    """
    exp = composed.experiment
    answer = known_answer(exp)
    if answer is None and not exp.dry_run and exp.model.kind == "hf":
        answer = _ask(exp, accelerator=composed.plan.accelerator)
    if answer is None:
        return composed
    model = exp.model.path or exp.model.name or exp.model.kind
    if answer["problem"]:
        raise ConfigError(
            f"{model} cannot be trained: {answer['problem']}. Choose a causal language model."
        )
    if exp.data.layout == "packed" and not answer["packs"]:
        raise ConfigError(
            f"data.layout=packed is not right for {model}: {answer['why']}. Set data.layout=auto "
            "(or padded)."
        )
    if exp.data.layout != "auto":
        return composed
    layout = "packed" if answer["packs"] else "padded"
    if layout == "padded":
        print(f"{model}: rows are not packed (data.layout=auto): {answer['why']}.", file=stream)
    exp = dataclasses.replace(exp, data=dataclasses.replace(exp.data, layout=layout))
    return plan_experiment(exp)


def known_answer(exp: Experiment) -> dict[str, Any] | None:
    """``packs``, ``why``, ``problem`` of an earlier trial of the same; None where there is none."""
    try:
        answer = json.loads(_cached(exp).read_text(encoding="utf-8"))
        return {name: answer[name] for name in ("packs", "why", "problem")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _cached(exp: Experiment) -> Path:
    root = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()
    return root / "trials" / f"{_key(exp)}.json"


def _key(exp: Experiment) -> str:
    """Of all that the answer depends on: the config, its switches, packages, and our code."""
    model = exp.model
    code = hashlib.sha256()
    for name in CODE:
        code.update((Path(__file__).parent / "models" / f"{name}.py").read_bytes())
    parts = {
        "kind": model.kind,
        "path": model.path,
        "revision": model.revision,
        "config": model.config,
        "files": _config_file(model.path),
        "attention": model.attention,
        "layout": exp.data.layout,
        "seq_len": exp.data.seq_len,
        "devices": sorted(device.accelerator for device in exp.hardware.devices.values()),
        "packages": {name: _version(name) for name in PACKAGES},
        "code": code.hexdigest(),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _config_file(path: str | None) -> str | None:
    """Of a local model: another one may be written to the same directory."""
    try:
        return (Path(path or "").expanduser() / "config.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ask(exp: Experiment, *, accelerator: str) -> dict[str, Any] | None:
    """The trial in a process of its own; None where it gives no answer."""
    if exp.model.trust_remote_code or not all(map(importlib.util.find_spec, PACKAGES)):
        return None
    with tempfile.TemporaryDirectory(prefix="llmx-trial-") as name:
        config, result = Path(name) / "config.yaml", Path(name) / "answer.json"
        config.write_text(snapshot.dump_config(exp), encoding="utf-8")
        words = [sys.executable, "-m", PROGRAM, str(config), str(result), accelerator]
        # No GPU is touched before the launch, and nothing is downloaded.
        environment = {
            **os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        try:
            subprocess.run(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TIME_LIMIT_S,
                check=True,
            )
            answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
    if answer.get("unknown"):
        return None
    path = _cached(exp)
    with contextlib.suppress(OSError):  # the next launch asks again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, answer)
    return answer
