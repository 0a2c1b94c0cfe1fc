"""The command ``resume``: checks and prints the changes, then resumes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import yaml

from llmx.checkpoint.manifest import CheckpointError
from llmx.compose.complete import check_paths
from llmx.compose.words import Words
from llmx.config import Experiment
from llmx.errors import ConfigError
from llmx.lifecycle.knowledge import informed, keep_traces
from llmx.lifecycle.resume.changes import (
    SAME,
    Next,
    edited_config,
    next_run,
    refuse_other_content,
    schedule_note,
)
from llmx.lifecycle.resume.run_state import (
    RunState,
    archive_run,
    hosts_then_and_now,
    is_hashed,
    newest_usable,
    of_this_machine,
    problems_of,
    read_state,
    roll_back,
    set_aside,
    trusted_run,
)
from llmx.lifecycle.start import launched
from llmx.run import snapshot
from llmx.run.provenance import record
from llmx.run.provenance.differences import (
    BREAKS,
    HARMLESS,
    MEANING,
    Difference,
    differences,
)
from llmx.run.rundir import RunDir, check_writable, read_mapping, write_text
from llmx.tracking.base import check_packages

if TYPE_CHECKING:
    from llmx.launch.spec import LaunchSpec


def run(words: Words) -> int:
    """Resume a run; returns its exit code."""
    launch = prepare_resume(words)
    return 0 if launch is None else launched(launch)


def prepare_resume(words: Words, *, edited: Experiment | None = None) -> LaunchSpec | None:
    """Check everything, say it, and rewrite what changes; what is to be launched, or None.

    ``edited``: the experiment to continue with, where it is known whole.
    """
    from llmx.launch import check_launch, rank_environment, write_launch_files
    from llmx.launch.supervision.journal import refuse_alive

    run, exp = trusted_run(words)
    refuse_alive(run, snapshot.run_id(run) or "-")
    state = read_state(run)
    step = words.step("step")
    upcoming = next_run(run, exp, words, state, edited=edited)
    upcoming = replace(upcoming, composed=informed(upcoming.composed))
    if nothing_left(run, upcoming, state, step):
        return None
    origin = first_step(run, state, step)
    new = upcoming.composed
    check_launch(new.experiment, new.plan)
    check_paths(new.experiment, new.plan)
    check_packages(new.experiment.tracking)
    environment = rank_environment(new.experiment, new.plan)
    now = record(new.experiment, new.plan, list(words.typed), environment=environment)
    then = read_mapping(run.provenance)
    if then or state.was_launched:  # else a config came alone, and nothing is continued
        refuse_other_content(upcoming.changes, then, now)
    rows = of_this_machine(differences(then, now), new.plan) if then else []
    rows += hosts_then_and_now(run, new.experiment, new.plan)
    rows += edited_config(run, then)
    if origin:
        refuse_other_data(rows)
    _print_changes(run, upcoming, state, origin=origin, step=step, rows=rows)
    if upcoming.dry_run:
        print("  nothing was changed or started (dry_run=true)")
        return None
    check_writable(
        run.config, fix="Copy the run to a directory that you can write to, and resume the copy."
    )
    severe = [row for row in rows if row.severity != HARMLESS]
    _rewrite(
        run, upcoming, state, severe,
        origin=origin, step=step, then=then, now=now, typed=words.typed,
    )  # fmt: skip
    return write_launch_files(new.experiment, new.plan, run)


def refuse_other_data(rows: Sequence[Difference]) -> None:
    """ConfigError where the samples of a step would no longer be what they were."""
    changed_inputs = [
        row for row in rows if row.what in ("data", "tokenizer") and row.severity == BREAKS
    ]
    if changed_inputs:
        lines = [
            f"{row.what}: {row.then} then, {row.now} now; {row.advice}." for row in changed_inputs
        ]
        raise ConfigError(
            "the run was trained on other data, so it cannot be resumed:\n  " + "\n  ".join(lines)
        )


def nothing_left(run: RunDir, upcoming: Next, state: RunState, step: int | None) -> bool:
    """Say so, and return True, where the run has finished all that it is asked for."""
    if state.finished_at is None or step is not None:
        return False
    last = upcoming.last_step
    if state.stopped_early and not upcoming.changes:
        print(
            f"{run.root}\n  has stopped early at step {state.finished_at} (task.early_stopping): "
            "nothing to resume.\n"
            f"  To train longer: python -m llmx resume {shlex.quote(str(run.root))} "
            "task.early_stopping.patience=null"
        )
        return True
    if last is not None and last > state.finished_at:
        return False
    at, total = state.finished_at, upcoming.total
    if total is not None and total > at:
        word, suffix = "task.stop_at_step=null", f" of {total} (task.stop_at_step={last})"
    else:
        word, suffix = f"task.steps={max(2 * at, (last or 0) + 1)}", ""
    print(
        f"{run.root}\n  has finished at step {at}{suffix}: nothing to resume.\n"
        f"  To train longer: python -m llmx resume {shlex.quote(str(run.root))} {word}"
    )
    return True


def first_step(run: RunDir, state: RunState, step: int | None) -> int:
    """The step it goes on from; ConfigError for a ``step=N`` that has no good checkpoint."""
    if step == 0:
        return 0
    if step is not None:
        steps = ", ".join(str(steps) for steps in state.checkpoints) or "none"
        if step not in state.checkpoints:
            raise ConfigError(
                f"step={step}: no checkpoint of that step in {run.checkpoints}. There are: "
                f"{steps}; step=0 starts from the beginning."
            )
        problems = problems_of(run, step)
        if problems:
            raise ConfigError(
                f"step={step}: that checkpoint is damaged: {'; '.join(problems)}. Choose another: "
                f"{steps}."
            )
        return step
    newest, damaged = newest_usable(run, state.checkpoints)
    # The ranks refuse it, too (llmx.train.resume), but on hosts, and minutes later.
    if newest is None and damaged and state.saved - set(damaged):
        listed = "\n".join(f"  step {step}: {text}" for step, text in damaged.items())
        raise CheckpointError(
            f"none of the checkpoints in {run.checkpoints} can be used:\n{listed}\nPut a good copy "
            f"of the named file back, or begin again: python -m llmx resume "
            f"{shlex.quote(str(run.root))} step=0 (the damaged ones are kept in history/)."
        )
    for damaged_step, text in damaged.items():
        print(f"  damaged   checkpoint of step {damaged_step}: {text}")
    return newest or 0


def _print_changes(
    run: RunDir,
    upcoming: Next,
    state: RunState,
    *,
    origin: int,
    step: int | None,
    rows: Sequence[Difference],
) -> None:
    """Print the next steps before they are taken."""
    print(f"resuming {run.root}\n  state     {state.ending}")
    if origin:
        again = max(0, state.last_step - origin)
        repeated = f"; {again} steps are trained again" if again else ""
        print(f"  from      the checkpoint of step {origin}{repeated}")
        if not is_hashed(run, origin):
            print(
                "            its sizes are right; the ranks verify every byte before they load it"
            )
    elif step == 0:
        print("  from      step 0, as asked for: all steps are trained again")
    elif not state.last_step:
        print("  from      step 0")
    elif not state.checkpoints and not all(h.is_local for h in upcoming.composed.plan.hosts):
        print("  from      the checkpoints on its hosts: none is on this machine")
    else:
        print("  from      step 0: there is no usable checkpoint, all steps are trained again")
    widest = max((len(change.key) for change in upcoming.changes), default=0)
    for change in upcoming.changes:
        effect = "" if change.rule.effect == SAME else f"  ({change.rule.effect})"
        print(f"  changed   {change.key:<{widest}}  {change.values}{effect}")
    note = schedule_note(upcoming, state, origin)
    if note:
        print(f"  schedule  {note}")
    for difference in rows:
        if difference.severity != HARMLESS:
            print(
                f"  differs   {difference.what}: {difference.then} then, {difference.now} now"
                f" ({MEANING[difference.severity]})"
            )
    composed = upcoming.composed
    for line in composed.plan.memory_warnings:
        print(f"  !         {line}")
    sys.stdout.flush()


def _rewrite(
    run: RunDir,
    upcoming: Next,
    state: RunState,
    severe: Sequence[Difference],
    *,
    origin: int,
    step: int | None,
    then: dict[str, object],
    now: dict[str, object],
    typed: Sequence[str],
) -> None:
    """The former files into history, the new ones in their place."""
    from llmx.launch.supervision.journal import (
        read_attempts,
        read_resume,
        read_rollbacks,
        write_resume,
    )

    newer = [saved for saved in state.checkpoints if step is not None and saved > step]
    again = state.last_step > origin == 0
    other = state.was_launched and bool(severe)
    keeps = bool(upcoming.changes or newer or again or other)
    if keeps:
        directory = archive_run(
            run, edits=upcoming.changes, differs=severe, words=typed, step=origin
        )
        print(f"  kept      the previous files in {directory.relative_to(run.root)}/")
        set_aside(run, newer, directory)
        if newer:
            moved = ", ".join(str(saved) for saved in newer)
            print(f"  moved     newer checkpoints ({moved}) are there, too")
        overrides = [*snapshot.read_overrides(run), *upcoming.words]
        write_text(run.overrides, yaml.safe_dump(overrides, allow_unicode=True))
    new = upcoming.composed
    # Without a change worth keeping, a run that was only planned has dry_run=true in it.
    if keeps or snapshot.load(run) != new.experiment:
        snapshot.write_config(run, new.experiment, new.plan, new.ds_config)
        keep_traces(new)
    snapshot.write_provenance(run, {**now, "parent": then.get("parent")})
    snapshot.write_identity(run)
    _, skipped = read_resume(run)
    number = len(read_attempts(run)) + 1
    back = None if step is None else roll_back(run, read_rollbacks(run), step)
    write_resume(run, step=step, skip_steps=skipped, attempt=number, rollbacks=back)
    sys.stdout.flush()
