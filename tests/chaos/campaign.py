"""A training under fire beside the same one undisturbed; what the two must have in common.

    report = campaign(directory, SFT, [(kind,) for kind in KINDS], seed=1)
    report.survived, report.problems

The next fault comes when the run has made progress after the last one, a new checkpoint; or, as
the second of a volley, while the run still recovers from the first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.checks import (
    committed_checkpoints_are_good,
    damage_was_noticed,
    no_orphan,
    no_torn_file,
    nothing_left,
)
from tests.chaos.kinds import KINDS, Kind, Volley
from tests.chaos.site import PATIENCE_S, Site
from tests.chaos.training import GaveUp, Trained, Undisturbed, trained

EVERY = 10
"""Steps between two checkpoints."""
SLOWEST_STEP_S = 0.3
"""On a machine that is busy with other things."""


@dataclass
class Strike:
    """One fault that was tried, and what came of it."""

    kind: str
    words: str
    """Of the kind, for the table."""
    step: int
    """The newest logged step when it struck."""
    follows: bool
    """Whether it struck while the run recovered from the one before."""
    what: str = ""
    repeated: int = 0
    """Steps that had to be trained again."""
    took_s: float = 0.0
    """From the fault to the next new checkpoint."""
    survived: bool = False


@dataclass
class Report:
    """What a campaign found."""

    faults: int
    steps: int
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


@dataclass(frozen=True)
class Setup:
    """What is trained, and what is done to it."""

    name: str
    kinds: tuple[Kind, ...]
    site: type[Site]
    is_repeatable: bool = True
    """Whether the bits must be those of an undisturbed run."""
    stride: int = 30
    """Steps of the run for each volley: enough for a checkpoint or two between two of them."""


SFT = Setup("sft", KINDS, Site)


def campaign(
    directory: Path,
    setup: Setup,
    volleys: Sequence[Volley],
    *,
    seed: int,
) -> Report:
    """All of it. Never raises for what the run did wrong: the report says it."""
    chance = random.Random(seed)
    kinds = [kind for volley in volleys for kind in volley]
    slack = sum(kind.steps for kind in kinds)
    report = Report(len(kinds), (len(volleys) + 1) * setup.stride + slack)
    begun = time.monotonic()
    try:
        with ExitStack() as stack:
            undisturbed = None
            if setup.is_repeatable:
                words = setup.site.undisturbed_words(report.steps)
                undisturbed = stack.enter_context(
                    Undisturbed(directory / "undisturbed", words, steps=report.steps)
                )
            site = stack.enter_context(
                setup.site(directory / "disturbed", steps=report.steps, every=EVERY)
            )
            site.start()
            for number, volley in enumerate(volleys, 1):
                # Each has a stretch of its own: the run is over only after the last of them.
                at = number * setup.stride + chance.randrange(setup.stride // 3)
                _fire(site, volley, at, chance, report)
            disturbed = _until_the_end(site)
            print(f"the end, after {time.monotonic() - begun:.0f} s", flush=True)
            report.weights_hash = disturbed.weights_hash
            if undisturbed is not None:
                _compare(undisturbed.until_over(patience_s=PATIENCE_S), disturbed, report)
    except GaveUp as error:
        report.problems.append(str(error))
    return report


def _fire(
    site: Site,
    volley: Volley,
    at: int,
    chance: random.Random,
    report: Report,
) -> None:
    """A volley at a step, and all that must be true after it."""
    site.until(
        lambda: site.step >= at and len(site.held()) >= 2,
        what=f"step {at}, and two checkpoints",
    )
    site.may_repeat = 0
    strikes: list[Strike] = []
    before: list[tuple[float, int]] = []
    """When each struck, and how many resumes there were."""
    try:
        for kind in volley:
            strike = Strike(kind.name, kind.words, site.step, follows=bool(strikes))
            strikes.append(strike)
            report.strikes.append(strike)
            begun, resumes, attempts = time.monotonic(), len(site.resumed), len(site.attempts())
            how = kind.follow if strike.follows and kind.follow else kind.strike
            strike.what = how(site, chance)
            before.append((begun, resumes))
        must_restart = any(kind.restarts for kind in volley)
        _until_it_goes_on(site, strikes[-1], resumes, attempts, must_restart=must_restart)
        _check(site, volley, sum(site.repeated[before[0][1] :]))
    except GaveUp as error:
        why = str(error).splitlines()[0]
        print(f"{strikes[-1].kind} {strikes[-1].what}: NOT SURVIVED: {why}", flush=True)
        raise
    for strike, (begun, resumes) in zip(strikes, before, strict=True):
        strike.repeated = sum(site.repeated[resumes:])
        strike.took_s = time.monotonic() - begun
        strike.survived = True
        when = "  + meanwhile" if strike.follows else f"at step {strike.step}"
        print(
            f"{report.survived:>3}/{report.faults} {strike.kind:<10} {when}: {strike.what}, "
            f"{len(site.resumed) - resumes} restarts, {strike.repeated} steps repeated, "
            f"{strike.took_s:.1f} s",
            flush=True,
        )


def _until_it_goes_on(
    site: Site, strike: Strike, resumes: int, attempts: int, *, must_restart: bool
) -> None:
    """Until the run trains and has saved again after ``strike``.

    Args:
        resumes, attempts: how many there were before it.
    """
    site.look()
    site.seen_step = site.step
    saves = len(site.saves())

    def goes_on() -> bool:
        if must_restart and len(site.resumed) == resumes:
            return False
        ended = [line["ended"] for line in site.attempts()[attempts:]]
        if ended and site.resumed_at < ended[-1]:
            return False
        if site.supervisor().get("state") != "running" or site.step <= strike.step:
            return False
        if not site.goes_on():
            return False
        return len(site.saves()) > saves and 0 < site.saved_since_resume() <= site.newest()

    site.until(goes_on, what=f"the next checkpoint after {strike.kind} ({strike.what})")


def _check(site: Site, volley: Volley, repeated: int) -> None:
    no_torn_file(site)
    damage_was_noticed(site)
    committed_checkpoints_are_good(site)
    no_orphan(site)
    if site.changed and not site.draws_anew:
        raise GaveUp(f"trained again with other losses: steps {site.changed}\n{site.story()}")
    most = sum(kind.most_lost for kind in volley) * site.every + site.may_repeat
    if repeated > most:
        raise GaveUp(f"{repeated} steps were trained again, more than {most}\n{site.story()}")


def _until_the_end(site: Site) -> Trained:
    """Wait for a good end; what was trained."""
    timeout_s = PATIENCE_S + (site.steps - site.step) * SLOWEST_STEP_S
    site.until(site.is_over, what="the end of the run", may_end=True, timeout_s=timeout_s)
    assert site.process is not None
    result = site.result()
    if site.process.returncode != 0 or result["outcome"] != "ok":
        raise GaveUp(f"ended with {site.process.returncode}: {result}\n{site.story()}")
    nothing_left(site)
    site.check_samples()
    return trained(site.run_dir(site.near), site.steps)


def _compare(undisturbed: Trained, disturbed: Trained, report: Report) -> None:
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
