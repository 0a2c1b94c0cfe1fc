"""One step of every rank, from what the ranks measured: who computes, who waits for whom.

``python -m llmx report RUN_DIR`` shows it; the method is in docs/unequal.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmx import text as human
from llmx.observe.page import Block, block, table
from llmx.observe.run import Run
from llmx.run.metrics.declared import is_number
from llmx.run.metrics.lines import step_of
from llmx.text import plural

MAX_RANKS = 64
"""Ranks that are shown; of more, those that compute longest and those that wait longest."""
PARTS = ("forward", "backward", "waits", "update", "rest")


@dataclass(frozen=True)
class RankStep:
    """One rank's mean step, in seconds."""

    rank: int
    host: str
    device: str
    forward: float
    backward: float
    """Computing; what is measured beyond is ``waits``."""
    waits: float
    update: float
    """With its exchange of weights or norms."""
    rest: float
    idle: float
    """The part of the slowest rank's computing for which this one has none."""


@dataclass(frozen=True)
class Steps:
    """All ranks, in a mean step of the interval that ends at ``step``."""

    step: int
    ranks: tuple[RankStep, ...]

    @property
    def idle(self) -> float:
        """The idle share of a step, as the mean over all ranks."""
        return sum(rank.idle for rank in self.ranks) / len(self.ranks)


def steps_by_rank(run: Run) -> Steps | None:
    """Read the newest ``train`` line with times; None where the ranks did not measure them.

    A backward pass contains waiting. The rank whose backward pass is shortest against its forward
    pass waits least, so what it takes is computing; every rank's is taken to be in that proportion.
    """
    places = {rank: name for name, ranks in run.hosts for rank in ranks}
    devices = [str(rank.get("device") or "") for rank in run.plan.get("ranks") or []]
    for record in reversed(run.train):
        parts = [record.get(name) for name in ("forward_s", "backward_s", "update_s")]
        if not all(isinstance(values, list) and all(map(is_number, values)) for values in parts):
            continue
        forward, backward, update = ([float(value) for value in values or ()] for values in parts)
        if not len(forward) == len(backward) == len(update) or min(forward, default=0) <= 0:
            continue
        ratio = min(back / ahead for back, ahead in zip(backward, forward, strict=True))
        step_s = float(record.get("step_time_s") or 0.0)
        ranks = []
        for rank, (ahead, back, behind) in enumerate(zip(forward, backward, update, strict=True)):
            computing = min(back, ratio * ahead)
            rest, idle = max(0.0, step_s - ahead - back - behind), 1.0 - ahead / max(forward)
            times = (ahead, computing, back - computing, behind, rest, idle)
            device = devices[rank] if rank < len(devices) else ""
            ranks.append(RankStep(rank, places.get(rank, ""), device, *times))
        return Steps(step_of(record), tuple(ranks))
    return None


def idle_text(steps: Steps) -> str:
    """State the share of the ranks' time that is waiting for slower ones."""
    slowest = max(steps.ranks, key=lambda rank: (rank.idle, -rank.rank))
    text = f"{human.percent(steps.idle)} of the ranks' computing time"
    if slowest.idle >= 0.01:
        where = f" ({slowest.host})" if slowest.host else ""
        text += f", most on rank {slowest.rank}{where}: {human.percent(slowest.idle)}"
    return text


def steps_blocks(run: Run) -> list[Block | None]:
    """The parts of a step for each rank; empty where the ranks did not measure them."""
    steps = steps_by_rank(run)
    if steps is None:
        return []
    ranks = sorted(steps.ranks, key=lambda rank: (rank.idle, rank.rank))
    omitted = len(ranks) - MAX_RANKS
    if omitted > 0:
        ranks = ranks[: MAX_RANKS // 2] + ranks[-(MAX_RANKS // 2) :]
    ranks.sort(key=lambda rank: rank.rank)
    newest = next((line for line in run.train[::-1] if line.get("memory_gib")), {})
    memory: list[float] = newest.get("memory_gib", [])
    heads = ["rank", "host", "device", *(f"{name}, ms" for name in PARTS), "idle", "peak GiB"]
    rows = [
        [
            str(rank.rank),
            rank.host,
            rank.device,
            *(f"{1e3 * getattr(rank, name):,.1f}" for name in PARTS),
            human.percent(rank.idle),
            human.gib(memory[rank.rank]) if rank.rank < len(memory) else "",
        ]
        for rank in ranks
    ]
    bars = [
        [f"rank {rank.rank}", *(round(1e3 * getattr(rank, name), 3) for name in PARTS)]
        for rank in ranks
    ]
    kinds = ["number", "short", "short", *["number"] * (len(PARTS) + 2)]
    note = f" {plural(omitted, 'rank')} between them are left out." if omitted > 0 else ""
    text = (
        f"The mean step up to step {steps.step:,}, as the ranks measured it. A backward pass "
        "counts as computing in the proportion of the rank that waits least; waits are for other "
        "ranks and the exchange of gradients; idle is what a rank computes less than the slowest "
        f"one.{note}"
    )
    return [
        block("text", text),
        block("bars", {"parts": PARTS, "rows": bars, "unit": "ms"}),
        table(rows, heads=heads, kinds=kinds),
    ]
