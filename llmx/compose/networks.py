"""The config of a network, as the installed transformers reads it, without loading transformers.

``llmx.models.network_config`` reads it in a process of its own; the answer is kept in the cache by
all that it depends on, so a directory is read once. Shown by
``python -m pytest tests/unit/test_network_config.py``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import llmx
from llmx.config import ModelConfig
from llmx.config.model_rules import as_typed, model_config_problems, quantized_problem
from llmx.hardware.survey import version
from llmx.run.provenance.content import hub_commit
from llmx.run.rundir import read_mapping, write_json
from llmx.run.scratch import ask

PROGRAM = "llmx.models.network_config"
TIME_LIMIT_S = 60.0


def with_network(model: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """``model`` with ``resolved``, where its config is on this machine; and what is wrong with the
    file or with typed values. A snapshot keeps what it has where the file is elsewhere."""
    model = replace(model, config=as_typed(model.config))
    if model.path is None or (model.kind != "hf" and model.init == "scratch"):
        return replace(model, resolved={}, resolved_from=None), []
    if any(model_config_problems(model)):
        return model, []  # reported with the other rules
    answer, fingerprint = _answer(model)
    if (problem := answer.get("unreadable")) and Path(model.path).is_absolute():
        return model, [
            f"{Path(model.path) / 'config.json'}: transformers {version('transformers')} cannot "
            f"read it: {problem} Correct the value with model.config.KEY=VALUE, or in the file."
        ]
    if problems := answer.get("problems"):
        return model, problems
    if config := answer.get("config"):
        quantization = config.get("quantization_config") if model.init == "pretrained" else None
        if problem := quantized_problem(quantization, f"model.path={model.path}"):
            return model, [problem]
        return replace(model, resolved=config, resolved_from=fingerprint), []
    return model, []


def network_of(path: str, revision: str | None = None) -> dict[str, Any]:
    """The config of a network that a task names (a directory, a Hub id); empty where it is not on
    this machine or cannot be read."""
    answer, _ = _answer(ModelConfig(path=path, revision=revision))
    return dict(answer.get("config") or {})


def _answer(model: ModelConfig) -> tuple[dict[str, Any], str | None]:
    """The answer of the program, and the fingerprint of the file; empty where there is no file, or
    where only code of the Hub can read it, which only the ranks run."""
    path = Path(str(model.path)).expanduser()
    if path.is_absolute():
        try:
            text = (path / "config.json").read_bytes()
        except OSError:
            return {}, None
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            if "AutoConfig" in json.loads(text).get("auto_map", {}) and model.trust_remote_code:
                return {}, None
        fingerprint = hashlib.blake2b(text, digest_size=16).hexdigest()
    else:
        commit = hub_commit(str(model.path), kind="models", revision=model.revision)
        if commit is None or model.trust_remote_code:
            return {}, None
        fingerprint = commit
    request = {"path": str(model.path), "revision": model.revision, "config": model.config}
    return _asked(json.dumps(request, sort_keys=True), fingerprint), fingerprint


@functools.lru_cache(maxsize=64)
def _asked(request: str, fingerprint: str) -> dict[str, Any]:
    package = Path(llmx.__file__).parent
    code = (package / "models" / "network_config.py").read_bytes()
    parts = [request, fingerprint, version("transformers") or "", hashlib.sha256(code).hexdigest()]
    name = hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    root = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser()
    place = root / "networks" / f"{name}.json"
    if answer := read_mapping(place):
        return dict(answer)
    answer = ask(PROGRAM, request, timeout_s=TIME_LIMIT_S)
    if not isinstance(answer, dict):
        return {}
    with contextlib.suppress(OSError):  # else it is read again
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, answer)
    return answer
