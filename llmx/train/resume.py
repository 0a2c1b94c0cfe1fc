"""Where a rank begins: all agree on the newest usable checkpoint of the run directory.

A fresh run, an automatic restart and ``python -m llmx resume`` are the same path. Every place
(see ``llmx.train.place``) looks at the files that it has, its ranks share out the hashing, and
what they found is exchanged. Tried by ``python -m pytest -m deepspeed
tests/integration/test_resume.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmx.checkpoint.choose import Report, Verdict, inspect, judge, list_steps
from llmx.checkpoint.commit import committed_dir, recover
from llmx.checkpoint.fragments import FragmentIndex
from llmx.checkpoint.manifest import STATE, CheckpointError, Manifest, read_manifest
from llmx.config import Experiment
from llmx.errors import ConfigError
from llmx.plan.types import Plan
from llmx.run.metrics.lines import read_metrics
from llmx.run.rundir import RunDir, read_json
from llmx.text import plural
from llmx.train.divergence import SPIKE_WINDOW
from llmx.train.engine import Engine
from llmx.train.metrics import lines_until
from llmx.train.place import Place, exchange
from llmx.train.schedule import RunLength
from llmx.train.state_exchange import bring_missing

PREPARED = "preparation"
"""Says why samples differ; never decides, for the fingerprint of the data covers it."""


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that is there and cannot be used."""

    step: int
    reason: str


@dataclass(frozen=True)
class Start:
    """Where the loop begins, and what is known of the time before."""

    step: int = 0
    attempt: int = 1
    skip_steps: frozenset[int] = frozenset()
    """Counted from 1, as in ``metrics.jsonl``."""
    course: int = 0
    """How often the run was sent back to an earlier step."""
    state: dict[str, Any] = field(default_factory=dict)
    """``state.json``; empty at the beginning of a run."""
    files: tuple[Path, ...] = ()
    """The tensors of the checkpoint that this rank can read."""
    damaged: tuple[Damaged, ...] = ()
    is_first: bool = True
    """Nothing of this run was logged before."""
    evaluated: frozenset[int] = frozenset()
    """Steps whose evaluation is on disk."""
    losses: tuple[float, ...] = ()
    """The newest logged ones, oldest first."""

    @property
    def tokens_seen(self) -> int:
        return int(self.state.get("tokens_seen", 0))

    @property
    def target_tokens_seen(self) -> int:
        return int(self.state.get("target_tokens_seen", 0))


def identity(exp: Experiment, plan: Plan, store: Any) -> dict[str, Any]:
    """What must be the same for the samples of a step, and so the run, to be the same."""
    from llmx.data.spec import PREPARATION

    return {
        "global_batch": plan.batch.global_batch,
        "seq_len": exp.data.seq_len,
        "seed": exp.seed,
        "data_fingerprint": store.fingerprint,
        "num_samples": len(store),
        PREPARED: PREPARATION,
    }


def begin(run_dir: RunDir, mine: dict[str, Any], *, place: Place, stage: int, group: Any) -> Start:
    """Choose the checkpoint to go on from, or the beginning. Collective over ``group``.

    Raises:
        CheckpointError: there are checkpoints, and none can be used; or not the one asked for.
        ConfigError: the newest one is not of this run.
    """
    if place.leads:
        recover(place.directory)
    asked = read_json(run_dir.resume) if place.rank == 0 and run_dir.resume.is_file() else {}
    lines = read_metrics(run_dir.metrics) if place.rank == 0 else []
    saved = {line["step"] for line in lines if line.get("event") == "saved"}
    asked, saved = exchange((asked, saved), group=group)[0]
    wanted = asked.get("step")
    went_back = [int(step) for step in asked.get("went_back") or ()]
    chosen, damaged = None, ()
    if wanted != 0:
        chosen, damaged = choose(
            place, wanted=wanted, saved=saved, went_back=went_back, group=group
        )
    state, files = read(place, chosen, mine, stage=stage, group=group) if chosen else ({}, ())
    step = int(state.get("step", 0))
    kept = lines_until(lines, step)
    known = {
        "is_first": not any(line["kind"] == "start" for line in kept),
        "evaluated": frozenset(line["step"] for line in kept if line["kind"] == "eval"),
        "losses": tuple(
            line["loss"] for line in kept if line["kind"] == "train" and line["loss"] is not None
        )[-SPIKE_WINDOW:],
    }
    return Start(
        step=step,
        attempt=int(asked.get("attempt") or 1),
        skip_steps=frozenset(asked.get("skip_steps") or ()),
        course=len(went_back),
        state=state,
        files=files,
        damaged=damaged,
        **exchange(known, group=group)[0],
    )


