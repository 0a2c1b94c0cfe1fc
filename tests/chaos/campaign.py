"""One undisturbed training, then the same one under fire; what the two must have in common.

    report = campaign(directory, faults=30, seed=1)
    report.survived, report.rows()

The next fault comes when the run has made progress after the last one: a new checkpoint.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.chaos.checks import (
    committed_checkpoints_are_good,
    no_orphan,
    no_torn_file,
    nothing_left,
)
from tests.chaos.faults import KINDS, Kind, draw
from tests.chaos.run_files import json_lines
from tests.chaos.site import PATIENCE_S, GaveUp, Site

EVERY = 10
"""Steps between two checkpoints."""
STRIDE = 60
"""Steps of the run for each fault: enough for a few checkpoints between two of them."""

SLOWEST_STEP_S = 0.3
"""On a machine that is busy with other things."""


@dataclass
class Strike:
    """One fault that was tried, and what came of it."""

    number: int
    kind: str
    what: str = ""
    step: int = 0
    """The newest logged step when it struck."""
    resumed_at: int | None = None
    """Where the run went on from; None where it did not have to restart."""
    restarts: int = 0
    """How often the ranks were started again for it."""
    repeated: int = 0
    """Steps that had to be trained again."""
    took_s: float = 0.0
    """From the fault to the next new checkpoint."""
    survived: bool = False
    why: str = ""


@dataclass
class Report:
    """What a campaign found."""

    seed: int
    faults: int
    every_steps: int = EVERY
    steps: int = 0
    started: float = field(default_factory=time.time)
    took_s: float = 0.0
    undisturbed_s: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    strikes: list[Strike] = field(default_factory=list)
    equal_losses: int = 0
    """Logged losses that equal the undisturbed run's bit for bit."""
    weights_hash: str = ""
    problems: list[str] = field(default_factory=list)
    """Why the campaign as a whole did not pass; empty when it did."""

    @property
    def survived(self) -> int:
        return sum(strike.survived for strike in self.strikes)

    @property
    def passed(self) -> bool:
        return not self.problems and self.survived == self.faults

    def rows(self) -> list[dict[str, Any]]:
        """For each kind: tried, survived, steps repeated at most, seconds to the next save."""
        rows = []
        for kind in KINDS:
            mine = [strike for strike in self.strikes if strike.kind == kind.name]
            if mine:
                times = sorted(strike.took_s for strike in mine)
                rows.append(
                    {
                        "kind": kind.words,
                        "tried": len(mine),
                        "survived": sum(strike.survived for strike in mine),
                        "repeated": max(strike.repeated for strike in mine),
                        "median_s": times[len(times) // 2],
                    }
                )
        return rows

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "survived": self.survived, "passed": self.passed}


@dataclass
class Trained:
    """What must not depend on what happened on the way."""

    losses: dict[int, tuple[float, float]]
    """Step -> loss and gradient norm."""
    weights_hash: str


Say = Callable[[str], None]


def campaign(
    directory: Path, *, faults: int, seed: int, kinds: list[Kind] | None = None, say: Say = print
) -> Report:
    """All of it. Never raises for what the run did wrong: the report says it."""
    chance = random.Random(seed)
    chosen = kinds or draw(faults, chance)
    steps = (faults + 1) * STRIDE + sum(kind.steps for kind in chosen)
    report = Report(seed, faults, steps=steps)
    report.versions = {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
    }
    begun = time.monotonic()
    try:
        with Site(directory / "undisturbed", steps=report.steps, every=EVERY) as site:
            site.start()
            undisturbed = _until_the_end(site)
        report.undisturbed_s = time.monotonic() - begun
        say(f"undisturbed: {report.steps} steps in {report.undisturbed_s:.0f} s")
        with Site(directory / "disturbed", steps=report.steps, every=EVERY) as site:
            site.start()
            for number, kind in enumerate(chosen, 1):
                _strike(site, kind, number, chance, report, say)
            _compare(undisturbed, _until_the_end(site), report)
    except GaveUp as error:
        report.problems.append(str(error))
    report.took_s = time.monotonic() - begun
    return report


