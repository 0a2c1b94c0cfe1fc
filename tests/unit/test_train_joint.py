"""Losses of a whole step: the same value and gradient for every split over ranks and micro batches,
with dropout drawn alike in both passes."""

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
from llmx.train.step import JointStep, loss_of_step, seed_step
from tests import forks
from tests.reference import text_pairs_store
from tests.unit.test_models_pooling import backbone, model_of

METHODS = {
    "llama": AttentionMethod("sdpa", "mask", "packed"),
    "bert": AttentionMethod("sdpa", "padding_mask", "padded", causal=False),
}
EXAMPLES = 10


class Task(Embed):
    """Without an experiment."""

    def __init__(self) -> None:
        self.options = Options(symmetric=True, pooling="mean", matryoshka_dims=[8])
        self._pooling = None


def store_of(path: Path) -> Any:
    return text_pairs_store(path, examples=EXAMPLES)


def step_of(store: Any, kind: str, micro: tuple[int, ...], accumulation: int, rank: int) -> Step:
    layout = Layout(seq_len=48, pad_id=0, layout=METHODS[kind].layout)
    batch = BatchPlan(EXAMPLES, accumulation, micro, 48)
    return make_step(
        store, 0, batch=batch, rank=rank, seed=1, layout=layout, stop=EXAMPLES,
        normaliser="examples",
    )  # fmt: skip


def gradient(kind: str, step: Step, *, drops: bool = False) -> tuple[float, torch.Tensor, Any]:
    """This rank's loss and gradient of a step."""
    network = backbone(kind).train(drops)
    task = Task()
    models = Models(policy=model_of(network, METHODS[kind]))
    seed_step(3, 0, 0)
    loss_of, total, weight = loss_of_step(task, models, step), 0.0, 0.0
    metrics = torch.zeros(())
    for batch in step.micro_batches:
        loss = loss_of(models, batch)
        loss.sum.backward()
        total += float(loss.sum.detach())
        weight += loss.weight
        metrics = metrics + loss.metrics["accuracy"]
    found = torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
            for p in network.parameters()
        ]
    )
    return total, found, (weight, float(metrics))


def wanted_gradient(kind: str, step: Step) -> tuple[float, torch.Tensor]:
    """One pass through a network that holds the whole step in one micro batch."""
    network = backbone(kind)
    task = Task()
    (batch,) = step.micro_batches
    outputs = task.outputs(Models(policy=model_of(network, METHODS[kind])), batch)
    losses, _ = contrast(outputs, Pairs.of(batch), task.options)
    losses.sum().backward()
    found = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in network.parameters()
    ]
    return float(losses.sum().detach()), torch.cat(found)


def on_rank(
    rank: int, world: int, place: Path, kind: str, micro: tuple[int, ...], accumulation: int
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place / 'meet'}", rank=rank, world_size=world
    )
    step = step_of(
        store_of(place / f"store-{rank}"),
        kind,
        micro,
        accumulation,
        rank,
    )
    total, found, measured = gradient(kind, step)
    values = torch.tensor([total, *measured], dtype=torch.float64)
    torch.distributed.all_reduce(values)
    torch.distributed.all_reduce(found)
    if rank == 0:
        torch.save((values, found), place / "found.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", sorted(METHODS))
@pytest.mark.parametrize(
    ("micro", "accumulation"),
    [((10,), 1), ((3,), 4), ((5, 5), 1), ((2, 1), 4), ((1, 2, 2), 3)],
    ids=["whole", "accumulated", "two ranks", "both, uneven, an empty end", "three ranks"],
)
def test_the_gradient_is_that_of_the_whole_step(
    kind: str, micro: tuple[int, ...], accumulation: int, tmp_path: Path
) -> None:
    whole = step_of(store_of(tmp_path / "store"), kind, (EXAMPLES,), 1, 0)
    loss, wanted = wanted_gradient(kind, whole)
    world = len(micro)
    ranks = [
        forks.process(on_rank, rank, world, tmp_path, kind, micro, accumulation)
        for rank in range(world)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(timeout=120)
        assert each.exitcode == 0
    (total, weight, right), found = torch.load(tmp_path / "found.pt")
    assert weight == EXAMPLES
    assert float(right).is_integer()
    assert float(total) == pytest.approx(loss, rel=1e-5)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a process group."""
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr("llmx.train.step.all_gather", lambda value, group: [value])
    monkeypatch.setattr(distributed, "all_gather", lambda found, own: found[0].copy_(own))


@pytest.mark.usefixtures("alone")
def test_both_passes_drop_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(store_of(tmp_path / "store"), "bert", (4,), 3, 0)
    seen: list[torch.Tensor] = []
    outputs = Task.outputs

    def watched(self: Task, *args: Any) -> torch.Tensor:
        found = outputs(self, *args)
        seen.append(found.detach())
        return found

    monkeypatch.setattr(Task, "outputs", watched)
    gradient("bert", step, drops=True)
    assert len(seen) == 6
    for first, second in zip(seen[:3], seen[3:], strict=True):
        assert torch.equal(first, second)
    seen.clear()
    gradient("bert", step, drops=False)
    assert len(seen) == 6


@pytest.mark.usefixtures("alone")
def test_one_micro_batch_takes_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(store_of(tmp_path / "store"), "llama", (EXAMPLES,), 1, 0)
    calls: list[int] = []
    outputs = Task.outputs
    monkeypatch.setattr(Task, "outputs", lambda *args: calls.append(1) or outputs(*args))
    gradient("llama", step)
    assert calls == [1]


def test_a_joint_loss_is_a_mean_over_examples() -> None:
    class Tokens(Task):
        normaliser = "tokens"
        name = "mine"

    with pytest.raises(ConfigError, match='normaliser = "examples"'):
        JointStep(Tokens(), Models(), ())