def choose(
    place: Place,
    *,
    wanted: int | None,
    saved: set[int],
    went_back: Sequence[int] = (),
    group: Any,
) -> tuple[Verdict | None, tuple[Damaged, ...]]:
    """The newest usable checkpoint, or the one of step ``wanted``, and those that were passed
    over. None where the run begins at its beginning. Collective.

    Args:
        saved: steps that were committed, as far as the metrics know.
        went_back: what was given up by that lies on a host still, and is none to go on from.
    """
    here = [
        step
        for step in (list_steps(place.directory) if place.leads else [])
        if not is_given_up(place, step, went_back)
    ]
    steps = sorted(set(itertools.chain.from_iterable(exchange(here, group=group))), reverse=True)
    damaged: list[Damaged] = []
    for step in [step for step in steps if wanted in (None, step)]:
        verdict = look(place, step, went_back=went_back, group=group)
        if verdict.usable:
            return verdict, tuple(damaged)
        damaged.append(Damaged(step, verdict.reason))
    reasons = "; ".join(f"step {bad.step}: {bad.reason}" for bad in damaged)
    if wanted is not None:
        raise CheckpointError(
            f"resume.json asks for the checkpoint of step {wanted}, and "
            + (f"it cannot be used ({reasons})" if damaged else f"only {steps} are there")
            + f". Choose another step, or remove resume.json from {place.directory.parent}."
        )
    # Before the first checkpoint there is the beginning; later, going back to it is no repair.
    if damaged and saved - {bad.step for bad in damaged}:
        raise CheckpointError(
            f"None of the {len(damaged)} checkpoints in {place.directory} can be used ({reasons}). "
            "Bring a good one back from a copy, or move the directory away to begin at step 0."
        )
    return None, tuple(damaged)


def read(
    place: Place, chosen: Verdict, mine: dict[str, Any], *, stage: int, group: Any
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """``state.json`` of the checkpoint, and its tensor files that lie here. Collective.

    Raises:
        ConfigError: it is not of this run.
    """
    directory = committed_dir(place.directory, chosen.step)
    holder = chosen.holder[STATE]
    state = exchange(read_json(directory / STATE) if place.rank == holder else None, group=group)[
        holder
    ]
    check_identity(state, mine)
    bring_missing(place, chosen, state, stage=stage)
    assert chosen.manifest is not None
    files = [directory / name for name in sorted(chosen.manifest.files) if is_tensors(name)]
    return state, tuple(path for path in files if path.exists())


def is_tensors(name: str) -> bool:
    """Whether a file of the manifest holds fragments."""
    return name.endswith(".safetensors")


def is_given_up(place: Place, step: int, went_back: Sequence[int]) -> bool:
    """Whether what lies here of ``step`` is of a past that the run was sent back from."""
    manifest = read_manifest(committed_dir(place.directory, step)) if went_back else None
    return isinstance(manifest, Manifest) and manifest.is_given_up(went_back)


def look(place: Place, step: int, *, went_back: Sequence[int] = (), group: Any) -> Verdict:
    """The verdict of all ranks on the checkpoint of ``step``. Collective."""
    members = place.members
    if is_given_up(place, step, went_back):  # another host holds the one that was made since
        return judge(exchange(Report(step, place.storage, None), group=group))
    report = inspect(
        place.directory,
        step,
        storage=place.storage,
        part=members.index(place.rank),
        parts=len(members),
    )
    return judge(exchange(report, group=group))


def check_identity(state: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise ConfigError that lists what differs between the checkpoint and this run."""
    different = [
        f"{name} is {state.get(name)} there and {value} here"
        for name, value in mine.items()
        if state.get(name) != value and name != PREPARED
    ]
    if not different:
        return
    then, now = state.get(PREPARED) or "an older one", mine.get(PREPARED)
    if then != now and all(text.startswith(("data_", "num_")) for text in different):
        raise ConfigError(
            f"The checkpoint of step {state['step']} was made by an llmx that prepared data in "
            f"another form ({then} then, {now} now), so its samples would be others even from the "
            f"same files: {'; '.join(different)}. Go on with the llmx that began the run "
            "(`git` in provenance.json names its commit), or begin a new run from its weights: "
            "python -m llmx export RUN_DIR, then model=hf model.path=RUN_DIR/export/step-N."
        )
    raise ConfigError(
        f"The checkpoint of step {state['step']} is of another run: {'; '.join(different)}. "
        "Resume with the values it was made with, or begin a new run directory."
    )


def check_samples(state: dict[str, Any], length: RunLength) -> None:
    """Raise ConfigError where the checkpoint's last step was the short one of a shorter run
    (``data.last_batch=short``): a longer run has a whole batch there."""
    step = int(state.get("step", 0))
    seen, wanted = int(state.get("samples", 0)), length.samples_at(step)
    if state and step <= length.steps and seen != wanted:
        raise ConfigError(
            f"The checkpoint of step {step} has seen {plural(seen, 'sample')}: its last step was "
            f"the short one of a run that ended there (data.last_batch=short). With {length.steps} "
            f"steps the same step ends at sample {wanted:,}. Resume from an earlier checkpoint "
            f"(step=N, N below {step}), or leave the length of the run as it was."
        )


def restore_from(start: Start, engine: Engine) -> None:
    """Put the chosen checkpoint into the engine. Collective.

    Raises:
        CheckpointError: what lies in the engine now is not what was saved.
    """
    from llmx.train.engine_state import restore, weights_hash

    index = FragmentIndex(start.files)
    try:
        restore(engine, index, start.state)
    finally:
        index.close()
    saved = start.state.get("weights_hash")
    if saved and start.state.get("precision") == engine.precision:
        found = weights_hash(engine)
        if found != saved:
            raise CheckpointError(
                f"The weights restored from step {start.step} have the hash {found}, they were "
                f"saved with {saved}. This is a defect of llmx or of the memory of a host."
            )
