"""Faults that strike while the run recovers from another one.

Each waits for a random phase of the recovery first: at once, when the hosts are prepared for the
next attempt, or when its ranks start.
"""

from __future__ import annotations

import random

from tests.chaos import faults
from tests.chaos.site import Site
from tests.chaos.training import GaveUp


def rank_killed(site: Site, chance: random.Random) -> str:
    """A rank is killed while it loads."""
    until_ranks_start(site)
    return f"{faults.rank_killed(site, chance)}, as the ranks started"


def supervisor_killed(site: Site, chance: random.Random) -> str:
    """The supervisor dies while it recovers; ``resume``."""
    phase = _until_phase(site, chance)
    return f"{faults.supervisor_killed(site, chance)}, {phase}"


def supervisor_asked(site: Site, chance: random.Random) -> str:
    """SIGTERM while it recovers. What it says then depends on how far it was; ``resume``."""
    phase = _until_phase(site, chance)
    outcome = faults.ask_supervisor(site)
    if outcome == "ok":
        raise GaveUp(f"SIGTERM during a recovery ended as ok\n{site.story()}")
    site.resume()
    return f"node-a, {phase}"


def near_host_killed(site: Site, chance: random.Random) -> str:
    """The host of the supervisor loses its power while it recovers; ``resume``."""
    phase = _until_phase(site, chance)
    return f"{faults.near_host_killed(site, chance)}, {phase}"


def checkpoint_damaged(site: Site, chance: random.Random) -> str:
    """Before the ranks read it."""
    return faults.damage_newest(site, chance)


def _until_phase(site: Site, chance: random.Random) -> str:
    """Wait for a random phase of the recovery; in words."""
    phase = chance.choice(("at once", "hosts", "ranks"))
    if phase == "at once":
        return "at once"
    if phase == "hosts":
        site.until(
            lambda: site.supervisor().get("state") in ("preparing", "running"),
            what="the next attempt",
        )
        return "as the next attempt was prepared"
    until_ranks_start(site)
    return "as the ranks started"


def until_ranks_start(site: Site) -> None:
    """Until the ranks of the next attempt are there."""
    site.until(
        lambda: (
            site.supervisor().get("state") == "running"
            and all(site.ranks(host) for host in site.trainers)
        ),
        what="the ranks of the next attempt",
    )
