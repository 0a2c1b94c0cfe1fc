"""Who computes which samples, and that every host ends with the same columns on its own disk."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmx.config import Experiment
from llmx.data import IGNORE
from llmx.data.examples import Column
from llmx.data.store import precomputed as store_precomputed
from llmx.data.store.precomputed import Precomputed
from llmx.errors import ConfigError
from llmx.models.model import Batch, Models, ModelSpec
from llmx.plan import make_plan
from llmx.tasks import Task
from llmx.train import precompute
from llmx.train.batches import Layout
from llmx.train.precompute import (
    group_size,
    groups_of,
    model_identity,
    with_precomputed,
)
from tests import forks
from tests.rundirs import experiment as small_experiment
from tests.unit.test_data_store import pairs


@pytest.mark.parametrize("shares", [(1,), (1, 1), (2, 1), (3, 1, 2)])
@pytest.mark.parametrize("done", [0, 8])
def test_every_sample_is_computed_once_in_the_same_group(shares: tuple, done: int) -> None:
    owners = [rank for rank, share in enumerate(shares) for _ in range(share)]

    def dealt(*, even: bool) -> list[list[range]]:
        samples = range(done, 37)
        return [
            groups_of(rank, samples, size=4, owners=owners, even=even)
            for rank in range(len(shares))
        ]

    groups = list(chain.from_iterable(dealt(even=False)))
    assert sorted(index for group in groups for index in group) == list(range(done, 37))
    assert all(group.start % 4 == 0 and len(group) == 4 for group in groups if group.stop < 37)
    assert [group_size(length) for length in (64, 512, 4096, 32768)] == [64, 8, 1, 1]
    # Under ZeRO-3 a forward pass is collective: as many for every rank, some of them empty.
    rounds = -(-(37 - done) // (4 * len(owners)))
    assert [len(groups) for groups in dealt(even=True)] == [rounds * share for share in shares]


def test_what_decides_the_values_of_a_model(tmp_path: Path) -> None:
    def identity(one: Experiment) -> dict[str, Any]:
        return model_identity(one.model, one.seed, one.run_dir, cache=tmp_path / "cache")

    exp = small_experiment(tmp_path / "run")
    same = replace(exp, model=replace(exp.model, attention="eager", name="other"))
    assert identity(same) == identity(exp)
    assert identity(replace(exp, seed=exp.seed + 1)) != identity(exp), "drawn from another seed"
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    with weights.open("wb") as file:
        file.truncate(130 << 20)  # sparse: more than what provenance hashes whole
    loaded = replace(exp, model=replace(exp.model, init="pretrained", path=str(tmp_path / "model")))
    before = identity(loaded)
    assert identity(loaded) == before
    with weights.open("r+b") as file:
        file.seek(71_234_567)
        file.write(b"x")
    assert identity(loaded) != before, "one byte of the weights"
    missing = replace(loaded, model=replace(loaded.model, path="nobody/nothing"))
    other_run = replace(missing, run_dir=str(tmp_path / "other"))
    assert identity(missing) != identity(other_run), "unknown: never taken for another"


class Summed(Task):
    """Sums of tokens and lengths, in place of what a network says."""

    precomputed = (
        Column("total", per="sequence"),
        Column("size", per="example", dtype="int32"),
        Column("next", per="token", dtype="int32"),
    )
    forwards = 0

    def models(self) -> dict[str, ModelSpec]:
        return {"policy": ModelSpec(), "frozen": ModelSpec(trained=False, precomputes=True)}

    def precompute(self, models: Models, batch: Batch) -> Mapping[str, torch.Tensor]:
        self.forwards += 1
        number, tokens = batch["sequence_ids"].flatten(), batch["input_ids"].flatten().float()
        count = len(batch["example_ids"])
        totals = torch.zeros(count + 1).index_add(0, number, tokens)[1:]
        examples = int(batch["example_ids"].max()) + 1
        sizes = torch.zeros(examples).index_add(0, batch["example_ids"], torch.ones(count))
        targets = batch["labels"][batch["labels"] != IGNORE]
        return {"total": totals.double() / 7, "size": sizes, "next": targets}


PLACES = [0, 0, 1]
"""The host of each rank."""


def store_of(disk: Path) -> Any:
    return pairs(disk / "data-train-v3", count=21)


def columns_of(exp: Experiment, plan: Any, task: Task, store: Any, log: Any = print) -> Any:
    return with_precomputed(
        exp, plan, {"zero_optimization": {"stage": 0}}, tokenizer=None, task=task,
        stores={"train": store, "eval": None},
        layout=lambda name: Layout(seq_len=64, pad_id=0, layout=name), group=None, log=log,
    )  # fmt: skip


def on_rank(rank: int, root: Path) -> None:
    @contextlib.contextmanager
    def no_models(*_: Any, **__: Any) -> Iterator[Models]:
        yield Models()

    precompute.frozen_models = no_models
    precompute.GROUP_TOKENS = 128  # two samples a forward
    precompute.RECORD_S = 0.0
    store_precomputed.WINDOW_BYTES = 64  # a few samples at a time
    lines: list[str] = []
    exp = small_experiment(root / "run", ranks=3)
    plan = make_plan(exp)
    ranks = tuple(replace(r, host=PLACES[r.rank]) for r in plan.ranks)
    plan = replace(plan, ranks=ranks, batch=replace(plan.batch, micro_batches=(2, 1, 1)))
    task = Summed(exp, None)
    own = store_of(root / f"disk-{PLACES[rank]}")
    stores, sources = columns_of(exp, plan, task, own, lines.append)
    found = stores["train"]
    samples = [found[index] for index in range(len(found))]
    for sample in samples:
        wanted = np.where(sample.targets, sample.tokens, 0)
        assert (sample.columns["next"] == wanted).all()
    values = [sample.columns["total"].tolist() for sample in samples]
    sizes = found.values_of("size").tolist()
    said = (values, sizes, task.forwards, lines, str(found.path), list(sources))
    (root / f"rank-{rank}.json").write_text(json.dumps(said))


def keep_first_columns_alone(root: Path, identity: dict[str, Any]) -> None:
    """Those of the first eight samples, as rank 0 keeps them on its way."""
    one = Precomputed(store_of(root / "disk-0"), Summed.precomputed, identity)
    done = one.open()
    assert done is not None
    values = {
        column.name: done.values_of(column.name)[one.rows(column, 0, 8)].copy()
        for column in one.columns
    }
    for path in root.glob("disk-*/*.precomputed-*"):
        shutil.rmtree(path, ignore_errors=True)
    one.record(values, 0, 8)


def test_hosts_without_a_shared_disk_have_the_same_columns(tmp_path: Path) -> None:
    def run() -> list[Any]:
        (tmp_path / "meet").unlink(missing_ok=True)
        forks.group(on_rank, tmp_path, world=len(PLACES))
        return [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(3)]

    def run_again(*forwards: int) -> list[Any]:
        found = run()
        assert [one[2] for one in found] == [*forwards]
        assert [one[0] for one in found] == [values] * 3
        return found

    first = run()
    values, sizes, *_ = first[0]
    assert all(one[:2] == [values, sizes] for one in first)
    store = store_of(tmp_path / "again")
    for index, totals in enumerate(values):
        tokens = [float(one.sum()) for one, _ in store[index].sequences()]
        assert totals == pytest.approx([total / 7 for total in tokens], rel=1e-6)
    assert sizes == [2] * 22
    # 11 groups, dealt two, one, one; no rank computes what another does.
    assert [one[2] for one in first] == [6, 3, 2]
    assert any("done in" in line for line in first[0][3])
    assert first[0][5] == ["frozen (precomputed)"]
    published = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("disk-*/*pre*-*"))
    assert len([path for path in published if path.suffix != ".lock"]) == 2, published

    run_again(0, 0, 0)  # found again: nothing is computed

    # A host that comes new to the run gets them from the others.
    shutil.rmtree(tmp_path / "disk-1")
    assert "disk-1" in run_again(0, 0, 0)[2][4]

    # What an interrupted computation has kept is not computed again.
    meta = json.loads(next(tmp_path.glob("disk-0/*pre*/meta.json")).read_text("utf-8"))
    keep_first_columns_alone(tmp_path, meta["identity"])
    assert "16 already done" in run_again(4, 2, 1)[0][3][0]
    assert not list(tmp_path.glob("disk-*/*.partial"))


def test_columns_without_a_model_are_refused(tmp_path: Path) -> None:
    class Nothing(Summed):
        def models(self) -> dict[str, ModelSpec]:
            return {"policy": ModelSpec()}

    exp = small_experiment(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"precomputed columns, but no model that computes them"):
        columns_of(exp, make_plan(exp), Nothing(exp, None), None)
    with pytest.raises(ValueError, match="set trained=False too"):
        ModelSpec(precomputes=True)
