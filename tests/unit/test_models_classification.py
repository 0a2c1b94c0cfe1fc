"""Classification heads: equal to transformers' own, of every kind of backbone, and from every
kind of checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from llmx.config import Experiment, ModelConfig
from llmx.data import collate
from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod
from llmx.models.factory import model_config, true_vocab
from llmx.models.load import load_weights
from llmx.models.model import BACKBONE, CLASSIFICATION, Model, ModelSpec
from llmx.models.pooling import (
    POOLING_FILE,
    POOLINGS,
    give_pooled_forward,
    has_other_labels,
    has_score,
    pooled,
    pooled_tokens,
    pooler_names,
    pooling_config,
    pools_itself,
    published_pooling,
)
from llmx.tasks import tokenizer_of
from tests.architectures import small_config
from tests.rundirs import TINY_LLAMA, experiment
from tests.small_models import network_of
from tests.unit.test_models_model import SEQUENCES, batch_of
from tests.unit.test_models_model import model_of as plain_model_of

BERT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "vocab_size": 1100, "pad_token_id": 0,
}  # fmt: skip


def encoder(kind: str, **values: Any) -> torch.nn.Module:
    config = AutoConfig.for_model(kind, **{**BERT, "num_labels": 3, **values})
    torch.manual_seed(3)
    network = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return network


def model_of(network: Any, isolation: str, layout: str) -> Model:
    method, labels = AttentionMethod("sdpa", isolation, layout), network.config.num_labels
    return plain_model_of(network, layout, method=method, head=CLASSIFICATION, num_labels=labels)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "distilbert"])
def test_an_encoder_pools_each_sequence_as_its_authors_do(kind: str) -> None:
    values = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    network = encoder(kind, **(values if kind == "distilbert" else {"embedding_size": 32}))
    assert not has_score(network)
    assert pools_itself(network.config) == type(network).__name__
    model = model_of(network, "padding_mask", "padded")
    with torch.no_grad():
        wanted = torch.cat([network(input_ids=torch.tensor([one])).logits for one in SEQUENCES])
    # RoBERTa tells padding by its id: the collator's is that of the model.
    found = model.logits(batch_of("padded"))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    empty = model.logits(collate([], seq_len=8, pad_id=0, layout="padded"))
    assert empty.shape == (0, 3)
    empty.sum().backward()


def test_a_score_looks_where_transformers_looks() -> None:
    """Also where a sequence ends in the token that pads: the exported model says the same."""
    segments = torch.tensor([[1, 1, 2, 0], [0, 0, 0, 0], [1, 2, 2, 3]])
    rows, columns = pooled_tokens(segments)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == [
        (0, 1), (0, 2), (2, 0), (2, 2), (2, 3),
    ]  # fmt: skip
    config = small_config("llama")
    config.num_labels, config.pad_token_id = 2, 9
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(config).eval()
    assert pools_itself(config) is None
    longest = max(map(len, SEQUENCES))
    together = torch.tensor([one + [9] * (longest - len(one)) for one in SEQUENCES])
    with torch.no_grad():
        wanted = network(input_ids=together).logits
    give_pooled_forward(network)
    for layout in ("packed", "padded"):
        isolation = "mask" if layout == "packed" else "position_ids"
        found = model_of(network, isolation, layout).logits(batch_of(layout))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    batch = batch_of("padded")
    rows, columns = pooled_tokens(batch["segment_ids"], batch["input_ids"], 9)
    assert columns[0] == 3, "the sequence 5 6 7 8 9"
    assert pooled_tokens(segments, torch.full_like(segments, 9), 9)[1].tolist() == [0, 2, 0, 1, 3]


def experiment_of(tmp_path: Path, source: Path) -> Experiment:
    exp = experiment(tmp_path / "run")
    exp.model.kind, exp.model.path, exp.model.init = "hf", str(source), "pretrained"
    exp.model.config = {}
    return exp


def built(exp: Experiment, spec: ModelSpec) -> Any:
    config = model_config(exp.model, exp.data, tokenizer=tokenizer_of(exp), spec=spec)
    return network_of(exp, config, head=spec.head)


SPEC = ModelSpec(
    head=CLASSIFICATION, num_labels=3, labels=("a", "b", "c"), problem="single_label_classification"
)


@pytest.mark.parametrize(
    ("kind", "auto", "new"),
    [
        ("llama", AutoModelForCausalLM, ["score.weight"]),
        ("gpt2", AutoModelForCausalLM, ["score.weight"]),
        ("bert", AutoModelForMaskedLM, ["bert.pooler.dense.bias", "bert.pooler.dense.weight",
                                        "classifier.bias", "classifier.weight"]),
    ],
)  # fmt: skip
def test_the_head_is_new_where_the_weights_are_of_a_language_model(
    kind: str, auto: Any, new: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoConfig.for_model("bert", **BERT) if kind == "bert" else small_config(kind)
    config.vocab_size, config.pad_token_id = 1100, 0
    torch.manual_seed(5)
    published = auto.from_config(config)
    published.save_pretrained(tmp_path / "lm")
    exp = experiment_of(tmp_path, tmp_path / "lm")
    exp.data.seq_len = 64
    network = built(exp, SPEC)
    out = capsys.readouterr().out
    assert f"Newly initialised (seed=0): {', '.join(new)}." in out
    theirs = dict(published.named_parameters())
    for name, parameter in network.named_parameters():
        if name not in new:
            assert torch.equal(parameter, theirs[name]), name
    # Drawn by the run's seed alone, so the same wherever it is drawn.
    again = built(exp, SPEC)
    exp.seed += 1
    ours, same, different = (
        one.state_dict()[new[-1]] for one in (network, again, built(exp, SPEC))
    )
    assert torch.equal(ours, same)
    assert not torch.equal(ours, different)
    assert float(ours.std()) > 0
    assert network.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert network.config.problem_type == "single_label_classification"
    assert network.config.architectures == [type(network).__name__]


def test_a_published_head_is_kept_for_its_own_labels_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = encoder("bert", id2label={0: "a", 1: "b", 2: "c"})
    published.save_pretrained(tmp_path / "classifier")
    exp = experiment_of(tmp_path, tmp_path / "classifier")
    network = built(exp, SPEC)
    assert capsys.readouterr().out == ""
    for name, parameter in published.named_parameters():
        assert torch.equal(parameter, network.state_dict()[name]), name
    for labels in (("a", "c", "b"), ("a", "b")):
        spec = ModelSpec(head=CLASSIFICATION, num_labels=len(labels), labels=labels)
        network = built(exp, spec)
        assert ": classifier.bias, classifier.weight." in capsys.readouterr().out
        kept = network.state_dict()["bert.pooler.dense.weight"]
        assert torch.equal(kept, published.state_dict()["bert.pooler.dense.weight"])
    plain = AutoConfig.for_model("bert", num_labels=3)
    assert not has_other_labels(plain, network.config.__class__(num_labels=3))


def test_a_head_from_scratch_and_none_for_a_language_model(tmp_path: Path) -> None:
    scratch = experiment(tmp_path / "run")
    network = built(scratch, SPEC)
    assert network.score.weight.shape == (3, 64)
    assert float(network.score.weight.detach().std()) > 0
    assert network.config.vocab_size >= true_vocab(tokenizer_of(scratch))
    encoder("bert").save_pretrained(tmp_path / "judge")
    with pytest.raises(ConfigError, match="holds a BertForSequenceClassification: .* is needed"):
        built(experiment_of(tmp_path, tmp_path / "judge"), ModelSpec())


# --- One vector a text, as sentence-transformers pools it -----------------------------------------


def config_of(kind: str, **more: Any) -> Any:
    values = BERT if kind == "bert" else {**TINY_LLAMA, "vocab_size": 1100}
    return AutoConfig.for_model(kind, **{**values, **more})


def backbone(kind: str) -> Any:
    torch.manual_seed(3)
    return AutoModel.from_config(config_of(kind)).eval()


def vector_model_of(network: Any, method: AttentionMethod) -> Model:
    return plain_model_of(network, method.layout, method=method, head=BACKBONE)


def theirs(hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    """Of one sequence alone, by sentence-transformers."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    mode = {"last": "lasttoken"}.get(pooling, pooling)
    features = {"token_embeddings": hidden, "attention_mask": torch.ones(hidden.shape[:2])}
    found: torch.Tensor = Pooling(hidden.shape[-1], mode)(features)["sentence_embedding"][0]
    return found


