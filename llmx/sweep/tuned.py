"""What ``python -m llmx tune`` prints: the candidates before, the fastest after. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from llmx import text as human
from llmx.compose.complete import Composed
from llmx.observe.report.sweep_table import experiment_command, markdown_row
from llmx.plan.choices import MICRO_BATCH
from llmx.run.sweepdir import Sweep, Trial
from llmx.sweep.tune import Axes, Candidate, Search
from llmx.text import plural

MARKDOWN = "tune.md"
SHOWN = 40
"""Candidates of the table on the screen; ``tune.md`` has all."""


def beginning(axes: Axes, candidates: Sequence[Candidate], base: Composed) -> list[str]:
    """Name the varied keys, the number of candidates and the batch, before the first trial."""
    lines = ["Tuning for speed (tokens/s), by the plan first, then by short trials"]
    lines += [f"  {key}: {', '.join(values)}" for key, values in axes.items()]
    refused = sum(bool(candidate.ruled_out) for candidate in candidates)
    larger = sum(not candidate.ruled_out and not candidate.fits for candidate in candidates)
    parts = [plural(len(candidates), "candidate")]
    parts += [f"{refused} cannot run"] if refused else []
    parts += [f"{larger} would not fit by the plan"] if larger else []
    lines.append(f"  {parts[0]}{': ' if parts[1:] else ''}{', '.join(parts[1:])}")
    batch = base.experiment.batch
    if batch.global_batch is not None or batch.tokens_per_step is not None:
        lines.append(
            f"  every candidate trains {base.plan.batch.global_batch} samples a step; the "
            "accumulation follows"
        )
    elif MICRO_BATCH in axes:
        lines.append(
            "  batch.global_batch is not set, so a step takes as many samples as the micro batch "
            "makes. Set it where the training is to stay the same."
        )
    return lines


def _by_plan(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort by the plan: first candidates that fit, the fastest first; then the others."""
    return sorted(candidates, key=lambda c: (bool(c.ruled_out), not c.fits, -c.speed, c.memory_gib))


def _values(candidate: Candidate) -> list[str]:
    return [word.partition("=")[2] for word in candidate.words]


def candidate_table(axes: Axes, candidates: Sequence[Candidate]) -> str:
    """The candidates in their order, as a person reads it."""
    order = _by_plan(candidates)
    fastest = max((c.speed for c in order if not c.ruled_out), default=0.0)
    rows = [["by the plan", "GiB", *axes, ""]]
    for candidate in order[:SHOWN]:
        speed = f"{candidate.speed / fastest:.0%}" if fastest and not candidate.ruled_out else ""
        memory = human.gib(candidate.memory_gib) if candidate.memory_gib else ""
        if memory and candidate.capacity_gib:
            memory += f" of {human.gib(candidate.capacity_gib)}"
        note = human.one_line(candidate.ruled_out, limit=100)
        note = note or ("" if candidate.fits else "would not fit")
        rows.append([speed, memory, *_values(candidate), note])
    lines = human.columns(rows)
    if len(order) > SHOWN:
        lines.append(f"and {len(order) - SHOWN} more")
    return "\n".join(lines)


def to_markdown(axes: Axes, search: Search) -> str:
    """Every candidate and what became of it: ``tune.md`` in the sweep's directory."""
    head = ["trial", *axes, "tokens/s", "GiB", "GiB by the plan", "outcome"]
    lines = [markdown_row(head), markdown_row(["---"] * len(head))]
    order = _by_plan(search.candidates)
    tried_candidates = sorted(
        (c for c in order if c in search.trials), key=lambda c: search.trials[c].index
    )
    for candidate in [*tried_candidates, *(c for c in order if c not in search.trials)]:
        trial, word = search.trials.get(candidate), search.word_of(candidate)
        reason = "" if trial else search.why_not(candidate)[0]
        cells = [
            str(trial.index) if trial else "",
            *_values(candidate),
            human.count(trial.tokens_per_s) if trial and trial.tokens_per_s else "",
            human.gib(trial.memory_gib) if trial and trial.memory_gib else "",
            human.gib(candidate.memory_gib) if candidate.memory_gib else "",
            f"{word}: {human.one_line(reason, limit=200)}" if reason else word,
        ]
        lines.append(markdown_row(cells))
    return "\n".join([*lines, "", f"Ended: {search.ended}"]) + "\n"


def conclusion(search: Search, sweep: Sweep) -> list[str]:
    """Name the chosen candidate and why, the counts of the others, and the command to train."""
    counts = search.counts()
    num_tried = counts.pop("tried", 0)
    listed = ", ".join(f"{count} {word}" for word, count in counts.items())
    num_all = plural(len(search.candidates), "candidate")
    lines = ["", f"Tuned: {num_tried} of {num_all} tried; {listed}"]
    lines.append(f"  ended because {search.ended}")
    best = sweep.best
    if best is None or best.tokens_per_s is None:
        return [*lines, "  no trial finished; the causes are listed above"]
    speed = human.count(best.tokens_per_s)
    memory = f", {human.gib(best.memory_gib)} GiB a rank" if best.memory_gib else ""
    lines.append(f"  the fastest: {search.best.text if search.best else ''}")
    lines.append(f"  trial {best.index}: {speed} tokens/s{memory}{_ahead(best, sweep.trials)}")
    lines.append(f"  train with it: {experiment_command(sweep)}")
    return lines


def _ahead(best: Trial, trials: Sequence[Trial]) -> str:
    """State by how much the best trial is ahead of the second and of the slowest."""
    speeds = sorted(t.tokens_per_s for t in trials if t.outcome == "ok" and t.tokens_per_s)
    if len(speeds) < 2 or not best.tokens_per_s:
        return ""
    return (
        f"; {best.tokens_per_s / speeds[-2]:.2f} times the second, "
        f"{best.tokens_per_s / speeds[0]:.2f} times the slowest trial"
    )
