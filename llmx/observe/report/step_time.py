"""One step of every rank, from what the ranks measured: who computes, who waits for whom.

``python -m llmx report RUN_DIR`` draws it; the method is in docs/unequal.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmx import text as human
from llmx.observe.report.markup import escaped, grid
from llmx.observe.report.run_data import RunData
from llmx.run.metrics.lines import step_of
from llmx.text import plural

MOST_RANKS = 64
"""Ranks that are drawn; of more, those that compute longest and those that wait longest."""
PARTS = (
    ("forward", "forward", "#2f81c7"),
    ("backward", "backward", "#7ab3e0"),
    ("waits", "waits for other ranks, exchanges gradients", "#d9822b"),
    ("update", "update", "#5a9e4b"),
    ("rest", "data, metrics, all else", "#8886"),
)
"""Name, words and colour of the parts of a step, in their order."""


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

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.waits + self.update + self.rest


@dataclass(frozen=True)
class Steps:
    """All ranks, in a mean step of the interval that ends at ``step``."""

    step: int
    ranks: tuple[RankStep, ...]

    @property
    def idle(self) -> float:
        """Mean of all ranks."""
        return sum(rank.idle for rank in self.ranks) / len(self.ranks)

    @property
    def most_idle(self) -> RankStep:
        return max(self.ranks, key=lambda rank: (rank.idle, -rank.rank))


def steps_by_rank(data: RunData) -> Steps | None:
    """From the newest ``train`` line that has it; None where the ranks did not measure it.

    A backward pass contains waiting. The rank whose backward pass is shortest against its forward
    pass waits least, so what it takes is computing; every rank's is taken to be in that proportion.
    """
    for record in reversed(data.train):
        parts = [record.get(name) for name in ("forward_s", "backward_s", "update_s")]
        if not all(isinstance(values, list) and values for values in parts):
            continue
        forward, backward, update = ([float(value) for value in values or ()] for values in parts)
        if not len(forward) == len(backward) == len(update) or min(forward) <= 0:
            continue
        ratio = min(back / ahead for back, ahead in zip(backward, forward, strict=True))
        step_s = float(record.get("step_time_s") or 0.0)
        ranks = []
        for rank, ahead in enumerate(forward):
            computing = min(backward[rank], ratio * ahead)
            host, device = _place(data, rank)
            ranks.append(
                RankStep(
                    rank=rank,
                    host=host,
                    device=device,
                    forward=ahead,
                    backward=computing,
                    waits=backward[rank] - computing,
                    update=update[rank],
                    rest=max(0.0, step_s - ahead - backward[rank] - update[rank]),
                    idle=1.0 - ahead / max(forward),
                )
            )
        return Steps(step_of(record), tuple(ranks))
    return None


def _place(data: RunData, rank: int) -> tuple[str, str]:
    """Host and device type of a rank; empty where the plan does not say it."""
    ranks, hosts = data.plan.get("ranks") or [], data.plan.get("hosts") or []
    if rank >= len(ranks):
        return "", ""
    number = ranks[rank].get("host", -1)
    host = str(hosts[number].get("name")) if 0 <= number < len(hosts) else ""
    return host, str(ranks[rank].get("device") or "")


def idle_row(data: RunData) -> list[tuple[str, str]]:
    """For the summary: how much of the ranks' time is waiting for slower ones."""
    steps = steps_by_rank(data)
    if steps is None:
        return []
    most = steps.most_idle
    text = f"{human.percent(steps.idle)} of the ranks' computing time"
    if most.idle >= 0.01:
        where = f" ({most.host})" if most.host else ""
        text += f", most on rank {most.rank}{where}: {human.percent(most.idle)}"
    return [("idle", text)]


def drawn(data: RunData) -> str:
    """A bar for each rank with the parts of its step, then the numbers."""
    steps = steps_by_rank(data)
    if steps is None:
        return ""
    ranks, left_out = list(steps.ranks), 0
    if len(ranks) > MOST_RANKS:
        order = sorted(ranks, key=lambda rank: (rank.idle, rank.rank))
        shown = order[: MOST_RANKS // 2] + order[-(MOST_RANKS // 2) :]
        ranks, left_out = sorted(shown, key=lambda rank: rank.rank), len(ranks) - MOST_RANKS
    longest = max(rank.total for rank in ranks) or 1.0
    legend = "".join(
        f'<span><b style="background: {colour}">&emsp;</b> {escaped(words)}</span>'
        for _, words, colour in PARTS
    )
    bars = "".join(
        f'<tr><th>{escaped(_label(rank))}</th><td><div class="step">{_bar(rank, longest)}</div>'
        "</td></tr>"
        for rank in ranks
    )
    scale = "".join(
        f"<span>{part * 1e3 * longest:,.4g} ms</span>" for part in (0, 0.25, 0.5, 0.75, 1)
    )
    bars += f'<tr><th></th><td><div class="scale">{scale}</div></td></tr>'
    heads = ["rank", "host", "device", *(f"{name}, ms" for name, _, _ in PARTS), "idle"]
    rows = [
        [
            str(rank.rank),
            rank.host,
            rank.device,
            *(f"{1e3 * getattr(rank, name):,.1f}" for name, _, _ in PARTS),
            human.percent(rank.idle),
        ]
        for rank in ranks
    ]
    kinds = ["number", "short", "short", *["number"] * (len(PARTS) + 1)]
    more = f" {plural(left_out, 'rank')} between them are left out." if left_out else ""
    return (
        f"<p>The mean step up to step {steps.step:,}, as the ranks measured it. A backward pass "
        "counts as computing in the proportion of the rank that waits least; idle is what a rank "
        f"computes less than the slowest one.{more}</p>"
        f'<p class="legend">{legend}</p>'
        f'<div class="scroll"><table class="steps"><tbody>{bars}</tbody></table></div>'
        f"{grid(heads, rows, kinds=kinds)}"
    )


def _label(rank: RankStep) -> str:
    return f"rank {rank.rank}, {rank.host}" if rank.host else f"rank {rank.rank}"


def _bar(rank: RankStep, longest: float) -> str:
    cells = []
    for name, words, colour in PARTS:
        seconds = getattr(rank, name)
        title = escaped(f"{words}: {1e3 * seconds:,.1f} ms")
        cells.append(
            f'<i style="width: {100 * seconds / longest:.2f}%; background: {colour}" '
            f'title="{title}"></i>'
        )
    return "".join(cells)
