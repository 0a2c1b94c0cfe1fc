"""Drift: a rank that is throttled later, or gets a neighbour, gets fewer samples from then on.

``batch.rebalance=true`` compares what forward passes take (``step_times``, gathered with every
``train`` line) with what the speeds of the plan say they should. Where another split would be
faster, all ranks change to it at the step boundary after that line: the same pure function
(``llmx.plan.balance``) of the corrected speeds, which every rank has from the same table.
``balance.json`` keeps each change with its step, so that a resumed run and a reproduction repeat it
there; an event says it in ``metrics.jsonl``. docs/unequal.md.

Tried by ``python -m pytest -m deepspeed tests/integration/test_train_balance.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from llmx.plan.balance import corrected_speeds, planned_fs, with_balance
from llmx.plan.types import Plan, RankSpeed
from llmx.run.rundir import read_json, write_json
from llmx.train.speeds import Change, described, no_splits, read_record, record
from llmx.train.step_times import LEAST_S, LINES

if TYPE_CHECKING:
    from llmx.train.session import Session

LEAST_GAIN = 0.05
"""What another split must save of the step time: a change costs new shapes of tensors, and the last
bits of a sum of gradients."""


@dataclass(frozen=True)
class Line:
    """The measurements of all ranks since the last ``train`` line; the same on every rank."""

    seconds: Sequence[float]
    """Time of the forward passes in a step, one a rank."""
    work: Sequence[float]
    """What the micro batches should have taken by the speeds of the plan, in any unit."""
    now: float
    """Seconds, by the clock of rank 0."""


class Rebalance:
    """Decides when the split changes, and to what; repeats what was decided before."""

    def __init__(
        self, plan: Plan, changes: Sequence[Change], *, step: int, trained: int = 0
    ) -> None:
        """``changes``: those of the run so far; those up to ``step`` are made already. ``trained``:
        the last step that an earlier attempt has logged; up to it nothing else is decided."""
        self.plan = plan
        self.changes = list(changes)
        self._known_until = max([step, trained, *(change.step for change in changes)])
        self._begin()

    def _begin(self) -> None:
        self._lines: list[Line] = []
        self._warm = False

    def after_step(self, step: int, line: Line | None) -> Plan | None:
        """The plan from the next step on, where it changes; every rank gets the same answer.

        ``line``: where this step has a ``train`` line.
        """
        recorded = next((change for change in self.changes if change.step == step), None)
        if recorded is not None:
            return self._change(recorded.speeds)
        if line is None or step <= self._known_until:
            return None
        speeds = self._drifted(line)
        if speeds is None:
            return None
        self.changes.append(Change(step, speeds))
        return self._change(speeds)

    def _change(self, speeds: tuple[RankSpeed, ...]) -> Plan:
        self.plan = changed(self.plan, speeds)
        self._begin()
        return self.plan

    def _drifted(self, line: Line) -> tuple[RankSpeed, ...] | None:
        """Other speeds, if so many lines in a row and for so long they would give a faster split.
        The first line after a change is one of warming up."""
        if not self._warm:
            self._warm = True
            return None
        if not _gain(self.plan, [line]):
            self._lines = []
            return None
        self._lines.append(line)
        if len(self._lines) < LINES or line.now - self._lines[0].now < LEAST_S:
            return None
        speeds = _gain(self.plan, self._lines)
        if speeds is None:
            return None
        # A pause of another rank is no part of this drift: it would have gained by the opposite.
        slower = [
            at for at, logged in enumerate(self._lines) if not _gains_by(self.plan, speeds, logged)
        ]
        if slower:
            self._lines = self._lines[slower[-1] + 1 :]
            return None
        return speeds


def changed(plan: Plan, speeds: tuple[RankSpeed, ...]) -> Plan:
    """The plan shared out by these speeds."""
    assert plan.balance is not None
    return with_balance(plan, replace(plan.balance, speeds=speeds))


def _gain(plan: Plan, lines: Sequence[Line]) -> tuple[RankSpeed, ...] | None:
    """Speeds by these lines, where the split that follows saves ``LEAST_GAIN``; else None."""
    seconds = [sum(values) for values in zip(*(line.seconds for line in lines), strict=True)]
    work = [sum(values) for values in zip(*(line.work for line in lines), strict=True)]
    if min(seconds) <= 0 or min(work) <= 0:
        return None
    speeds = tuple(corrected_speeds(plan, seconds, work))
    current_fs, changed_fs = planned_fs(plan, speeds), planned_fs(changed(plan, speeds), speeds)
    return speeds if changed_fs <= (1 - LEAST_GAIN) * current_fs else None


def _gains_by(plan: Plan, speeds: tuple[RankSpeed, ...], line: Line) -> bool:
    """Whether the steps of this line would have been faster with the split by these speeds."""
    then = tuple(corrected_speeds(plan, line.seconds, line.work))
    return planned_fs(changed(plan, speeds), then) < planned_fs(plan, then)


def open_rebalance(session: Session) -> Rebalance | None:
    """What changes the split while training goes on; the plan gets the split of the step from
    which it does. Collective."""
    plan = session.plan
    if plan.world_size == 1:
        return None
    if reason := no_splits(session.task):
        session.log(
            f"WARNING: batch.rebalance=true has no effect: {reason}, so the initial split stays. "
            "Ranks that become slower are still reported in this log."
        )
        return None
    recorded, start = read_record(session), session.resume_point
    changes = recorded.changes if recorded else ()
    if past := [change for change in changes if change.step <= start.step]:
        session.plan = plan = changed(plan, past[-1].speeds)
        session.log(f"balance: as changed at step {past[-1].step}. {described(plan)}")
        if session.rank == 0:
            write_json(session.run_dir.plan, plan.to_dict())
    return Rebalance(plan, changes, step=start.step, trained=start.trained)


def rebalance(session: Session, step: int, line: Line | None) -> bool:
    """Change the split over the ranks after a step, where that is due; the same on every rank."""
    assert session.rebalance is not None
    before, plan = session.plan, session.rebalance.after_step(step, line)
    if plan is None:
        return False
    session.plan = plan
    if session.rank == 0:
        record_change(session, before, step=step)
    return True


def record_change(session: Session, before: Plan, *, step: int) -> None:
    """``balance.json`` and ``plan.json`` with the newest change, an event and a line in the log. By
    rank 0."""
    plan, run_dir = session.plan, session.run_dir
    assert plan.balance is not None
    assert session.rebalance is not None
    try:
        values = read_json(run_dir.balance)
    except (OSError, ValueError):
        values = record(before)
    values["changes"] = [asdict(change) for change in session.rebalance.changes]
    write_json(run_dir.balance, values)
    write_json(run_dir.plan, plan.to_dict())
    speeds = plan.balance.speeds
    factor = planned_fs(plan, speeds) / planned_fs(before, speeds)
    session.log(f"rebalance: a step should take {factor:.2f} of the time. {described(plan)}")
    sizes = [list(plan.batch.sizes_of(rank)) for rank in range(plan.world_size)]
    session.metrics.event("rebalanced", step=step, sizes=sizes, time_factor=round(factor, 4))
