"""The resume point: all ranks agree on the newest usable checkpoint of the run directory.

A fresh run, an automatic restart and ``python -m llmx resume`` are the same path. The ranks on
each storage (``llmx.spread``) share the hashing of the files there, and
all ranks gather what was found. Tried by ``python -m pytest -m deepspeed
tests/integration/test_resume.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmx.checkpoint.commit import committed_dir, recover
from llmx.checkpoint.distributed import transfer_missing
from llmx.checkpoint.fragments import FragmentIndex
from llmx.checkpoint.manifest import STATE, CheckpointError, Manifest, read_manifest
from llmx.checkpoint.selection import Assessment, Report, assess, inspect, list_steps
from llmx.collectives import all_gather
from llmx.errors import ConfigError
from llmx.plan.types import Plan
from llmx.run.metrics.lines import read_metrics, step_of
from llmx.run.rundir import RunDir, read_json
from llmx.spread import StorageTopology
from llmx.text import plural
from llmx.train.engine.build import Engine
from llmx.train.metrics import lines_until
from llmx.train.schedule import RunLength
from llmx.train.stopping import SPIKE_WINDOW

PREPARED = "preparation"
"""Only explains why samples differ; the fingerprint of the data decides whether they do."""


@dataclass(frozen=True)
class ResumePoint:
    """The step from which the loop runs, and what is known of the steps before."""

    step: int = 0
    attempt: int = 1
    skip_steps: frozenset[int] = frozenset()
    """Counted from 1, as in ``metrics.jsonl``."""
    num_rollbacks: int = 0
    """How often the run was rolled back to an earlier step."""
    state: dict[str, Any] = field(default_factory=dict)
    """``state.json``; empty at the beginning of a run."""
    files: tuple[Path, ...] = ()
    """The tensors of the checkpoint that this rank can read."""
    damaged: tuple[Assessment, ...] = ()
    """Newer checkpoints that are there and cannot be used."""
    is_first: bool = True
    """Nothing of this run was logged before."""
    evaluated: frozenset[int] = frozenset()
    """Steps whose evaluation is on disk."""
    losses: tuple[float, ...] = ()
    """The newest logged ones, oldest first."""
    trained: int = 0
    """The last step that an earlier attempt has logged; it may be later than ``step``."""

    @property
    def tokens_seen(self) -> int:
        return int(self.state.get("tokens_seen", 0))

    @property
    def target_tokens_seen(self) -> int:
        return int(self.state.get("target_tokens_seen", 0))


def identity(*, seed: int, seq_len: int, plan: Plan, store: Any) -> dict[str, Any]:
    """The values that decide the samples of a step: a resumed run must have the same."""
    from llmx.data.store.spec import PREPARATION

    return {
        "global_batch": plan.batch.global_batch,
        "seq_len": seq_len,
        "seed": seed,
        "data_fingerprint": store.fingerprint,
        "num_samples": len(store),
        PREPARED: PREPARATION,
    }


def find_resume_point(
    run_dir: RunDir,
    run_identity: dict[str, Any],
    *,
    topology: StorageTopology,
    stage: int,
    group: Any,
) -> ResumePoint:
    """Select the checkpoint to resume from, or step 0. Collective over ``group``.

    Raises:
        CheckpointError: there are checkpoints, and none can be used; or not the requested one.
        ConfigError: the newest one is not of this run.
    """
    if topology.leads:
        recover(topology.directory)
    request = read_json(run_dir.resume) if topology.rank == 0 and run_dir.resume.is_file() else {}
    lines = read_metrics(run_dir.metrics) if topology.rank == 0 else []
    saved = {line["step"] for line in lines if line.get("event") == "saved"}
    request, saved = all_gather((request, saved), group=group)[0]
    requested = request.get("step")
    rollbacks = [int(step) for step in request.get("went_back") or ()]
    chosen: Assessment | None = None
    damaged: tuple[Assessment, ...] = ()
    if requested != 0:
        chosen, damaged = select_checkpoint(
            topology, requested=requested, saved=saved, rollbacks=rollbacks, group=group
        )
    state, files = (
        load_state(topology, chosen, run_identity, stage=stage, group=group) if chosen else ({}, ())
    )
    step = int(state.get("step", 0))
    remaining = lines_until(lines, step)
    logged: dict[str, Any] = {
        "is_first": not any(line["kind"] == "start" for line in remaining),
        "evaluated": frozenset(line["step"] for line in remaining if line["kind"] == "eval"),
        "losses": tuple(
            line["loss"]
            for line in remaining
            if line["kind"] == "train" and line["loss"] is not None
        )[-SPIKE_WINDOW:],
        "trained": max((step_of(line) for line in lines if line["kind"] == "train"), default=0),
    }
    return ResumePoint(
        step=step,
        attempt=int(request.get("attempt") or 1),
        skip_steps=frozenset(request.get("skip_steps") or ()),
        num_rollbacks=len(rollbacks),
        state=state,
        files=files,
        damaged=damaged,
        **all_gather(logged, group=group)[0],
    )


def select_checkpoint(
    topology: StorageTopology,
    *,
    requested: int | None,
    saved: set[int],
    rollbacks: Sequence[int] = (),
    group: Any,
) -> tuple[Assessment | None, tuple[Assessment, ...]]:
    """The newest usable checkpoint, or the one of step ``requested``, and the damaged ones that
    were newer. None where the run starts at step 0. Collective.

    Args:
        saved: steps that were committed, as far as the metrics know.
        rollbacks: steps of all rollbacks: checkpoints of a branch that one abandoned may still be
            on a host, and do not count.
    """
    here = [
        step
        for step in (list_steps(topology.directory) if topology.leads else [])
        if not is_abandoned(topology, step, rollbacks)
    ]
    steps = sorted(set(itertools.chain.from_iterable(all_gather(here, group=group))), reverse=True)
    damaged: list[Assessment] = []
    for step in [step for step in steps if requested in (None, step)]:
        assessment = assess_step(topology, step, rollbacks=rollbacks, group=group)
        if assessment.usable:
            return assessment, tuple(damaged)
        damaged.append(assessment)
    reasons = "; ".join(f"step {bad.step}: {bad.reason}" for bad in damaged)
    if requested is not None:
        raise CheckpointError(
            f"resume.json requests the checkpoint of step {requested}, "
            + (f"which cannot be used ({reasons})" if damaged else f"but only {steps} exist")
            + f". Choose another step, or remove resume.json from {topology.directory.parent}."
        )
    # Before the first checkpoint step 0 is right; later, starting over would lose the run.
    if damaged and saved - {bad.step for bad in damaged}:
        raise CheckpointError(
            f"None of the {len(damaged)} checkpoints in {topology.directory} can be used "
            f"({reasons}). "
            "Copy a good one back from a backup, or move the directory away to start at step 0."
        )
    return None, tuple(damaged)


def load_state(
    topology: StorageTopology,
    chosen: Assessment,
    run_identity: dict[str, Any],
    *,
    stage: int,
    group: Any,
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """``state.json`` of the checkpoint, and its tensor files on this storage. Collective.

    Raises:
        ConfigError: it is not of this run.
    """
    directory = committed_dir(topology.directory, chosen.step)
    holder = chosen.holder[STATE]
    state: Any = all_gather(
        read_json(directory / STATE) if topology.rank == holder else None, group=group
    )[holder]
    check_identity(state, run_identity)
    transfer_missing(topology, chosen, state, stage=stage)
    assert chosen.manifest is not None
    files = [directory / name for name in sorted(chosen.manifest.files)]
    return state, tuple(path for path in files if path.suffix == ".safetensors" and path.exists())


def is_abandoned(topology: StorageTopology, step: int, rollbacks: Sequence[int]) -> bool:
    """Whether the checkpoint of ``step`` here is of a branch that a rollback abandoned."""
    manifest = read_manifest(committed_dir(topology.directory, step)) if rollbacks else None
    return isinstance(manifest, Manifest) and manifest.is_abandoned(rollbacks)


def assess_step(
    topology: StorageTopology, step: int, *, rollbacks: Sequence[int] = (), group: Any
) -> Assessment:
    """The assessment of the checkpoint of ``step`` over all storages. Collective."""
    members = topology.members
    if is_abandoned(topology, step, rollbacks):  # another host holds the one that was made since
        return assess(all_gather(Report(step, topology.storage, None), group=group))
    report = inspect(
        topology.directory,
        step,
        storage=topology.storage,
        part=members.index(topology.rank),
        parts=len(members),
    )
    return assess(all_gather(report, group=group))


def check_identity(state: dict[str, Any], run_identity: dict[str, Any]) -> None:
    """Raise ConfigError that lists what differs between the checkpoint and this run."""
    different = [
        f"{name} is {state.get(name)} in the checkpoint and {value} in this run"
        for name, value in run_identity.items()
        if state.get(name) != value and name != PREPARED
    ]
    if not different:
        return
    then, now = state.get(PREPARED), run_identity.get(PREPARED)
    if then != now and all(text.startswith(("data_", "num_")) for text in different):
        raise ConfigError(
            f"The checkpoint of step {state['step']} was saved by a version of llmx with another "
            f"data format ({then}; this version has {now}), so the samples would differ even from "
            f"the same files: {'; '.join(different)}. Resume with the version that started the "
            "run (`git` in provenance.json names its commit), or start a new run from its weights: "
            "python -m llmx export RUN_DIR, then model=hf model.path=RUN_DIR/export/step-N."
        )
    raise ConfigError(
        f"The checkpoint of step {state['step']} belongs to another run: {'; '.join(different)}. "
        "Resume with the values of that run, or start a new run directory."
    )


def check_samples(state: dict[str, Any], length: RunLength) -> None:
    """Raise ConfigError where the checkpoint's last step was the short one of a shorter run
    (``data.last_batch=short``): a longer run has a whole batch there."""
    step = int(state.get("step", 0))
    saved, expected = int(state.get("samples", 0)), length.samples_at(step)
    if state and step <= length.steps and saved != expected:
        raise ConfigError(
            f"The checkpoint of step {step} was saved after {plural(saved, 'sample')}: the run "
            "ended there with a short batch (data.last_batch=short). With "
            f"{length.steps} steps the same step ends at sample {expected:,}. Resume from an "
            f"earlier checkpoint (step=N, N below {step}), or keep the length of the run."
        )


def restore_from(start: ResumePoint, engine: Engine) -> None:
    """Restore the engine from the selected checkpoint. Collective.

    Raises:
        CheckpointError: the restored weights differ from those that were saved.
    """
    from llmx.checkpoint.state.engine_state import restore, weights_hash

    index = FragmentIndex(start.files)
    try:
        restore(engine, index, start.state)
    finally:
        index.close()
    saved = start.state.get("weights_hash")
    if saved and start.state.get("precision") == engine.precision:
        restored = weights_hash(engine)
        if restored != saved:
            raise CheckpointError(
                f"The weights restored from step {start.step} have the hash {restored}; the saved "
                f"weights had {saved}. This is a bug in llmx or a memory fault of a host."
            )
