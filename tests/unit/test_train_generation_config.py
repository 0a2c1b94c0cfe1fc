"""Where an answer ends: every stop token is in ``generation_config.json``."""

from __future__ import annotations

import json
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


def chat_tokenizer(*more: str, template: str = "chatml") -> Any:
    tokenizer = byte_tokenizer(*CHATML, *more)
    tokenizer.chat_template = choose_template(tokenizer, template)[1]
    return tokenizer


def model_for(tokenizer: Any) -> Any:
    model = small_model("llama", vocab_size=len(tokenizer))
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
    return model


def described(directory: Path, model: Any, tokenizer: Any) -> dict[str, Any]:
    """``generation_config.json`` as an export writes it."""
    directory.mkdir()
    write_description(
        directory,
        model,
        model.config,
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        dtype=torch.float32,
    )
    return dict(json.loads((directory / FILE).read_text()))


def published(directory: Path, model: Any, **values: Any) -> ModelConfig:
    """A model directory that somebody else wrote; ``values`` go into its generation config."""
    model.save_pretrained(directory)
    (directory / FILE).write_text(json.dumps(values))
    return ModelConfig(path=str(directory), init="pretrained")


def test_the_end_of_a_turn_is_a_stop_token_beside_the_eos_token(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    written = described(tmp_path / "out", model_for(tokenizer), tokenizer)
    ends = ["</s>", "<|im_end|>"]
    assert written["eos_token_id"] == sorted(tokenizer.convert_tokens_to_ids(ends))
    assert not written.get("_from_model_config"), "or an older generate() derives it anew"


def test_one_stop_token_is_written_as_a_number(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(template="vicuna")
    written = described(tmp_path / "out", model_for(tokenizer), tokenizer)
    assert written["eos_token_id"] == tokenizer.eos_token_id


def test_without_a_chat_template_it_is_the_eos_token() -> None:
    tokenizer = byte_tokenizer(*CHATML)
    assert stop_ids(model_for(tokenizer), tokenizer) == (tokenizer.eos_token_id,)


def test_a_pretrained_model_keeps_its_own_stop_tokens(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("<|eom_id|>")
    model = model_for(tokenizer)
    eom = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    source = published(tmp_path / "in", model, eos_token_id=[tokenizer.eos_token_id, eom], top_k=7)
    keep_generation_config(model, source)
    written = described(tmp_path / "out", model, tokenizer)
    assert written["eos_token_id"] == sorted(
        [tokenizer.eos_token_id, eom, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    )
    assert written["top_k"] == 7


def test_ids_that_are_ordinary_text_in_another_tokenizer_are_left_out(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    model = model_for(tokenizer)
    letter = tokenizer.convert_tokens_to_ids("a")
    keep_generation_config(model, published(tmp_path / "in", model, eos_token_id=[letter, 128_009]))
    assert letter not in stop_ids(model, tokenizer)
    assert 128_009 not in stop_ids(model, tokenizer)


@pytest.mark.filterwarnings("ignore:.*temperature")
def test_a_published_config_that_transformers_would_refuse_is_kept(tmp_path: Path) -> None:
    """Llama 2's: ``save_pretrained`` refuses a changed config with a temperature it ignores."""
    tokenizer = chat_tokenizer()
    model = model_for(tokenizer)
    keep_generation_config(
        model, published(tmp_path / "in", model, temperature=0.6, do_sample=False)
    )
    written = described(tmp_path / "out", model, tokenizer)
    assert written["temperature"] == 0.6
    assert len(written["eos_token_id"]) == 2


def test_a_model_without_a_generation_config_keeps_that_of_its_config(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    model = model_for(tokenizer)
    source = published(tmp_path / "in", model)
    (tmp_path / "in" / FILE).unlink()
    before = model.generation_config
    keep_generation_config(model, source)
    assert model.generation_config is before
