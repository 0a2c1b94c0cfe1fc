"""A new model: its config, what is refused before it is built, and weights from scratch, drawn by
threads and in turn alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.errors import ConfigError
from llmx.models import initialise as drawing
from llmx.models.factory import model_config, padded_vocab, true_vocab
from llmx.models.initialise import initialise, module_seed
from tests.reference import VOCABULARY, word_tokenizer
from tests.rundirs import PARITY_MODELS, parity_experiment
from tests.small_models import CONVERTED, KINDS, converted_model, small_model


@pytest.mark.parametrize(
    ("size", "multiple", "padded"),
    [(1, 64, 64), (64, 64, 64), (65, 64, 128), (50_257, 64, 50_304), (90, 1, 90)],
)
def test_padded_vocabulary(size: int, multiple: int, padded: int) -> None:
    assert padded_vocab(size, multiple_of=multiple) == padded


def test_true_vocabulary_counts_the_holes() -> None:
    tokenizer = word_tokenizer()
    assert true_vocab(tokenizer) == VOCABULARY
    tokenizer.backend_tokenizer.add_tokens(["later"])
    assert true_vocab(tokenizer) == VOCABULARY + 1


@pytest.mark.parametrize("kind", sorted(PARITY_MODELS))
def test_a_new_model_takes_the_tokenizers_vocabulary(kind: str, tmp_path: Path) -> None:
    exp = parity_experiment(tmp_path, kind=kind)
    exp.model.pad_vocab_to_multiple_of = 32
    config = model_config(exp.model, exp.data, tokenizer=word_tokenizer())
    assert config.vocab_size == 96
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    # One token for both would have an embedding that is never trained.
    shared = word_tokenizer()
    shared.pad_token = shared.eos_token
    assert model_config(exp.model, exp.data, tokenizer=shared).pad_token_id is None
    limit = config.max_position_embeddings
    exp.data.seq_len = limit + 1
    with pytest.raises(ConfigError, match=f"data.seq_len={limit + 1} is over the {limit} pos"):
        model_config(exp.model, exp.data, tokenizer=word_tokenizer())


def test_a_tokenizer_larger_than_the_pretrained_model_is_refused(tmp_path: Path) -> None:
    small_model("llama", vocab_size=VOCABULARY - 1).save_pretrained(tmp_path / "model")
    exp = parity_experiment(tmp_path)
    exp.model.init, exp.model.path, exp.model.config = "pretrained", str(tmp_path / "model"), {}
    with pytest.raises(ConfigError, match="ids up to 89, the model an embedding of 89 rows"):
        model_config(exp.model, exp.data, tokenizer=word_tokenizer())


def test_module_seeds_differ_and_never_change() -> None:
    names = [name for name, _ in small_model("llama").named_modules()]
    seeds = {module_seed(seed, name) for name in names for seed in (0, 1)}
    assert len(seeds) == 2 * len(names)
    # A published run is reproduced only while this number stays.
    assert module_seed(0, "model.embed_tokens") == 8852271039736058932


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", sorted({*KINDS, *CONVERTED}))
def test_threads_draw_what_is_drawn_in_turn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = small_model if kind in KINDS else converted_model
    dtype = torch.bfloat16 if kind == "qwen3" else torch.float32
    model = make(kind, num_hidden_layers=5).to(dtype)
    with torch.no_grad():
        drawing._initialise(model, name="", owner=model, seed=7)
    in_turn = values(model)
    for threads, parts in ((1, [1] * 5), (3, [3, 2])):
        monkeypatch.setattr(drawing, "_num_threads", lambda threads=threads: threads)
        for parameter in model.parameters():
            parameter.data.fill_(3.0)
        assert [len(batch) for batch in drawing._batches(drawing._layers(model))] == parts
        initialise(model, seed=7)
        drawn = values(model)
        different = [name for name in drawn if not torch.equal(drawn[name], in_turn[name])]
        assert not different, different
    initialise(model, seed=8)
    assert any(not torch.equal(value, in_turn[name]) for name, value in values(model).items())


def test_a_weight_of_two_layers_is_drawn_in_turn() -> None:
    model = small_model("llama", num_hidden_layers=3)
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    assert drawing._layers(model) == []


def test_what_is_whole_at_a_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama", num_hidden_layers=5)
    room = 2 * drawing._num_bytes(model.model.layers[0]) + 1
    monkeypatch.setattr(drawing, "_num_threads", lambda: 8)
    monkeypatch.setattr(drawing, "TOGETHER_BYTES", room)
    assert [len(b) for b in drawing._batches(drawing._layers(model))] == [2, 2, 1]
