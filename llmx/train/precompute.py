"""Precomputed columns: ``Task.precompute`` over the whole data, once, before training.

Samples are computed in groups of fixed size, which the ranks share out. So a value does not depend
on how many ranks there are, and an interrupted computation continues where it was. Every host ends
with the columns on its own disk (``llmx.data.store.precomputed``); a later run with the same data,
model and precision finds them and builds no frozen model.

The frozen networks that compute them are built, used and freed before training. Below ZeRO-3 each
rank has them whole, in the training dtype and without an engine: gradients and optimizer states,
which take most of a device's memory in training, are not there yet. At ZeRO-3 they are sharded over
the ranks as the trained network will be.

Tried by ``python -m pytest -m deepspeed tests/integration/test_real_trainings.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmx.collectives import all_gather
from llmx.config import Experiment, ModelConfig
from llmx.data import SampleStore
from llmx.data.distributed import send_to_all
from llmx.data.examples import Schema
from llmx.data.source.files import digest_of
from llmx.data.store.precomputed import Precomputed, Values, check_values
from llmx.data.store.spec import cache_directory, fingerprint_of
from llmx.errors import ConfigError
from llmx.models.experts import gather_experts_together
from llmx.models.model import ForwardOf, Models, NetworksByName, base_of
from llmx.models.quantized import Quantization
from llmx.models.spec import ModelSpec, are_bases
from llmx.plan.types import Plan
from llmx.run.provenance.content import fingerprint
from llmx.tasks import Task
from llmx.text import clock
from llmx.train.batches import Layout
from llmx.train.engine.build import (
    Engine,
    build_networks,
    layout_of,
    seed_everything,
    with_source,
)
from llmx.train.engine.process_group import device_of


@contextlib.contextmanager
def frozen_models(
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    *,
    tokenizer: Any,
    specs: Mapping[str, ModelSpec],
) -> Iterator[Models]:
    """The networks of ``specs``, without gradients and dropout; freed with the block.
    Collective."""
    # Without gradients there is nothing to compute again.
    exp = replace(exp, model=replace(exp.model, activation_checkpointing="none"))
    device = device_of(plan)
    seed_everything(exp.seed, deterministic=exp.deterministic, accelerator=plan.accelerator)
    models = build_networks(exp, plan, ds_config, specs=specs, tokenizer=tokenizer, device=device)
    networks = {name: model.module for name, model in models.items()}
    combined = NetworksByName(networks, frozen=[*specs])
    engine = None
    if ds_config["zero_optimization"]["stage"] == 3:
        import deepspeed

        gather_experts_together(combined)
        # Without an optimizer, so with nothing of optimizers in the config.
        zero = ds_config["zero_optimization"].items()
        zero = {key: value for key, value in zero if key != "offload_optimizer"}
        engine, _, _, _ = deepspeed.initialize(
            model=combined,
            config={**ds_config, "zero_optimization": zero},
            dist_init_required=False,
        )
    (engine or combined).eval()
    try:
        for name, model in models.items():
            model.connect(ForwardOf(engine, name, model.module) if engine else model.module)
        yield models
    finally:
        if engine is not None:
            engine.destroy()
        # The caller may hold an exception, or the models: the weights go in any case.
        parameter: Any
        for parameter in combined.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            if hasattr(parameter, "ds_tensor"):  # this rank's part under ZeRO-3
                parameter.ds_tensor = None
        del engine, models, networks, combined
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


GROUP_TOKENS = 4096
"""Positions of one forward pass, where a sample has fewer: without a backward pass it takes less
memory than a step of training, and keeps a GPU busy."""
RECORD_S = 30.0
"""Seconds between two records of what is done."""
PROGRESS_S = 10.0
"""Shortest time between two lines of progress."""
NOT_OF_VALUES = (
    *("name", "tokenizer", "trained_dtype", "attention", "activation_checkpointing", "fused_loss"),
    *("liger_kernel", "compile"),
)
"""Keys of the ``model`` group that leave a network's values as they are, but for rounding."""


def from_trained(exp: Experiment, task: Task) -> bool:
    """Whether all that precomputes is the trained network without its adapter: the engine of the
    run is then built first, and no other network."""
    specs = task.models()
    needed = {name for name, spec in specs.items() if spec.precomputes}
    return bool(needed) and needed <= are_bases(specs, exp.adapter, exp.model)