def _strike(
    site: Site, kind: Kind, number: int, chance: random.Random, report: Report, say: Say
) -> None:
    """One fault at a random step of its stretch, and all that must be true after it."""
    strike = Strike(number, kind.name)
    report.strikes.append(strike)
    # The stretch begins behind the last fault's: the run is over only after the last of them.
    at = number * STRIDE + chance.randrange(STRIDE // 3)
    site.until_step(max(at, site.step))
    begun, restarts, strike.step = time.monotonic(), len(site.resumed), site.step
    attempts = len(site.attempts())
    try:
        strike.what = kind.strike(site, chance)
        site.look()
        before = len([event for event in site.events if event["event"] == "saved"])

        def goes_on() -> bool:
            if kind.restarts and len(site.resumed) == restarts:
                return False
            ended = [line["ended"] for line in site.attempts()[attempts:]]
            if ended and site.resumed_at < ended[-1]:
                return False
            if site.supervisor().get("state") != "running" or site.step <= strike.step:
                return False
            saves = len([event for event in site.events if event["event"] == "saved"])
            return saves > before and 0 < site.saved_since_resume() <= site.newest()

        site.until(goes_on, what=f"the next checkpoint after {kind.words} ({strike.what})")
        if len(site.resumed) > restarts:
            strike.restarts = len(site.resumed) - restarts
            strike.resumed_at = min(site.resumed[restarts:])
            strike.repeated = sum(site.repeated[restarts:])
        _check(site, kind, strike)
    except GaveUp as error:
        strike.why = str(error).splitlines()[0]
        say(f"{number:>3} {kind.name:<10} {strike.what}: NOT SURVIVED: {strike.why}")
        raise
    strike.survived = True
    strike.took_s = time.monotonic() - begun
    again = "" if strike.resumed_at is None else f", again from {strike.resumed_at}"
    again += f" ({strike.restarts} restarts)" if strike.restarts > 1 else ""
    say(
        f"{number:>3}/{report.faults} {kind.name:<10} at step {strike.step}: {strike.what}"
        f"{again}, {strike.repeated} repeated, {strike.took_s:.1f} s"
    )


def _check(site: Site, kind: Kind, strike: Strike) -> None:
    no_torn_file(site)
    committed_checkpoints_are_good(site)
    no_orphan(site)
    most = kind.most_lost * site.every
    if strike.repeated > most:
        raise GaveUp(
            f"{strike.repeated} steps were trained again, more than {most}: from "
            f"{strike.resumed_at} on\n{site.story()}"
        )


def _until_the_end(site: Site) -> Trained:
    """Wait for a good end; what was trained."""
    timeout_s = PATIENCE_S + (site.steps - site.step) * SLOWEST_STEP_S
    site.until(site.is_over, what="the end of the run", may_end=True, timeout_s=timeout_s)
    assert site.process is not None
    result = site.result()
    if site.process.returncode != 0 or result["outcome"] != "ok":
        raise GaveUp(f"ended with {site.process.returncode}: {result}\n{site.story()}")
    nothing_left(site)
    records = json_lines(site.run_dir(site.near).metrics)
    train = [record for record in records if record["kind"] == "train"]
    steps = [record["step"] for record in train]
    if steps != list(range(1, site.steps + 1)):
        gaps = sorted(set(range(1, site.steps + 1)) - set(steps))
        double = sorted({step for step in steps if steps.count(step) > 1})
        raise GaveUp(f"metrics.jsonl: steps missing {gaps}, steps twice {double}")
    starts = [record for record in records if record["kind"] == "start"]
    ends = [record for record in records if record["kind"] == "end"]
    if (len(starts), len(ends)) != (1, 1):
        raise GaveUp(f"metrics.jsonl has {len(starts)} start and {len(ends)} end lines")
    return Trained(
        {record["step"]: (record["loss"], record["grad_norm"]) for record in train},
        ends[0]["weights_hash"],
    )


def _compare(undisturbed: Trained, disturbed: Trained, report: Report) -> None:
    report.weights_hash = disturbed.weights_hash
    equal = [s for s, values in undisturbed.losses.items() if disturbed.losses[s] == values]
    report.equal_losses = len(equal)
    if len(equal) < len(undisturbed.losses):
        first = min(set(undisturbed.losses) - set(equal))
        report.problems.append(
            f"step {first}: loss and gradient norm {disturbed.losses[first]}, undisturbed "
            f"{undisturbed.losses[first]}"
        )
    if disturbed.weights_hash != undisturbed.weights_hash:
        report.problems.append(
            f"final weights {disturbed.weights_hash}, undisturbed {undisturbed.weights_hash}"
        )
