"""Random numbers of a step, a function of (seed, step, rank); and losses of a whole step: the same
value and gradient for every split over ranks and micro batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod
from llmx.models.model import Models
from llmx.plan.types import BatchPlan
from llmx.tasks.embed import Embed, Options, Pairs, contrast
from llmx.train.batches import Layout, Step, make_step
from llmx.train.step import JointStep, seed_step, step_seed
from tests import forks
from tests.reference import text_pairs_store
from tests.unit.test_models_classification import backbone
from tests.unit.test_models_classification import vector_model_of as model_of


def draw() -> list[float]:
    return torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()


def test_seeds_of_steps_and_ranks_are_all_different_and_never_change() -> None:
    seeds = {step_seed(s, k, r) for s in range(4) for k in range(40) for r in range(40)}
    assert len(seeds) == 4 * 40 * 40
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    # Constants: a checkpoint of an older llmx goes on with the same random numbers.
    assert step_seed(0, 0, 0) == 4842970191371296480
    assert step_seed(3, 120, 7) == 7287527681292060888
    seed_step(1, 7, 0)
    first = draw()
    torch.manual_seed(5)  # whatever came before
    seed_step(1, 7, 0)
    assert draw() == first


METHODS = {
    "llama": AttentionMethod("sdpa", "mask", "packed"),
    "bert": AttentionMethod("sdpa", "padding_mask", "padded", causal=False),
}
EXAMPLES = 10


class Task(Embed):
    """Without an experiment."""

    def __init__(self) -> None:
        self.options = Options(symmetric=True, pooling="mean", matryoshka_dims=[8])


def step_of(path: Path, kind: str, micro: tuple[int, ...], accumulation: int, rank: int) -> Step:
    store = text_pairs_store(path, examples=EXAMPLES)
    layout = Layout(seq_len=48, pad_id=0, layout=METHODS[kind].layout)
    batch = BatchPlan(EXAMPLES, accumulation, micro, 48)
    return make_step(
        store, 0, batch=batch, rank=rank, seed=1, layout=layout, stop=EXAMPLES,
        normaliser="examples",
    )  # fmt: skip


def gradient_of(network: Any) -> torch.Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]
    return torch.cat([part.flatten() for part in parts])


def gradient(kind: str, step: Step, *, drops: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's loss, weight and accuracy of a step, and its gradient."""
    network = backbone(kind).train(drops)
    models = Models(policy=model_of(network, METHODS[kind]))
    seed_step(3, 0, 0)
    loss_of = JointStep(Task(), models, step.micro_batches)
    values = torch.zeros(3, dtype=torch.float64)
    for batch in step.micro_batches:
        loss = loss_of(models, batch)
        loss.sum.backward()
        values += torch.tensor([loss.sum.item(), loss.weight, float(loss.metrics["accuracy"])])
    return values, gradient_of(network)


def wanted_gradient(kind: str, step: Step) -> tuple[float, torch.Tensor]:
    """One pass through a network that holds the whole step in one micro batch."""
    network, task = backbone(kind), Task()
    (batch,) = step.micro_batches
    outputs = task.outputs(Models(policy=model_of(network, METHODS[kind])), batch)
    losses, _ = contrast(outputs, Pairs.of(batch), task.options)
    losses.sum().backward()
    return losses.sum().item(), gradient_of(network)


def on_rank(rank: int, place: Path, kind: str, micro: tuple[int, ...], accumulation: int) -> None:
    found = gradient(kind, step_of(place / f"store-{rank}", kind, micro, accumulation, rank))
    for values in found:
        torch.distributed.all_reduce(values)
    if rank == 0:
        torch.save(found, place / "found.pt")


@pytest.mark.parametrize(
    ("kind", "micro", "accumulation"),
    [
        ("bert", (3,), 4),
        ("llama", (2, 1), 4),  # an empty end
        ("bert", (1, 2, 2), 3),
        ("llama", (5, 5), 1),
    ],
)
def test_the_gradient_is_that_of_the_whole_step(kind, micro, accumulation, tmp_path) -> None:
    whole = step_of(tmp_path / "store", kind, (EXAMPLES,), 1, 0)
    loss, wanted = wanted_gradient(kind, whole)
    forks.group(on_rank, tmp_path, kind, micro, accumulation, world=len(micro))
    (total, weight, right), found = torch.load(tmp_path / "found.pt")
    assert weight == EXAMPLES
    assert float(right).is_integer()
    assert float(total) == pytest.approx(loss, rel=1e-5)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.fixture
def passes(group: None, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What each pass of one rank gave."""
    seen, outputs = [], Task.outputs

    def watched(*given: Any) -> torch.Tensor:
        found = outputs(*given)
        seen.append(found.detach())
        return found

    monkeypatch.setattr(Task, "outputs", watched)
    return seen


def test_both_passes_drop_the_same(passes: list[torch.Tensor], tmp_path: Path) -> None:
    gradient("bert", step_of(tmp_path / "store", "bert", (4,), 3, 0), drops=True)
    assert len(passes) == 6
    assert all(map(torch.equal, passes[:3], passes[3:]))
    passes.clear()  # one micro batch takes one pass
    gradient("llama", step_of(tmp_path / "whole", "llama", (EXAMPLES,), 1, 0))
    assert len(passes) == 1


def test_a_joint_loss_is_a_mean_over_examples() -> None:
    class Tokens(Task):
        normaliser = "tokens"
        name = "mine"

    with pytest.raises(ConfigError, match='normaliser = "examples"'):
        JointStep(Tokens(), Models(), ())
