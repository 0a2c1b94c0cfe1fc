"""NEFTune's noise: as large as published, and the same for every split and layout."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from llmx.data import collate
from llmx.models.model import embedding_noise, noisy_embeddings
from llmx.plan.types import BatchPlan
from llmx.tasks import next_token_loss
from llmx.train.batches import Layout, make_step
from tests.reference import SEQ_LEN, synthetic_store
from tests.unit.test_models_model import SEQUENCES, batch_of, causal_lm, model_of

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
        alone = embedding_noise(
            torch.zeros(1, len(sequence), 64),
            torch.ones(1, len(sequence), dtype=torch.int32),
            seed[None],
            alpha=5.0,
        )
        torch.testing.assert_close(alone[0], one, rtol=0, atol=0)


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
    with noisy_embeddings(network, batch["segment_ids"], SEEDS, alpha=5.0):
        one = network.get_input_embeddings()(batch["input_ids"])
    assert not torch.equal(one, network.get_input_embeddings()(batch["input_ids"]))


def test_the_seeds_of_a_step_do_not_depend_on_its_split(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path / "store")
    found = []
    for micro, accumulation in (((12,), 1), ((6, 6), 1), ((3, 1), 3), ((1, 1, 2), 3)):
        for kind in ("packed", "padded"):
            layout = Layout(seq_len=SEQ_LEN, pad_id=0, layout=kind)
            batch = BatchPlan(12, accumulation, micro, SEQ_LEN)
            steps = [
                make_step(store, 3, batch=batch, rank=rank, seed=5, layout=layout, draws=True)
                for rank in range(len(micro))
            ]
            seeds = [
                step.micro_batches[a]["draw_seeds"].tolist()
                for a in range(accumulation)
                for step in steps
            ]
            found.append([seed for one in seeds for seed in one])
    assert all(one == found[0] for one in found)
    assert len(set(found[0])) == len(found[0]) >= 12
    later = make_step(store, 4, batch=batch, rank=0, seed=5, layout=layout, draws=True)
    assert not set(later.micro_batches[0]["draw_seeds"].tolist()) & set(found[0])
    plain = make_step(store, 4, batch=batch, rank=0, seed=5, layout=layout)
    assert "draw_seeds" not in plain.micro_batches[0]


def test_an_empty_micro_batch_has_no_noise() -> None:
    batch = collate([], seq_len=8, pad_id=0, layout="packed")
    like = torch.zeros(*batch["segment_ids"].shape, 4)
    none = torch.from_numpy(np.zeros(0, np.int64))
    assert not embedding_noise(like, batch["segment_ids"], none, alpha=5.0).any()
