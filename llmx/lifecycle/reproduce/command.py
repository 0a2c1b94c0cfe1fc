"""The command ``reproduce``: what differs from then, the run, whether the numbers are the same."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmx.compose.apply_overrides import RunCommand, parse_run_command
from llmx.compose.complete import Composed, check_paths, plan_experiment
from llmx.errors import ConfigError, LlmxError
from llmx.lifecycle.memory import with_traced_memory
from llmx.lifecycle.reproduce.before import all_differences
from llmx.lifecycle.reproduce.show import print_differences, print_outcome
from llmx.lifecycle.reproduce.target import fresh_sibling, next_experiment
from llmx.lifecycle.resume.changed import keep_choice, plan_of
from llmx.lifecycle.start import launched
from llmx.run import snapshot, trust
from llmx.run.metrics.equality import compare_runs
from llmx.run.metrics.lines import read_metrics
from llmx.run.provenance import record
from llmx.run.provenance.differences import HARMLESS, not_recorded
from llmx.run.rundir import RunDir, read_mapping, write_json
from llmx.text import plural
from llmx.tracking.base import check_packages

OWN = ("strict", "to_step", "run_dir", "dry_run", "trust")
FILE = "reproduction.json"


class NotReproduced(LlmxError, RuntimeError):
    """``strict=true``, and something differs."""

    exit_code = 1


def main(words: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    return reproduce(parse_run_command("reproduce", words, own=OWN))


def reproduce(words: RunCommand) -> int:
    """List, refuse or run, compare."""
    run = RunDir(words.run)
    exp = snapshot.load(run)
    trust.check_trusted(
        run, trust.code_of(exp), trust.MODEL, trust.TASK, trust.LAUNCH,
        trusted=words.flag("trust"), say="trust=true",
    )  # fmt: skip
    strict, to_step = words.flag("strict"), words.step("to_step", least=1)
    where = words.own.get("run_dir")
    target = RunDir(Path(where).expanduser() if where else fresh_sibling(run.root))
    if target.config.exists():
        raise ConfigError(
            f"run_dir={target.root} already contains a run. Choose another directory."
        )
    old_plan = plan_of(run, exp)
    new, changed = next_experiment(exp, old_plan, words, target=target.root, to_step=to_step)
    composed = keep_choice(plan_experiment(new), old_plan, {change.key for change in changed})
    composed, _ = with_traced_memory(composed, make=False)
    new = composed.experiment
    print(f"reproducing {run.root}\n       into {target.root}")
    then = _record_of(run)
    from llmx.launch import rank_environment

    now = record(new, composed.plan, [], environment=rank_environment(new, composed.plan))
    found = all_differences(run, new, composed, then=then, now=now)
    sys.stdout.flush()
    print_differences(found, not_recorded(then), stream=sys.stdout)
    for line in composed.plan.memory_warnings:
        print(f"! {line}", flush=True)
    grave = [difference for difference in found if difference.severity != HARMLESS]
    if strict and grave:
        raise NotReproduced(
            f"strict=true: {plural(len(grave), 'difference')} above may change the "
            "numbers, so nothing was started. Restore them, or leave out strict."
        )
    if words.flag("dry_run"):
        print("nothing was started (dry_run=true)")
        return 0
    check_paths(new.data, new.model, new.task, composed.plan)
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
            "differences": [difference.to_dict() for difference in found],
        },
    )
    print_outcome(outcome, other, found, stream=sys.stdout, where=str(target.root / FILE))
    if strict and not outcome.identical:
        return exit_code or NotReproduced.exit_code
    return exit_code


def other_inputs(run: RunDir, target: RunDir) -> list[str]:
    """What the ranks of the two runs did not read alike, by fingerprints over every byte."""
    then, now = read_mapping(run.inputs), read_mapping(target.inputs)
    names = {"data": "data", "eval_data": "evaluation data", "tokenizer": "tokenizer",
             "model": "model"}  # fmt: skip
    return [name for key, name in names.items() if then and now and then.get(key) != now.get(key)]


def _start(run: RunDir, target: RunDir, words: RunCommand, composed: Composed) -> int:
    """Returns the exit code of the run."""
    from llmx.launch import check_launch, rank_environment, write_launch_files
    from llmx.launch.supervision.journal import read_resume, write_resume

    said = [f"reproduce={run.root}", *words.overrides]
    check_launch(composed.experiment, composed.plan)
    check_packages(composed.experiment.tracking)
    skipped = set(read_resume(run)[1])
    skipped |= {
        int(line["step"]) for line in read_metrics(run.metrics) if line.get("event") == "skipped"
    }
    new, plan = composed.experiment, composed.plan
    environment = rank_environment(new, plan)
    snapshot.write(
        new, plan, composed.ds_config, overrides=said, environment=environment, parent=run
    )
    if skipped:
        # What the run passed over when it diverged, it passes over again.
        write_resume(target, step=None, skip_steps=sorted(skipped), attempt=1)
    if run.balance.is_file():
        # The split over ranks that was measured then. Ranks on other devices measure anew.
        shutil.copyfile(run.balance, target.balance)
    launch = write_launch_files(new, plan, target)
    return launched(launch)


def _record_of(run: RunDir) -> dict[str, Any]:
    values = read_mapping(run.provenance)
    if not values:
        raise ConfigError(
            f"{run.provenance} is missing or incomplete, so nothing can be compared with it."
        )
    return values