def with_precomputed(
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    *,
    tokenizer: Any,
    task: Task,
    stores: Mapping[str, SampleStore | None],
    layout: Callable[[str], Layout],
    group: Any,
    log: Callable[[str], None] = print,
    engine: Engine | None = None,
) -> tuple[dict[str, SampleStore | None], dict[str, str]]:
    """The stores with the task's precomputed columns, which are found or computed. Collective.

    Args:
        stores: by the name of the split; None stays None.
        layout: how samples become tensors, for ``packed`` or ``padded``.
        group: a gloo group of all ranks.
        log: says a line, on rank 0.
        engine: of the run, where the models are the trained one without its adapter
            (``from_trained``): then no other is built.

    Returns:
        The stores, and a fingerprint of the source of each model that the values are of.
    """
    if not task.precomputed:
        return dict(stores), {}
    specs = {name: spec for name, spec in task.models().items() if spec.precomputes}
    if not specs:
        raise ConfigError(
            f"task={task.name} declares precomputed columns, but no model that computes "
            "them: add one to models(), ModelSpec(trained=False, precomputes=True)."
        )
    Schema((*task.columns, *task.precomputed))
    model_configs = {name: with_source(exp, spec).model for name, spec in specs.items()}
    source: dict[str, dict[str, Any]] = {}
    if torch.distributed.get_rank() == 0:
        cache = cache_directory(exp.data).absolute()
        source = {
            name: model_identity(model, exp.seed, exp.run_dir, cache=cache)
            for name, model in model_configs.items()
        }
    # Rank 0 decides: what lies in the Hub's cache may differ from host to host.
    source = all_gather(source, group=group)[0]
    identity = {
        "task": task.precompute_identity(),
        "model": source,
        "models": {name: dataclasses.asdict(spec) for name, spec in specs.items()},
        "precision": plan.precision,
    }
    quantization = Quantization.of(exp.adapter) if engine is not None else None
    if quantization is not None:  # the base of the trained network, as it is kept
        identity["quantization"] = dataclasses.asdict(quantization)
    by_split = {
        split: Precomputed(store, task.precomputed, identity)
        for split, store in stores.items()
        if store is not None
    }
    names = ", ".join(column.name for column in task.precomputed)
    missing = {}
    for split, precomputed in by_split.items():
        if any(all_gather(precomputed.open() is not None, group=group)):
            log(f"Data ({split}): {names} found in {precomputed.path}")
            send_to_all(precomputed.path, group=group)
        else:
            missing[split] = precomputed
    if missing:
        sharded = ds_config["zero_optimization"]["stage"] == 3
        shares = (1,) * plan.world_size if sharded else plan.batch.micro_batches
        with contextlib.ExitStack() as stack:
            if engine is None:
                frozen = frozen_models(exp, plan, ds_config, tokenizer=tokenizer, specs=specs)
                models = stack.enter_context(frozen)
            else:
                trained = engine.main
                models = Models(
                    {name: base_of(trained, name=name, spec=spec) for name, spec in specs.items()}
                )
            for split, precomputed in missing.items():
                compute(
                    precomputed,
                    task,
                    models,
                    layout(layout_of(models)),
                    shares=shares,
                    collective=sharded,
                    group=group,
                    title=f"Precomputing {names} ({split})",
                    log=log,
                )
    opened: dict[str, SampleStore | None] = dict(stores)
    for split, precomputed in by_split.items():
        opened[split] = precomputed.open()
        if opened[split] is None:
            raise ConfigError(
                f"{precomputed.path} was written but is missing on this rank: data.cache_dir must "
                "be the same directory for all ranks of a host."
            )
    return opened, {
        f"{name} (precomputed)": fingerprint_of(of_model)[:32] for name, of_model in source.items()
    }


def model_identity(model: ModelConfig, seed: int, run_dir: str, *, cache: Path) -> dict[str, Any]:
    """The source of the weights and the architecture: the ``model`` group, and every byte of its
    files or the commit in the Hub's cache. ``cache``: where the digests of files are kept."""
    values = dataclasses.asdict(model)
    identity = {key: value for key, value in values.items() if key not in NOT_OF_VALUES}
    if model.init == "scratch":
        identity["seed"] = seed
    if model.path is not None:
        content = fingerprint(
            model.path,
            kind="models",
            revision=model.revision,
            digest_of=partial(digest_of, cache=cache),
        )
        # A model that is not there to be looked at is this run's alone.
        identity["content"] = content["digest"] if content else f"of {run_dir}"
    return identity


