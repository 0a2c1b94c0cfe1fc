"""How large a model from scratch is: it has as many rows for tokens as its tokenizer has tokens.

Read from ``tokenizer.json`` alone, without transformers. Where the tokenizer is not on this
machine, or has no such file, the plan keeps ``model.config.vocab_size``, and says that it is not
certain (``StoragePlan.certain``).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import llmx
from llmx.config import Experiment
from llmx.plan.adapter import trained_parameters
from llmx.plan.geometry import model_geometry
from llmx.plan.storage import ModelSize, with_storage
from llmx.plan.types import Plan

DEMO = Path(llmx.__file__).parent / "assets" / "demo" / "tokenizer"


def with_true_vocabulary(plan: Plan, exp: Experiment) -> Plan:
    """With the disk and the RAM that a model of the tokenizer's vocabulary takes of the hosts."""
    if plan.storage is None or plan.storage.certain == 1.0:
        return plan
    rows = tokenizer_rows(exp.model.tokenizer or exp.model.path or "")
    before = model_geometry(exp.model)
    if not rows or before is None:
        return plan
    model = replace(exp.model, config={**exp.model.config, "vocab_size": rows})
    shape = model_geometry(model)
    if shape is None:
        return plan
    whole = plan.num_parameters - before.num_parameters + shape.num_parameters
    trained = trained_parameters(model, exp.adapter) or whole
    return with_storage(plan, exp, size=ModelSize(whole, trained))


def tokenizer_rows(name: str) -> int | None:
    """The largest id of a tokenizer and one; ``name``: a local directory, or ``demo``."""
    directory = DEMO if name == "demo" else Path(name).expanduser()
    try:
        values = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = values["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = (token["id"] for token in values.get("added_tokens", ()))
        return max([*ids, *added], default=-1) + 1
    except (OSError, ValueError, KeyError, TypeError):
        return None
