"""What ``python -m llmx tune`` prints: the candidates before, the fastest after. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from llmx import text as human
from llmx.compose.complete import Composed
from llmx.observe.report.sweep_table import experiment_command, markdown_row
from llmx.run.sweepdir import Sweep, Trial
from llmx.sweep.search import MICRO_BATCH, Axis, Candidate, Search
from llmx.text import plural

MARKDOWN = "tune.md"
SHOWN = 40
"""Candidates of the table on the screen; ``tune.md`` has all."""


def beginning(axes: Sequence[Axis], candidates: Sequence[Candidate], base: Composed) -> list[str]:
    """Name the varied keys, the number of candidates and the batch, before the first trial."""
    lines = ["Tuning for speed (tokens/s), by the plan first, then by short trials"]
    for axis in axes:
        lines.append(f"  {axis.key}: {', '.join(axis.values)}")
    out = sum(bool(c.ruled_out) and c.same_as is None for c in candidates)
    num_same = sum(candidate.same_as is not None for candidate in candidates)
    larger = sum(_left(candidate) and not candidate.fits for candidate in candidates)
    parts = [
        f"{out} cannot run" if out else "",
        f"{num_same} are the same as another" if num_same else "",
        f"{larger} would not fit by the plan" if larger else "",
    ]
    listed = ", ".join(part for part in parts if part)
    lines.append(f"  {plural(len(candidates), 'candidate')}{f': {listed}' if listed else ''}")
    batch = base.experiment.batch
    if batch.global_batch is None and batch.tokens_per_step is None:
        if any(axis.key == MICRO_BATCH for axis in axes):
            lines.append(
                "  batch.global_batch is not set, so a step takes as many samples as the micro "
                "batch makes. Set it where the training is to stay the same."
            )
    else:
        lines.append(
            f"  every candidate trains {base.plan.batch.global_batch} samples a step; the "
            "accumulation follows"
        )
    return lines


def _left(candidate: Candidate) -> bool:
    return not candidate.ruled_out and candidate.same_as is None


def _by_plan(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort by the plan: first candidates that fit, the fastest first; then the others."""
    return sorted(
        (candidate for candidate in candidates if candidate.same_as is None),
        key=lambda c: (bool(c.ruled_out), not c.fits, -c.speed, c.memory_gib),
    )


def candidate_table(axes: Sequence[Axis], candidates: Sequence[Candidate]) -> str:
    """The candidates in their order, as a person reads it."""
    order = _by_plan(candidates)
    fastest = max((candidate.speed for candidate in order if _left(candidate)), default=0.0)
    rows = [["by the plan", "GiB", *(axis.key for axis in axes), ""]]
    for candidate in order[:SHOWN]:
        rows.append([*_numbers(candidate, fastest), *_values(candidate), _note(candidate)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if len(order) > SHOWN:
        lines.append(f"and {len(order) - SHOWN} more")
    return "\n".join(lines)


def _numbers(candidate: Candidate, fastest: float) -> list[str]:
    speed = f"{candidate.speed / fastest:.0%}" if fastest and _left(candidate) else ""
    memory = human.gib(candidate.memory_gib) if candidate.memory_gib else ""
    return [speed, f"{memory} of {human.gib(candidate.capacity_gib)}"
            if memory and candidate.capacity_gib else memory]  # fmt: skip


def _values(candidate: Candidate) -> list[str]:
    return [word.partition("=")[2] for word in candidate.words]


def _note(candidate: Candidate) -> str:
    if candidate.ruled_out:
        return human.one_line(candidate.ruled_out, limit=100)
    return "" if candidate.fits else "would not fit"


def to_markdown(axes: Sequence[Axis], candidates: Sequence[Candidate], search: Search) -> str:
    """Every candidate and what became of it: ``tune.md`` in the sweep's directory."""
    head = ["trial", *(axis.key for axis in axes), "tokens/s", "GiB", "GiB by the plan",
            "outcome"]  # fmt: skip
    lines = [markdown_row(head), markdown_row(["---"] * len(head))]
    order = sorted(
        _by_plan(candidates),
        key=lambda c: search.trials[c.place].index if c.place in search.trials else 10**6,
    )
    for candidate in order:
        trial = search.trials.get(candidate.place)
        word = search.word_of(candidate)
        reason = None if trial else search.why_not(candidate)
        lines.append(
            markdown_row(
                [
                    str(trial.index) if trial else "",
                    *_values(candidate),
                    human.count(trial.tokens_per_s) if trial and trial.tokens_per_s else "",
                    human.gib(trial.memory_gib) if trial and trial.memory_gib else "",
                    human.gib(candidate.memory_gib) if candidate.memory_gib else "",
                    f"{word}: {human.one_line(reason.cause, limit=200)}" if reason else word,
                ]
            )
        )
    return "\n".join([*lines, "", f"Ended: {search.ended}"]) + "\n"


def conclusion(search: Search, sweep: Sweep) -> list[str]:
    """Name the chosen candidate and why, the counts of the others, and the command to train."""
    counts = search.counts()
    num_tried = counts.pop("tried", 0)
    listed = ", ".join(f"{count} {word}" for word, count in counts.items())
    lines = ["", f"Tuned: {num_tried} of {plural(len(search.at), 'candidate')} tried; {listed}"]
    lines.append(f"  ended because {search.ended}")
    best = sweep.best
    if best is None or best.tokens_per_s is None:
        lines.append("  no trial finished; the causes are listed above")
        return lines
    candidate = search.best
    speed = human.count(best.tokens_per_s)
    memory = f", {human.gib(best.memory_gib)} GiB a rank" if best.memory_gib else ""
    lines.append(f"  the fastest: {candidate.text if candidate else ''}")
    lines.append(f"  trial {best.index}: {speed} tokens/s{memory}{_ahead(best, sweep.trials)}")
    lines.append(f"  train with it: {experiment_command(sweep)}")
    return lines


def _ahead(best: Trial, trials: Sequence[Trial]) -> str:
    """State by how much the best trial is ahead of the second and of the slowest."""
    speeds = sorted(
        (t.tokens_per_s for t in trials if t.outcome == "ok" and t.tokens_per_s), reverse=True
    )
    if len(speeds) < 2 or not best.tokens_per_s:
        return ""
    return (
        f"; {best.tokens_per_s / speeds[1]:.2f} times the second, "
        f"{best.tokens_per_s / speeds[-1]:.2f} times the slowest trial"
    )
