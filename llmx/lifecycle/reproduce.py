"""``python -m llmx reproduce RUN``: a new run from the snapshot of an old one, compared with it.

A run always starts from its snapshot, so this is the normal path, entered one step later.
Before the start it says what differs from then; at the end, whether the numbers are the same.
``reproduction.json`` in the new run has that outcome, the first and the largest difference.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TextIO

from llmx.compose.apply_overrides import apply
from llmx.compose.complete import Composed, check_paths, plan_experiment, with_moved_paths
from llmx.compose.effects import check_effects
from llmx.compose.words import Words
from llmx.config import Experiment, to_dict
from llmx.config.rollout_rules import with_rollout_hosts
from llmx.errors import ConfigError, LlmxError
from llmx.hardware.resolve import resolve_hardware
from llmx.lifecycle.knowledge import informed, keep_traces
from llmx.lifecycle.resume.changes import (
    PLACES,
    Change,
    changes,
    edited_config,
    keep_choice,
    plan_of,
    with_same_batch,
)
from llmx.lifecycle.resume.run_state import (
    history,
    hosts_then_and_now,
    of_this_machine,
    trusted_run,
)
from llmx.lifecycle.start import supervised
from llmx.observe.report.screen import open_console
from llmx.plan.balance import is_of
from llmx.plan.types import Plan
from llmx.run import snapshot
from llmx.run.metrics.equality import Outcome, compare_runs
from llmx.run.metrics.lines import read_metrics
from llmx.run.provenance import record
from llmx.run.provenance.differences import (
    BREAKS,
    HARMLESS,
    MAY,
    MEANING,
    SEVERITIES,
    Difference,
    differences,
    not_recorded,
    plan_differences,
)
from llmx.run.rundir import RunDir, read_mapping, write_json
from llmx.run.tail import read_checked
from llmx.text import plural
from llmx.tracking.base import check_packages

FILE = "reproduction.json"


class NotReproduced(LlmxError, RuntimeError):
    """Raised with ``strict=true`` if something differs."""

    exit_code = 1


def run(words: Words) -> int:
    """List the differences, refuse or run, and compare the numbers; returns the exit code."""
    run, exp = trusted_run(words)
    strict, to_step = words.flag("strict"), words.step("to_step")
    where = words.own.get("run_dir")
    target = RunDir(Path(where).expanduser() if where else fresh_sibling(run.root))
    if target.config.exists() and not snapshot.failed_before_a_step(target):
        raise ConfigError(
            f"run_dir={target.root} already contains a run. Continue it with python -m llmx resume "
            f"{shlex.quote(str(target.root))}, or choose another directory."
        )
    old_plan = plan_of(run, exp)
    new, changed = next_experiment(exp, old_plan, words, target=target.root, to_step=to_step)
    composed = keep_choice(plan_experiment(new), old_plan, {change.key for change in changed})
    composed = informed(composed)
    new = composed.experiment
    print(f"reproducing {run.root}\n       into {target.root}")
    then = _record_of(run)
    from llmx.launch import rank_environment

    now = record(new, composed.plan, [], environment=rank_environment(new, composed.plan))
    rows = all_differences(run, new, composed, then=then, now=now)
    sys.stdout.flush()
    print_differences(rows, not_recorded(then), stream=sys.stdout)
    for line in composed.plan.memory_warnings:
        print(f"! {line}", flush=True)
    grave = [difference for difference in rows if difference.severity != HARMLESS]
    if strict and grave:
        raise NotReproduced(
            f"strict=true: {plural(len(grave), 'difference')} above may change the "
            "numbers, so nothing was started. Restore them, or leave out strict."
        )
    if new.launch.detach:
        raise ConfigError(
            "launch.detach=true: reproduce compares the runs at the end, so it keeps the terminal. "
            "Set launch.detach=false."
        )
    if words.flag("dry_run"):
        print("nothing was started (dry_run=true)")
        return 0
    check_paths(new, composed.plan)
    exit_code = _start(run, target, words, composed)
    outcome = compare_runs(run, target)
    other = other_inputs(run, target)
    write_json(
        target.root / FILE,
        {
            "source": str(run.root),
            "run_id": snapshot.run_id(run),
            "to_step": to_step,
            **outcome.to_dict(),
            "other_inputs": other,
            "exit_code": exit_code,
            "changed": {change.key: [change.old, change.new] for change in changed},
            "differences": [difference.to_dict() for difference in rows],
        },
    )
    print_outcome(outcome, other, rows, stream=sys.stdout, where=str(target.root / FILE))
    if strict and not outcome.identical:
        return exit_code or NotReproduced.exit_code
    return exit_code


def other_inputs(run: RunDir, target: RunDir) -> list[str]:
    """The inputs that differ between the ranks of the two runs, by fingerprints over every byte."""
    then, now = read_mapping(run.inputs), read_mapping(target.inputs)
    names = {"data": "data", "eval_data": "evaluation data", "tokenizer": "tokenizer",
             "model": "model"}  # fmt: skip
    return [name for key, name in names.items() if then and now and then.get(key) != now.get(key)]


def _start(run: RunDir, target: RunDir, words: Words, composed: Composed) -> int:
    """Returns the exit code of the run."""
    from llmx.launch import check_launch, rank_environment, write_launch_files
    from llmx.launch.supervision.journal import read_resume, write_resume

    words_of_run = [f"reproduce={run.root}", *words.overrides]
    check_launch(composed.experiment, composed.plan)
    check_packages(composed.experiment.tracking)
    skipped = set(read_resume(run)[1])
    skipped |= {
        int(line["step"]) for line in read_metrics(run.metrics) if line.get("event") == "skipped"
    }
    new, plan = composed.experiment, composed.plan
    environment = rank_environment(new, plan)
    snapshot.write(
        new, plan, composed.ds_config, overrides=words_of_run, environment=environment, parent=run
    )
    keep_traces(composed)
    if skipped:
        # What the run passed over when it diverged, it passes over again.
        write_resume(target, step=None, skip_steps=sorted(skipped), attempt=1)
    if run.balance.is_file():
        # The split over ranks that was measured then. Ranks on other devices measure anew.
        shutil.copyfile(run.balance, target.balance)
    if run.inputs.is_file():  # the day that its chat template wrote
        shutil.copyfile(run.inputs, target.inputs)
    launch = write_launch_files(new, plan, target)
    return supervised(launch)


def _record_of(run: RunDir) -> dict[str, Any]:
    """The content of ``provenance.json``; empty where a ``config.yaml`` came alone."""
    content, damage = read_checked(run.provenance)
    if damage:
        raise ConfigError(f"{run.root}: nothing can be compared with this run: {damage}")
    return dict(content)


ALLOWED = (
    "hardware.*", "launch.*", "tracking.*", "checkpoint.*", "name",
    "batch.micro_batch", "batch.accumulation",
    *PLACES, "data.cache_dir", "data.num_workers", "task.save_model", "task.code_path",
    "dry_run",
)  # fmt: skip
"""Keys of where and how it runs, and of where its inputs lie, whose content is compared."""


def next_experiment(
    exp: Experiment, plan: Plan, words: Words, *, target: Path, to_step: int | None
) -> tuple[Experiment, list[Change]]:
    """The experiment of the reproduction, and every change; ConfigError for what may not be."""
    exp = dataclasses.replace(exp, dry_run=False)
    edited = apply(exp, words.overrides, config_dirs=words.config_dirs)
    check_effects(edited, words.overrides, command="reproduce")
    edits = changes(to_dict(exp), to_dict(edited))
    refused = [
        f"{change.key}: {change.values}"
        for change in edits
        if not any(fnmatchcase(change.key, pattern) for pattern in ALLOWED)
    ]
    if refused:
        raise ConfigError(
            "reproduce repeats a run, so these cannot change:\n  " + "\n  ".join(refused) + "\nMay "
            f"change: {', '.join(ALLOWED)}. For another run, start a new one."
        )
    hardware = edited.hardware
    if hardware.kind == "local":  # this machine, as at a start
        hardware = dataclasses.replace(hardware, hosts=[])
    hardware, rollout = with_rollout_hosts(resolve_hardware(hardware), edited.rollout)
    new = dataclasses.replace(
        edited, run_dir=str(target), dry_run=False, hardware=hardware, rollout=rollout
    )
    keys = {change.key for change in changes(to_dict(exp), to_dict(new))}
    new = with_same_batch(with_moved_paths(new, exp), keys, plan)
    if to_step is not None:
        task = dataclasses.replace(new.task, stop_at_step=to_step)
        new = dataclasses.replace(new, task=task)
    return new, changes(to_dict(exp), to_dict(new))


def fresh_sibling(root: Path) -> Path:
    """A directory beside ``root`` that does not exist yet."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    target, number = root.parent / f"{root.name}_reproduced_{stamp}", 1
    while target.exists():
        number += 1
        target = root.parent / f"{root.name}_reproduced_{stamp}_{number}"
    return target


