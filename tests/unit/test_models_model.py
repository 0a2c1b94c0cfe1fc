"""What a task asks of a model: equal to the plain forward, however sequences lie in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from llmx.data import collate
from llmx.data.store.samples import Sample
from llmx.models.attention import AttentionMethod
from llmx.models.experts import Routing
from llmx.models.loss import IGNORE
from llmx.models.model import (
    CLASSIFICATION,
    Model,
    Models,
    ModelSpec,
    NetworksByName,
    sequence_numbers,
)
from llmx.models.pooling import give_pooled_forward
from llmx.tasks import next_token_loss
from tests.architectures import small_config

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


def model_of(network: torch.nn.Module, layout: str, **spec: object) -> Model:
    return Model(
        name="policy",
        spec=ModelSpec(**spec),
        module=network,
        forward=network,
        config=network.config,
        vocab_size=network.config.vocab_size,
        attention=AttentionMethod("sdpa", "mask" if layout == "packed" else "position_ids", layout),
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


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_log_probabilities_of_sequences(layout: str) -> None:
    """Values, sums and the gradient are those of each sequence alone."""
    network = causal_lm()
    found = model_of(network, layout).log_probabilities(batch_of(layout))
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


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_classification_head_sees_each_sequence_alone(layout: str) -> None:
    config = small_config("llama")
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        wanted = torch.cat([network(input_ids=torch.tensor([one])).logits for one in SEQUENCES])
    give_pooled_forward(network)
    model = model_of(network, layout, head=CLASSIFICATION, num_labels=3)
    logits = model.logits(batch_of(layout))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, wanted)


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


def test_a_frozen_model_computes_without_a_graph() -> None:
    model = model_of(causal_lm(), "packed", trained=False)
    assert not model.log_probabilities(batch_of("packed")).values.requires_grad


def test_sequences_are_numbered_line_by_line() -> None:
    segments = torch.tensor([[1, 1, 2, 0], [0, 0, 0, 0], [1, 2, 2, 3]])
    numbers, count = sequence_numbers(segments)
    assert count == 5
    assert numbers.tolist() == [[0, 0, 1, -1], [-1, -1, -1, -1], [2, 3, 3, 4]]


def test_models_by_name() -> None:
    frozen = model_of(causal_lm(), "packed", trained=False)
    trained = model_of(causal_lm(), "packed")
    models = Models(reference=frozen, policy=trained)
    assert models.main is trained
    assert models.reference is frozen
    with pytest.raises(AttributeError, match="no model 'value'; Task.models\\(\\) names reference"):
        _ = models.value
    whole = NetworksByName({"a": torch.nn.Dropout(), "b": torch.nn.Dropout()}, frozen=["b"])
    assert (whole.a.training, whole.b.training) == (True, False), "from the first step on"
    whole.eval().train()
    assert (whole.a.training, whole.b.training) == (True, False)


def test_a_spec_says_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="num_labels=0"):
        ModelSpec(head=CLASSIFICATION)
    with pytest.raises(ValueError, match="is none of causal_lm"):
        ModelSpec(head="value")