def compute(
    precomputed: Precomputed,
    task: Task,
    models: Models,
    layout: Layout,
    *,
    shares: Sequence[int],
    collective: bool,
    group: Any,
    title: str,
    log: Callable[[str], None],
) -> None:
    """Compute the columns of a store, and publish them on every disk. Collective.

    Args:
        shares: of each rank, as numbers of groups.
        collective: whether a forward pass is (ZeRO-3): every rank runs equally many then.
    """
    store, rank = precomputed.store, torch.distributed.get_rank()
    size = group_size(layout.seq_len)
    owners = [rank for rank, share in enumerate(shares) for _ in range(share)]
    total = store.num_sequences

    def sequences(samples: int) -> int:
        """The number of sequences of the first ``samples``."""
        return int(store.span("sequence", 0, samples).stop)

    done = all_gather(precomputed.recorded() if rank == 0 else 0, group=group)[0]
    first = sequences(done)
    already = f", {first:,} already done" if done else ""
    log(f"{title}: {total:,} sequences{already}")
    max_rounds = max(1, precomputed.window // (size * len(owners)))
    num_rounds = 1
    began = shown_at = time.perf_counter()
    while done < len(store):
        round_began = time.perf_counter()
        samples = range(done, min(len(store), done + num_rounds * size * len(owners)))
        parts = [
            (indices.start, _values_of(precomputed, task, models, layout, indices))
            for indices in groups_of(rank, samples, size=size, owners=owners, even=collective)
        ]
        by_rank: list[Any] | None = [None] * len(shares) if rank == 0 else None
        torch.distributed.gather_object(parts, by_rank, group=group)
        if by_rank is not None:
            ordered = [values for _, values in sorted(chain(*by_rank), key=itemgetter(0))]
            names = [column.name for column in precomputed.columns]
            together = {
                name: np.concatenate([values[name] for values in ordered]) for name in names
            }
            precomputed.record(together, samples.start, samples.stop)
        seconds = time.perf_counter() - round_began
        seconds = max(all_gather(seconds, group=group)) / num_rounds
        num_rounds = max(1, min(max_rounds, int(RECORD_S / seconds)))
        done = samples.stop
        if time.perf_counter() - shown_at >= PROGRESS_S:
            shown_at = time.perf_counter()
            rate = (sequences(done) - first) / (shown_at - began)
            left_s = (total - sequences(done)) / rate
            part = sequences(done) / total
            log(f"{title}: {part:.0%}, {rate:,.1f} sequences/s, {clock(left_s)} left")
    took_s = time.perf_counter() - began
    rate = (total - first) / max(took_s, 1e-3)
    log(f"{title}: done in {clock(took_s)}, {rate:,.1f} sequences/s")
    if rank == 0:
        precomputed.publish(facts={"seconds": round(took_s, 3)})
    send_to_all(precomputed.path, group=group)


def group_size(seq_len: int) -> int:
    """Samples of one forward pass: of the length of a sample alone, so that values are the same for
    every split over ranks."""
    return max(1, GROUP_TOKENS // seq_len)


def groups_of(
    rank: int, samples: range, *, size: int, owners: Sequence[int], even: bool
) -> list[range]:
    """The groups of ``size`` samples that ``rank`` computes.

    Args:
        owners: the rank of each group, in turn.
        even: as many for each of its places among the owners, some empty.
    """
    num_rounds = -(-len(samples) // (size * len(owners)))
    groups = [
        samples[number * size : (number + 1) * size]
        for number, owner in enumerate([*owners] * num_rounds)
        if owner == rank
    ]
    return groups if even else [group for group in groups if group]


@torch.no_grad()
def _values_of(
    precomputed: Precomputed, task: Task, models: Models, layout: Layout, indices: range
) -> Values:
    """The values of these samples."""
    store = precomputed.store
    batch = layout.collate([store[index] for index in indices], columns=store.batch_columns)
    spans = {
        per: store.span(per, indices.start, indices.stop)
        for per in ("sequence", "example", "target")
    }
    counts = {per: span.stop - span.start for per, span in spans.items()}
    computed = task.precompute(models, batch)
    return check_values(computed, precomputed.columns, counts, task=task.name)
