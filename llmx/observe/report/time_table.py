"""The predicted time of a plan as a person reads it. Only rich, imported late.

``python -m llmx plan hardware=a100x8`` prints it below the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from llmx import text as human
from llmx.plan.types import Plan, TimePlan
from llmx.text import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_HOSTS = 8
SHOWN_STEPS = 1000
"""Where the number of steps is not known."""
FARTHEST_DAYS = 36_500


def time_parts(plan: Plan, *, now: datetime | None = None) -> list[RenderableType]:
    """Title and table of the predicted time; nothing for a plan of an older llmx.

    ``now``: when the run would start; None: now.
    """
    from rich.table import Table
    from rich.text import Text

    if plan.time is None:
        return []
    title = "Predicted time of a step"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in time_rows(plan, now=now or datetime.now()):
        table.add_row(f" {name}", Text(text))
    # A table of memory ends with an empty line of its own.
    return [Text(f"{'' if plan.memory or plan.storage else chr(10)}{title}", style="bold"), table]


def time_rows(plan: Plan, *, now: datetime | None = None) -> Iterator[tuple[str, str]]:
    """Name and value, one line each; with ``now`` also when the run would end."""
    time = plan.time
    assert time is not None
    if not time.step_s:
        yield "time", f"not known: {time.unknown}"
        return
    yield "time", f"{seconds(time.step_s)}: {', '.join(_parts(time))}"
    yield "bottleneck", time.bottleneck
    mfu = ", ".join(f"{name} {human.percent(part)}" for name, part in time.mfu)
    yield "speed", f"{time.tokens_per_s:,.0f} tokens/s{f'; MFU {mfu}' if mfu else ''}"
    if max(time.idle, default=0.0) >= 0.005:
        yield "waiting", f"of a step: {waiting(plan)}"
    if time.even_step_s:
        gain = time.step_s / time.even_step_s
        yield "even split", f"{seconds(time.even_step_s)}; this one takes {gain:.2f} of it"
    if time.exchanges:
        sent = (f"{one.name} {_gb(one.gb)}" for one in time.exchanges)
        yield "sent", f"by each rank in a step: {', '.join(sent)}"
    yield "whole run", whole_run(plan, now=now)
    if time.sources:
        yield "from", f"{'; '.join(time.sources)} (docs/planner.md)"


def whole_run(plan: Plan, *, now: datetime | None = None) -> str:
    """Hours, device hours, cost, and the date of the end; without evaluation and saves."""
    time = plan.time
    assert time is not None
    devices = "GPU" if plan.accelerator == "cuda" else "rank"
    if not plan.total_steps:
        of_some = human.duration(SHOWN_STEPS * time.step_s)
        return (
            f"{of_some} per {SHOWN_STEPS:,} steps (number of steps unknown until the data is read)"
        )
    words = [
        f"{plural(plan.total_steps, 'step')} in {human.duration(3600 * time.hours)}",
        f"{_hours(time.device_hours)} {devices} hours",
    ]
    if time.cost is not None:
        words.append(f"cost {time.cost:,.2f}")
    if now is not None and time.hours < 24 * FARTHEST_DAYS:
        end = now + timedelta(hours=time.hours)
        words.append(f"ends {end:%a %d %b %Y %H:%M} if started now")
    return f"{', '.join(words)}; without evaluation and saves"


def waiting(plan: Plan) -> str:
    """The longest that a rank of each host waits for slower ones."""
    assert plan.time is not None
    most: dict[str, float] = {}
    for rank, share in zip(plan.ranks, plan.time.idle, strict=True):
        name = f"{plan.hosts[rank.host].name} ({rank.device})"
        most[name] = max(share, most.get(name, 0.0))
    shown = [f"{name} {human.percent(share)}" for name, share in most.items()]
    more = ", ..." if len(shown) > MOST_HOSTS else ""
    return ", ".join(shown[:MOST_HOSTS]) + more


def seconds(value: float) -> str:
    """``12.3 ms``, ``4.56 s``, ``1 min 20 s``: three digits."""
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 100 else human.duration(value)


def _parts(time: TimePlan) -> Iterator[str]:
    yield f"computing {seconds(time.computing_s)}"
    if time.communication_s:
        hidden = time.communication_s - time.exposed_s
        beside = f" and {seconds(hidden)} behind computing" if hidden > 0 else ""
        yield f"communication {seconds(time.exposed_s)}{beside}"
    if time.host_s:
        yield f"offload {seconds(time.host_s)}"
    if time.update_s:
        yield f"update {seconds(time.update_s)}"


def _gb(value: float) -> str:
    return f"{value:.3g} GB" if value >= 1 else f"{1000 * value:.3g} MB"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
