"""Whether a directory holds what writes text, from its config files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmx.run.exported import generates_no_text


@pytest.mark.parametrize(
    ("config", "adapter", "wanted"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, None),
        ({"architectures": ["BertForMaskedLM"]}, {}, "BertForMaskedLM"),
        ({"architectures": ["BertModel"]}, {}, "BertModel"),
        ({}, {"task_type": "CAUSAL_LM"}, None),
        ({}, {"task_type": "FEATURE_EXTRACTION"}, "FEATURE_EXTRACTION"),
        ({}, {"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({}, {"task_type": None, "base_model_name_or_path": "owner/name"}, None),
    ],
)
def test_what_writes_no_text(
    config: dict[str, Any], adapter: dict[str, Any], wanted: str | None, tmp_path: Path
) -> None:
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if adapter:
        (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    assert generates_no_text(tmp_path) == wanted


def test_an_adapter_of_a_kind_that_has_no_name_is_as_its_base(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    said = {"task_type": None, "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    assert generates_no_text(adapter) == "BertForMaskedLM"
