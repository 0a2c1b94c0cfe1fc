"""One loss: gradients and losses are those of the plain mean over the step's target tokens,
for every split of the same global batch over ranks, micro batches, accumulation, ZeRO stage
and layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked_ranks import launch
from tests.reference import GLOBAL_BATCH, STEPS, naive_training, synthetic_store, word_tokenizer
from tests.rundirs import parity_experiment

pytestmark = pytest.mark.deepspeed

SPLITS: dict[int, list[tuple[list[int], int]]] = {
    1: [([12], 1), ([4], 3), ([1], 12)],
    2: [([6, 6], 1), ([2, 2], 3), ([3, 1], 3), ([5, 1], 2)],
    3: [([4, 4, 4], 1), ([3, 2, 1], 2), ([1, 1, 2], 3)],
}
"""Micro batch of each rank, and accumulation; even ones and uneven ones."""
SHORT = (STEPS - 1) * GLOBAL_BATCH + 5
"""Samples of all steps, where the last one has 5."""


def jobs(world: int) -> list[dict[str, Any]]:
    """Stages with splits as pairs, packed; the last split at every stage, packed or padded, with a
    last step of fewer samples, so that some micro batches are empty on some ranks; other models."""
    splits = SPLITS[world]
    found: list[dict[str, Any]] = []
    for stage in range(4):
        for number, (micro, steps) in enumerate(splits):
            split = {"stage": stage, "micro_batches": micro, "accumulation": steps, "kind": "llama"}
            if number % 2 == stage % 2:
                found.append({**split, "layout": "packed"})
        last = {"stop": SHORT} if world > 1 else {}
        found.append({**split, "layout": ("packed", "padded")[stage % 2], **last})
    if world == 2:
        found += [
            {"stage": stage, "micro_batches": [3, 1], "accumulation": 3, "layout": "packed",
             "kind": kind}
            for stage, kind in ((1, "gpt2"), (3, "opt"), (1, "qwen3"), (3, "mixtral"))
        ]  # fmt: skip
    return [{"name": f"job{number:02d}", **job} for number, job in enumerate(found)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(losses, gradients) of the plain loop, by kind of model."""
    directory = tmp_path_factory.mktemp("reference")
    store, tokenizer = synthetic_store(directory / "store"), word_tokenizer()
    made: dict[tuple[str, int | None], Any] = {}

    def of(kind: str, stop: int | None = None) -> Any:
        if (kind, stop) not in made:
            made[kind, stop] = naive_training(
                parity_experiment(directory, kind=kind),
                store,
                tokenizer,
                steps=STEPS,
                global_batch=GLOBAL_BATCH,
                stop=stop,
            )
        return made[kind, stop]

    return of


@pytest.mark.parametrize(
    "world",
    [pytest.param(world, marks=[] if world == 2 else pytest.mark.nightly) for world in SPLITS],
)
def test_every_split_is_the_same_training(world: int, tmp_path: Path, reference: Any) -> None:
    wanted = jobs(world)
    (tmp_path / "jobs.json").write_text(json.dumps(wanted))
    done = launch("tests.programs.parity", str(tmp_path / "jobs.json"), str(tmp_path), ranks=world)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    wrong = []
    for job in wanted:
        losses, gradients = reference(job["kind"], job.get("stop"))
        found = torch.load(tmp_path / f"{job['name']}.pt")
        loss_error = max(abs(a / b - 1) for a, b in zip(found["losses"], losses, strict=True))
        assert found["gradient"].keys() == gradients[0].keys()
        difference = norm({n: found["gradient"][n] - gradients[0][n] for n in gradients[0]})
        gradient_error = difference / norm(gradients[0])
        norm_errors = [
            abs(found["norms"][step] / norm(gradients[step]) - 1) for step in range(STEPS)
        ]
        if loss_error > 1e-5 or gradient_error > 2e-5 or max(norm_errors) > 1e-4:
            wrong.append((job, loss_error, gradient_error, max(norm_errors)))
    assert not wrong, "\n".join(map(str, wrong))


def norm(tensors: dict[str, torch.Tensor]) -> float:
    """The 2-norm over all tensors together."""
    return float(sum(t.double().pow(2).sum() for t in tensors.values()) ** 0.5)


def test_ranks_whose_tokens_need_other_experts_do_not_wait_for_each_other(tmp_path: Path) -> None:
    done = launch("tests.programs.experts", str(tmp_path), ranks=2)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    first, second = (rank["3"]["experts"] for rank in ranks)
    assert first != second, "the ranks needed the same experts: nothing was tried"
    for rank in ranks:
        sharded, whole = rank["3"], rank["0"]
        assert sharded["experts"] == whole["experts"]
        for what in ("losses", "norms"):
            assert sharded[what] == pytest.approx(whole[what], rel=1e-5)