METHODS = {
    "llama packed": ("llama", AttentionMethod("sdpa", "mask", "packed")),
    "llama in one line": ("llama", AttentionMethod("sdpa", "cu_seq_lens", "packed")),
    "llama padded": ("llama", AttentionMethod("sdpa", "none", "padded")),
    "bert packed": ("bert", AttentionMethod("sdpa", "mask", "packed", causal=False)),
    "bert padded": ("bert", AttentionMethod("sdpa", "padding_mask", "padded", causal=False)),
}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("how", sorted(METHODS))
def test_a_sequence_has_the_vector_that_it_has_alone(how: str, pooling: str) -> None:
    kind, method = METHODS[how]
    network = backbone(kind)
    with torch.no_grad():
        alone = [network(input_ids=torch.tensor([one])).last_hidden_state for one in SEQUENCES]
    wanted = torch.stack([theirs(hidden, pooling) for hidden in alone])
    model = vector_model_of(network, method)
    if how == "llama in one line":  # its kernels are given elsewhere: hidden states alone here
        batch = batch_of("packed")
        lines = vector_model_of(network, METHODS["llama packed"][1])
        inputs, _ = lines.inputs(batch)
        hidden = network(**inputs).last_hidden_state
        found = pooled(hidden.reshape(1, -1, hidden.shape[-1]), batch["segment_ids"], pooling)
    else:
        found = model.embeddings(batch_of(method.layout), pooling=pooling)
        nothing = collate([], seq_len=8, pad_id=0, layout=method.layout)
        empty = model.embeddings(nothing, pooling=pooling)
        assert empty.shape == (0, network.config.hidden_size)
        empty.sum().backward()
        assert all(p.grad is None or not p.grad.any() for p in network.parameters())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-5)
    found.square().sum().backward()