def all_differences(
    run: RunDir,
    new: Experiment,
    composed: Composed,
    *,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
) -> list[Difference]:
    """Differences in provenance (``then``, ``now``), hosts, plan and the run's own past; the
    gravest first."""
    rows = [
        *edited_config(run, then),
        *of_this_machine(differences(then, now) if then else [], composed.plan),
        *hosts_then_and_now(run, new, composed.plan),
        *plan_differences(
            read_mapping(run.plan),
            as_trained(run, composed.plan),
            ds_then=read_mapping(run.ds_config),
            ds_now=composed.ds_config,
        ),
        *_of_the_run_itself(run, new.deterministic, on_gpus=composed.plan.on_gpus),
    ]
    return sorted(rows, key=lambda difference: SEVERITIES.index(difference.severity))


def as_trained(run: RunDir, plan: Plan) -> dict[str, Any]:
    """The values of a plan; with the split of then, where its ranks take that from
    ``balance.json``."""
    values = plan.to_dict()
    then = read_mapping(run.plan)
    if then and is_of(read_mapping(run.balance), plan):
        values["batch"] = then["batch"]
    return values


def _of_the_run_itself(
    run: RunDir, deterministic: bool | None, *, on_gpus: bool
) -> list[Difference]:
    """Reasons why this very run cannot be repeated bit for bit on any machine."""
    rows = []
    if on_gpus and not deterministic:
        rows.append(
            Difference(
                MAY, "deterministic=false: kernels may differ from run to run", "so", "so",
                "train with deterministic=true to repeat a run bit for bit",
            )
        )  # fmt: skip
    for directory in history(run):
        change = read_mapping(directory / "changes.json")
        if not change:
            continue
        other = [key for key, effect in change["effects"].items() if effect != "same numbers"]
        other += [row["what"] for row in change.get("differs", ())]
        if other and change["step"]:
            rows.append(
                Difference(
                    BREAKS, f"resumed at step {change['step']}",
                    f"other {', '.join(other)}", "from the start as it is",
                    f"{os.path.relpath(directory, run.root)}/ has the previous config",
                )
            )  # fmt: skip
    return rows


