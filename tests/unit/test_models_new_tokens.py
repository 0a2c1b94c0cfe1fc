"""Tokens that are added: to the tokenizer, and as rows of pretrained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from llmx.checkpoint.export.model import export_model
from llmx.config import Experiment, experiment_from_dict
from llmx.config.model_rules import added_token_problems
from llmx.data import load_tokenizer
from llmx.data.tokenize.tokenizer import tokenizer_fingerprint
from llmx.errors import ConfigError
from llmx.models.adapter import load_adapted
from llmx.models.factory import model_config, new_token_ids, true_vocab, vocab_rows
from llmx.models.network_config import network_config
from llmx.train.memory_trace import networks_of
from tests.reference import VOCABULARY, word_tokenizer
from tests.small_models import network_of, small_model
from tests.unit.test_models_adapter import (
    adapted,
    logits,
    merged,
    train_a_little,
    written,
)
from tests.unit.test_models_classification import BERT

NEW = ["<think>", "</think>", "<|tool|>"]
NONE: dict[str, Any] = {"add_tokens": [], "add_special_tokens": []}
ADAPTER = {"kind": "lora", "rank": 2, "targets": ["q_proj"]}


def experiment(base: Path, **more: Any) -> Experiment:
    model = {
        "kind": "hf",
        "path": str(base),
        "add_tokens": NEW[:2],
        "add_special_tokens": NEW[2:],
        **more.pop("model", {}),
    }
    return experiment_from_dict({"model": model, "data": {"seq_len": 32}, **more})


def saved(directory: Path, kind: str, *, rows: int, **config: Any) -> Any:
    """A pretrained model with ``rows`` rows and the tokenizer of ``VOCABULARY`` words."""
    model = small_model(kind, vocab_size=rows, **config)
    model.save_pretrained(directory)
    word_tokenizer().save_pretrained(directory)
    return model


def built(exp: Experiment, *, head: str = "causal_lm") -> tuple[Any, Any, Any]:
    """(network, config, tokenizer) as a rank makes them."""
    tokenizer = load_tokenizer(exp.model, template="auto", chats=False)
    config = model_config(exp.model, exp.data, tokenizer=tokenizer)
    network = network_of(exp, config, head=head, new_tokens=new_token_ids(exp.model, tokenizer))
    return network, config, tokenizer


def test_the_tokenizer_finds_them_in_texts_and_writes_special_ones_itself(tmp_path: Path) -> None:
    saved(tmp_path, "llama", rows=VOCABULARY)
    exp = experiment(tmp_path)
    plain = experiment(tmp_path, model=NONE)
    before = load_tokenizer(plain.model, template="auto", chats=False)
    tokenizer = load_tokenizer(exp.model, template="auto", chats=False)
    assert tokenizer.convert_tokens_to_ids(NEW) == [VOCABULARY + n for n in range(3)]
    assert tokenizer("w3<think>w4</think>")["input_ids"] == [3, VOCABULARY, 4, VOCABULARY + 1]
    special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    assert special - set(before.all_special_tokens) == {NEW[2]}
    shown = tokenizer.decode([3, VOCABULARY, VOCABULARY + 2], skip_special_tokens=True)
    assert "<think>" in shown
    assert "<|tool|>" not in shown
    assert tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(before)


def test_one_that_is_there_already_or_can_be_no_token_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama", rows=VOCABULARY)
    for key, word in (("add_tokens", "w7"), ("add_special_tokens", "</s>")):
        exp = experiment(tmp_path, model={key: ["<new>", word]})
        with pytest.raises(ConfigError, match=rf"model\.{key}: {word} is token \d+ of the token"):
            load_tokenizer(exp.model, template="auto", chats=False)

    exp = experiment(tmp_path, model={"add_tokens": ["a", " ", "a"], "add_special_tokens": ["a"]})
    found = list(added_token_problems(exp.model))
    assert len(found) == 3
    assert "white space" in found[0]
    assert "stands in model.add_tokens already" in found[2]


@pytest.mark.parametrize(
    ("kind", "tied", "spare"),
    [
        ("llama", False, 0),
        ("llama", True, 2),
        ("gpt2", False, 2),
        ("opt", True, 40),
    ],
)
def test_new_rows_are_the_mean_of_the_tokens_that_were_there(
    kind: str, tied: bool, spare: int, group: None, tmp_path: Path
) -> None:
    """Also where the embedding had rows to spare, which nobody has trained; exported with them."""
    rows = VOCABULARY + spare
    before = saved(tmp_path, kind, rows=rows, tie_word_embeddings=tied)
    exp = experiment(tmp_path)
    network, config, tokenizer = built(exp)
    assert true_vocab(tokenizer) == VOCABULARY + 3
    counted = vocab_rows(exp.model, network_config(exp.model), tokenizer)
    assert counted == max(rows, VOCABULARY + 3)
    grows = spare < 3
    assert config.vocab_size == (-(-counted // 64) * 64 if grows else rows)
    for table, old in (
        (network.get_input_embeddings().weight, before.get_input_embeddings().weight),
        (network.get_output_embeddings().weight, before.get_output_embeddings().weight),
    ):
        mean = old[:VOCABULARY].double().mean(0).float()
        torch.testing.assert_close(table[VOCABULARY : VOCABULARY + 3], mean.expand(3, -1))
        assert torch.equal(table[:VOCABULARY], old[:VOCABULARY])
        assert torch.equal(table[VOCABULARY + 3 : rows], old[VOCABULARY + 3 :])
        assert not table[counted:].any()
    assert (network.lm_head.weight is network.get_input_embeddings().weight) == tied
    ids = torch.arange(12)[None] + 3
    found = logits(network, ids)[..., :VOCABULARY]
    torch.testing.assert_close(found, logits(before, ids)[..., :VOCABULARY])
    export_model(
        network, config, tokenizer=tokenizer, vocab_size=counted, dtype=torch.float32,
        directory=tmp_path / "model",
    )  # fmt: skip
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert again.config.vocab_size == counted
    assert AutoTokenizer.from_pretrained(tmp_path / "model").convert_tokens_to_ids(NEW) == [
        VOCABULARY + n for n in range(3)
    ]
    ids = torch.arange(VOCABULARY - 9, VOCABULARY + 3)[None]
    torch.testing.assert_close(logits(again, ids), logits(network, ids)[..., :counted])


def test_a_bias_of_the_head_grows_with_it(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bert", **{**BERT, "vocab_size": VOCABULARY})
    before = AutoModelForMaskedLM.from_config(config)
    with torch.no_grad():
        before.cls.predictions.bias.copy_(torch.arange(VOCABULARY) * 1.0)
    before.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    network, _, _ = built(experiment(tmp_path), head="masked_lm")
    bias = network.get_output_embeddings().bias
    assert bias[VOCABULARY : VOCABULARY + 3].tolist() == [(VOCABULARY - 1) / 2] * 3
    assert network.cls.predictions.bias is bias


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_trains_them_and_its_files_have_them(
    tied: bool, group: None, tmp_path: Path
) -> None:
    """Embedding and head go along, whole: frozen, new rows would stay the mean for ever."""
    base = tmp_path / "base"
    saved(base, "llama", rows=VOCABULARY, tie_word_embeddings=tied)
    exp = experiment(base, adapter=ADAPTER)
    network, config, tokenizer = built(exp)
    made = adapted(network, exp)
    assert made.description["modules_to_save"] == ["embed_tokens", "lm_head"]
    train_a_little(network)
    directory = written(
        tmp_path / "adapter", network, made, tokenizer=tokenizer, vocab_size=VOCABULARY + 3
    )
    ids = torch.arange(VOCABULARY - 9, VOCABULARY + 3)[None]
    wanted = logits(network, ids)[..., : VOCABULARY + 3]
    torch.testing.assert_close(logits(load_adapted(directory, exp.model), ids), wanted)
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(len(tokenizer), mean_resizing=False)  # as peft asks for
    read = PeftModel.from_pretrained(plain, str(directory))
    torch.testing.assert_close(logits(read, ids), wanted)
    described = config.__class__.from_dict({**config.to_dict(), "vocab_size": VOCABULARY + 3})
    described.save_pretrained(directory)
    whole = AutoModelForCausalLM.from_pretrained(merged(directory, exp))
    torch.testing.assert_close(logits(whole, ids), wanted, rtol=1e-4, atol=1e-5)


def test_the_plan_counts_them(tmp_path: Path) -> None:
    saved(tmp_path, "llama", rows=VOCABULARY)
    model: dict[str, Any] = {"pad_vocab_to_multiple_of": 1}
    ours, theirs = (
        networks_of(experiment(tmp_path, model={**model, **none}, adapter=ADAPTER))["policy"]
        for none in ({}, NONE)
    )
    assert ours.vocab_size == VOCABULARY + 3
    assert ours.num_parameters == theirs.num_parameters + 2 * 3 * ours.hidden_size
    # Whoever adds tokens trains the embedding and the head with the adapter.
    trained = theirs.num_trained + 2 * (VOCABULARY + 3) * ours.hidden_size
    assert ours.num_trained == trained