def test_how_a_published_model_pools(tmp_path: Path) -> None:
    place = tmp_path / POOLING_FILE
    place.parent.mkdir()
    assert published_pooling(None) is None
    assert published_pooling(str(tmp_path)) is None
    for pooling in POOLINGS:
        place.write_text(json.dumps(pooling_config(pooling, width=8)))
        assert published_pooling(str(tmp_path)) == pooling
    for modes in ("lasttoken", ["lasttoken"]):  # as sentence-transformers 6 writes it
        place.write_text(json.dumps({"embedding_dimension": 8, "pooling_mode": modes}))
        assert published_pooling(str(tmp_path)) == "last"
    place.write_text(json.dumps({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}))
    with pytest.raises(ValueError, match="max and cls"):
        published_pooling(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "auto"), [("llama", AutoModelForCausalLM), ("bert", AutoModelForMaskedLM)]
)
def test_a_backbone_takes_the_weights_of_a_model_with_a_head(
    kind: str, auto: Any, tmp_path: Path
) -> None:
    """The head is left out; BERT's pooler, which a masked language model lacks, is drawn."""
    torch.manual_seed(1)
    published = auto.from_config(config_of(kind))
    published.save_pretrained(tmp_path)
    network = backbone(kind)
    source = ModelConfig(kind="hf", init="pretrained", path=str(tmp_path))
    names = pooler_names(network)
    assert len(names) == (2 if kind == "bert" else 0)
    assert load_weights(network, source, seed=1, head=BACKBONE) == names
    wanted = dict(published.base_model.named_parameters())
    for name, parameter in network.named_parameters():
        if name not in names:
            torch.testing.assert_close(parameter, wanted[name], rtol=0, atol=0)
    # A layer that the network lacks is no head.
    shallow = AutoModel.from_config(config_of(kind, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="weights that .* does not"):
        load_weights(shallow, source, seed=1, head=BACKBONE)