STYLES = {BREAKS: "bold red", MAY: "yellow", HARMLESS: "dim"}


def print_differences(
    all_rows: Sequence[Difference], missing: Sequence[str], *, stream: TextIO
) -> None:
    """Print a table for each severity: what, then, now, what to do. One line where nothing
    differs."""
    from rich.table import Table
    from rich.text import Text

    console = open_console(stream)
    if not all_rows and not missing:
        console.print(
            "  nothing differs from the recorded code, packages, devices, inputs and config"
        )
    for severity in SEVERITIES:
        rows = [difference for difference in all_rows if difference.severity == severity]
        if not rows:
            continue
        console.print(Text(f"\n {MEANING[severity]}", style=STYLES[severity]))
        table = Table(box=None, pad_edge=True, header_style="dim", expand=False)
        advised = any(row.advice for row in rows)
        for name in ("what", "then", "now", *(["what to do"] if advised else [])):
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(row.what, row.then, row.now, *([row.advice] if advised else []))
        console.print(table)
    if missing:
        console.print(f"\n not recorded then, so not compared: {', '.join(missing)}")
    console.print()


def print_outcome(
    outcome: Outcome,
    other_inputs: Sequence[str],
    rows: Sequence[Difference] = (),
    *,
    stream: TextIO,
    where: str,
) -> None:
    """The result, beside it what speaks against it, and where it is written.

    ``rows``: what differed before the start; the table of it is far up by now.
    """
    from rich.text import Text

    console = open_console(stream)
    breaking = [row for row in rows if row.severity == BREAKS]
    sure = outcome.is_proven and not other_inputs and not breaking
    style = "bold green" if sure else "bold yellow"
    mark = "✓" if sure else "=" if outcome.identical else "≠" if outcome.lines else "?"
    console.print(Text(f"\n{mark} reproduction: {outcome.summary()}", style=style))
    if other_inputs:
        console.print(
            "  The ranks read other inputs than those of the first run: "
            f"{', '.join(other_inputs)} (by fingerprints over every byte).",
            style="bold red",
        )
    if breaking:
        console.print(
            "  These differences from the first run break bitwise equality:", style="bold red"
        )
        for row in breaking:
            console.print(Text(f"    {row.what}: {row.then} then, {row.now} now", style="red"))
        if outcome.identical:
            console.print(
                "  The values are equal nevertheless: these had no effect on what was compared.",
                style="red",
            )
    console.print(Text(f"  written to {where}"), soft_wrap=True)
