"""What a task asks of a model: equal to the plain forward, however sequences lie in a batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from llmx.data import collate
from llmx.data.store.samples import Sample
from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod
from llmx.models.experts import Routing
from llmx.models.factory import model_config, padded_vocab, true_vocab
from llmx.models.initialise import initialise, module_seed
from llmx.models.loss import IGNORE
from llmx.models.model import (
    CLASSIFICATION,
    Model,
    Models,
    ModelSpec,
    NetworksByName,
    embedding_noise,
)
from llmx.models.pooling import give_pooled_forward
from llmx.plan import ds_config, make_plan
from llmx.tasks import next_token_loss
from llmx.train.engine.build import build_networks, check_spec, check_tokenizer, with_source
from tests.architectures import small_config
from tests.reference import (
    VOCABULARY,
    word_tokenizer,
    write_pretrained,
)
from tests.rundirs import experiment, parity_experiment
from tests.small_models import CONVERTED, KINDS, converted_model, small_model

SEQUENCES = [[5, 6, 7, 8, 9], [3, 4], [9, 8, 7, 6], [2, 3, 4, 5, 6, 7]]
"""Of two samples: two sequences each."""


def batch_of(layout: str) -> dict[str, torch.Tensor]:
    samples = []
    for pair in (SEQUENCES[:2], SEQUENCES[2:]):
        tokens = np.array([token for one in pair for token in one], np.uint32)
        targets = np.ones(len(tokens), np.bool_)
        starts = np.array([0, len(pair[0])])
        targets[starts] = False
        samples.append(Sample(tokens, targets, starts))
    return collate(samples, seq_len=32, pad_id=0, layout=layout)


def model_of(
    network: torch.nn.Module, layout: str, *, method: AttentionMethod | None = None, **spec: object
) -> Model:
    isolation = "mask" if layout == "packed" else "position_ids"
    return Model(
        name="policy",
        spec=ModelSpec(**spec),
        module=network,
        forward=network,
        config=network.config,
        vocab_size=network.config.vocab_size,
        attention=method or AttentionMethod("sdpa", isolation, layout),
        dtype=torch.float32,
        device=torch.device("cpu"),
        routing=Routing(network),
    )


def causal_lm() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config("llama")).eval()


def plain_log_probabilities(network: torch.nn.Module, sequence: list[int]) -> torch.Tensor:
    """[n - 1], by the whole logits of the sequence alone."""
    ids = torch.tensor([sequence])
    logits = network(input_ids=ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)


@pytest.mark.parametrize(
    ("layout", "attention"), [("packed", "sdpa"), ("packed", "eager"), ("padded", "sdpa")]
)
def test_log_probabilities_of_sequences(layout: str, attention: str) -> None:
    """Values, sums and the gradient are those of each sequence alone."""
    network = causal_lm()
    network.set_attn_implementation(attention)
    isolation = "mask" if layout == "packed" else "position_ids"
    model = model_of(network, layout, method=AttentionMethod(attention, isolation, layout))
    found = model.log_probabilities(batch_of(layout))
    wanted = [plain_log_probabilities(network, one) for one in SEQUENCES]
    assert found.num_sequences == 4
    torch.testing.assert_close(found.values, torch.cat(wanted))
    torch.testing.assert_close(found.sums(), torch.stack([one.sum() for one in wanted]))
    assert found.counts().tolist() == [4, 1, 3, 5]
    weight = network.get_output_embeddings().weight
    factors = torch.tensor([1.0, -2.0, 0.5, 3.0])
    (mine,) = torch.autograd.grad((found.sums() * factors).sum(), weight)
    alone = sum(factor * one.sum() for factor, one in zip(factors.tolist(), wanted, strict=True))
    (theirs,) = torch.autograd.grad(alone, weight)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_weights_of_tokens_count_in_the_loss_and_in_its_weight() -> None:
    network = causal_lm()
    model, batch = model_of(network, "packed"), batch_of("packed")
    plain = next_token_loss(model, batch)
    torch.manual_seed(1)
    batch["weights"] = torch.rand(batch["labels"].shape)
    weighted = next_token_loss(model, batch)
    values = model.log_probabilities(batch).values
    weights = batch["weights"][batch["labels"] != IGNORE]
    torch.testing.assert_close(weighted.sum, -(values * weights).sum())
    assert weighted.weight == pytest.approx(float(weights.sum()))
    batch["weights"] = torch.ones_like(batch["weights"])
    alike = next_token_loss(model, batch)
    torch.testing.assert_close(alike.sum, plain.sum)
    assert alike.weight == plain.weight == 13


def test_a_batch_without_sequences_has_no_logits_and_a_graph() -> None:
    config = small_config("llama")
    config.num_labels = 2
    network = AutoModelForSequenceClassification.from_config(config)
    give_pooled_forward(network)
    model = model_of(network, "packed", head=CLASSIFICATION, num_labels=2)
    empty = collate([], seq_len=8, pad_id=0, layout="packed")
    logits = model.logits(empty)
    assert logits.shape == (0, 2)
    logits.sum().backward()
    assert float(network.score.weight.grad.abs().sum()) == 0.0
    values = model_of(causal_lm(), "packed").log_probabilities(empty)
    assert values.num_sequences == 0
    values.sums().sum().backward()


def test_models_by_name() -> None:
    frozen = model_of(causal_lm(), "packed", trained=False)
    trained = model_of(causal_lm(), "packed")
    assert not frozen.log_probabilities(batch_of("packed")).values.requires_grad
    models = Models(reference=frozen, policy=trained)
    assert models.main is trained
    assert models.reference is frozen
    with pytest.raises(AttributeError, match="no model 'value'; Task.models\\(\\) names reference"):
        _ = models.value
    whole = NetworksByName({"a": torch.nn.Dropout(), "b": torch.nn.Dropout()}, frozen=["b"])
    assert (whole.a.training, whole.b.training) == (True, False), "from the first step on"
    whole.eval().train()
    assert (whole.a.training, whole.b.training) == (True, False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head": CLASSIFICATION}, "num_labels=0"),
        ({"head": "value"}, "head='value' is none of causal_lm"),
        ({"precision": "bf16"}, "precision='bf16' of a trained network"),
        ({"revision": "main"}, "revision='main' is of a source, and there is none"),
    ],
)
def test_a_spec_says_what_does_not_go_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec(**values)


# --- NEFTune's noise: as large as published, and the same for every split and layout -------------

SEEDS = torch.tensor([11, 12, 13, 14])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_each_sequence_has_its_own_noise_wherever_it_lies(layout: str) -> None:
    batch = batch_of(layout)
    lines = batch["segment_ids"]
    like = torch.zeros(*lines.shape, 64)
    noise = embedding_noise(like, lines, SEEDS, alpha=5.0)
    assert not noise[lines == 0].any()
    found = noise[lines > 0].split([len(one) for one in SEQUENCES])
    for one, seed, sequence in zip(found, SEEDS, SEQUENCES, strict=True):
        # Algorithm 1: uniform in [-1, 1] times alpha / sqrt(L d).
        size = 5.0 / math.sqrt(len(sequence) * 64)
        assert one.abs().max() <= size
        assert one.abs().mean() == pytest.approx(size / 2, rel=0.2)
        whole = torch.ones(1, len(sequence), dtype=torch.int32)
        alone = embedding_noise(torch.zeros(*whole.shape, 64), whole, seed[None], alpha=5.0)
        torch.testing.assert_close(alone[0], one, rtol=0, atol=0)
    empty = collate([], seq_len=8, pad_id=0, layout=layout)["segment_ids"]
    like = torch.zeros(*empty.shape, 4)
    assert not embedding_noise(like, empty, SEEDS[:0], alpha=5.0).any()


def test_noise_is_added_while_it_is_asked_for() -> None:
    network = causal_lm()
    model, batch = model_of(network, "packed"), batch_of("packed")
    plain = model.cross_entropy(batch).item()
    batch["draw_seeds"] = SEEDS
    noisy = model.cross_entropy(batch, embedding_noise=5.0).item()
    assert noisy != plain
    assert model.cross_entropy(batch, embedding_noise=5.0).item() == noisy
    assert model.cross_entropy(batch).item() == plain
    padded = {**batch_of("padded"), "draw_seeds": SEEDS}
    alike = next_token_loss(model_of(network, "padded"), padded, embedding_noise=5.0)
    assert alike.sum.item() == pytest.approx(noisy, rel=1e-5)


# --- Networks of a task: a source and a precision of their own, and what is refused ---------------


def test_a_source_brings_its_own_config_and_no_trust(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "run", model={"trust_remote_code": True, "path": "owner/main"})
    assert with_source(exp, ModelSpec()) is exp
    own = with_source(exp, ModelSpec(trained=False, source="owner/other", revision="v2")).model
    assert (own.path, own.revision, own.init, own.config) == ("owner/other", "v2", "pretrained", {})
    assert (own.kind, own.trust_remote_code) == ("hf", False)
    assert with_source(exp, ModelSpec(source="owner/main")).model.trust_remote_code


def build(exp: Any, spec: ModelSpec) -> Any:
    plan = make_plan(exp)
    config = ds_config(exp.model, exp.zero, exp.optim, plan)
    known = {"tokenizer": word_tokenizer(), "device": torch.device("cpu")}
    return build_networks(exp, plan, config, specs={"judge": spec}, **known)["judge"]


@pytest.fixture
def _sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    method = AttentionMethod("sdpa", "mask", "packed")
    monkeypatch.setattr("llmx.train.engine.build.select_attention", lambda *_, **__: method)


@pytest.mark.usefixtures("_sdpa")
def test_a_frozen_network_of_another_architecture(tmp_path: Path) -> None:
    write_pretrained(tmp_path / "judge")
    exp = experiment(tmp_path / "run", ranks=1, data={"seq_len": 48})
    spec = ModelSpec(trained=False, source=str(tmp_path / "judge"), precision="bf16")
    for precision, run, message in (
        ("fp32", "bf16", "DeepSpeed casts all networks of an engine to precision"),
        ("fp8", "fp32", "precision=fp8 is not one of fp32, bf16, fp16"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_spec(replace(spec, precision=precision), precision=run)
    check_spec(spec, precision="bf16")
    assert build(exp, ModelSpec()).config.architectures == ["LlamaForCausalLM"]
    made = build(exp, spec)
    assert made.config.model_type == "gpt2"
    assert made.config.vocab_size == VOCABULARY
    assert {parameter.dtype for parameter in made.module.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in made.module.parameters())


def test_a_wrong_source_is_named(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "run", ranks=1, data={"seq_len": 48})
    with pytest.raises(ConfigError, match=r"^The model 'judge' of .*\(source=.*/nothing"):
        build(exp, ModelSpec(trained=False, source=str(tmp_path / "nothing")))
    write_pretrained(tmp_path / "short")
    exp = experiment(tmp_path / "run", ranks=1, data={"seq_len": 128})
    with pytest.raises(ConfigError, match=r"The model 'judge'.* is over the 64 positions"):
        build(exp, ModelSpec(trained=False, source=str(tmp_path / "short")))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_pretrained(tmp_path / "judge")
    own = with_source(experiment(tmp_path / "run"), ModelSpec(source=str(tmp_path / "judge")))
    check_tokenizer(own.model, word_tokenizer())
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["more"])
    check_tokenizer(own.model, tokenizer)  # whether its embedding has the row is another question
    vocabulary = {**tokenizer.get_vocab(), "w3": 4, "w4": 3}

    other: Any = SimpleNamespace(get_vocab=lambda: vocabulary)
    with pytest.raises(ConfigError, match=r"2 of 91 tokens have different ids, e\.g\. 'w4'"):
        check_tokenizer(own.model, other)
    without = with_source(experiment(tmp_path / "run"), ModelSpec(source=str(tmp_path)))
    check_tokenizer(without.model, tokenizer)


# --- A new model: its config, what is refused before it is built, and its weights from scratch ---


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_new_model_takes_the_tokenizers_vocabulary(kind: str, tmp_path: Path) -> None:
    small_model("llama", vocab_size=VOCABULARY - 1).save_pretrained(tmp_path / "model")
    exp = parity_experiment(tmp_path)
    exp.model.init, exp.model.path, exp.model.config = "pretrained", str(tmp_path / "model"), {}
    with pytest.raises(ConfigError, match="ids up to 89, the model an embedding of 89 rows"):
        model_config(exp.model, exp.data, tokenizer=word_tokenizer())
    exp = parity_experiment(tmp_path, kind=kind)
    exp.model.pad_vocab_to_multiple_of = 32
    config = model_config(exp.model, exp.data, tokenizer=word_tokenizer())
    assert config.vocab_size == padded_vocab(96, multiple_of=32) == 96
    later = word_tokenizer()
    later.backend_tokenizer.add_tokens(["later"])
    assert (true_vocab(word_tokenizer()), true_vocab(later)) == (VOCABULARY, VOCABULARY + 1)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    # One token for both would have an embedding that is never trained.
    shared = word_tokenizer()
    shared.pad_token = shared.eos_token
    assert model_config(exp.model, exp.data, tokenizer=shared).pad_token_id is None
    limit = config.max_position_embeddings
    exp.data.seq_len = limit + 1
    with pytest.raises(ConfigError, match=f"data.seq_len={limit + 1} is over the {limit} pos"):
        model_config(exp.model, exp.data, tokenizer=word_tokenizer())


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["gpt2", "opt", "qwen3", *sorted(CONVERTED)])
def test_weights_follow_from_the_seed_and_the_name_of_their_module(kind: str) -> None:
    make = small_model if kind in KINDS else converted_model
    model = make(kind, num_hidden_layers=2)
    # A published run is reproduced only while this number stays.
    assert module_seed(0, "model.embed_tokens") == 8852271039736058932
    assert len({module_seed(seed, name) for seed in (0, 1) for name in ("", "a", "a.b")}) == 6
    initialise(model, seed=7)
    first = values(model)
    deeper = make(kind, num_hidden_layers=3)
    torch.manual_seed(1)
    initialise(deeper, seed=7)
    drawn = values(deeper)
    scaled = ("c_proj.weight",) if kind == "gpt2" else ()  # by the number of layers
    different = [
        name
        for name, value in first.items()
        if not name.endswith(scaled) and not torch.equal(value, drawn[name])
    ]
    assert not different, different
    initialise(model, seed=8)
    assert any(not torch.equal(value, first[name]) for name, value in values(model).items())
