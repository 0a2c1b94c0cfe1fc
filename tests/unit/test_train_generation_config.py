"""Where an answer ends: every stop token is in ``generation_config.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.checkpoint.export.model import write_description
from llmx.config import ModelConfig
from llmx.data.format.templates import choose_template
from llmx.models.generate import FILE, keep_generation_config, stop_ids
from tests.small_models import small_model
from tests.small_tokenizers import byte_tokenizer

CHATML = ("<|im_start|>", "<|im_end|>")


def model_and_tokenizer(*more: str, template: str | None = "chatml") -> tuple[Any, Any]:
    tokenizer = byte_tokenizer(*CHATML, *more)
    if template is not None:
        tokenizer.chat_template = choose_template(tokenizer, template)[1]
    model = small_model("llama", vocab_size=len(tokenizer))
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


@pytest.fixture
def described(tmp_path: Path) -> Callable[[Any, Any], dict[str, Any]]:
    """``generation_config.json`` as an export writes it."""

    def describe(model: Any, tokenizer: Any) -> dict[str, Any]:
        write_description(
            tmp_path, model, model.config, tokenizer=tokenizer, vocab_size=len(tokenizer),
            dtype=torch.float32,
        )  # fmt: skip
        return dict(json.loads((tmp_path / FILE).read_text()))

    return describe


def published(directory: Path, model: Any, **values: Any) -> ModelConfig:
    """A model directory that somebody else wrote; ``values`` go into its generation config."""
    model.save_pretrained(directory)
    (directory / FILE).write_text(json.dumps(values))
    return ModelConfig(path=str(directory), init="pretrained")


@pytest.mark.parametrize(
    ("template", "published_ends", "ends"),
    [
        ("chatml", None, ["</s>", "<|im_end|>"]),
        ("vicuna", None, ["</s>"]),
        ("chatml", ["</s>", "<|eom_id|>"], ["</s>", "<|eom_id|>", "<|im_end|>"]),
        # What is ordinary text in another tokenizer, or not there at all.
        ("chatml", ["a", 128_009], ["</s>", "<|im_end|>"]),
    ],
)
def test_stop_tokens_are_those_of_the_turn_of_eos_and_of_the_pretrained_model(
    template, published_ends, ends, described, tmp_path
) -> None:
    model, tokenizer = model_and_tokenizer("<|eom_id|>", template=template)
    if published_ends is not None:
        ids = [tokenizer.convert_tokens_to_ids(e) if e != 128_009 else e for e in published_ends]
        source = published(tmp_path / "in", model, eos_token_id=ids, top_k=7)
        keep_generation_config(model, source)
    written = described(model, tokenizer)
    wanted = sorted(tokenizer.convert_tokens_to_ids(ends))
    assert written["eos_token_id"] == (wanted if len(wanted) > 1 else wanted[0])
    assert written.get("top_k") == (None if published_ends is None else 7)
    assert not written.get("_from_model_config"), "or an older generate() derives it anew"


def test_without_a_chat_template_it_is_the_eos_token() -> None:
    model, tokenizer = model_and_tokenizer(template=None)
    assert stop_ids(model, tokenizer) == (tokenizer.eos_token_id,)


@pytest.mark.filterwarnings("ignore:.*temperature")
def test_a_published_config_that_transformers_would_refuse_is_kept(described, tmp_path) -> None:
    """Llama 2's: ``save_pretrained`` refuses a changed config with a temperature it ignores."""
    model, tokenizer = model_and_tokenizer()
    source = published(tmp_path / "in", model, temperature=0.6, do_sample=False)
    keep_generation_config(model, source)
    written = described(model, tokenizer)
    assert written["temperature"] == 0.6
    assert len(written["eos_token_id"]) == 2


def test_a_model_without_a_generation_config_keeps_that_of_its_config(tmp_path: Path) -> None:
    model, _ = model_and_tokenizer()
    source = published(tmp_path / "in", model)
    (tmp_path / "in" / FILE).unlink()
    before = model.generation_config
    keep_generation_config(model, source)
    assert model.generation_config is before
