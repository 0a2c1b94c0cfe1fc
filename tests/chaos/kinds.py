"""Which faults there are, how often each comes, and which of them come together.

A *volley* is one fault, or two of which the second strikes while the run recovers from the first.
``python -m pytest -m nightly tests/integration/test_test_tools.py`` tries it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos import faults
from tests.chaos.site import Site

Strike = Callable[[Site, random.Random], str]
"""Does it, and returns what exactly was done, for the report."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    name: str
    words: str
    """For the table of the report."""
    weight: int
    strike: Strike
    most_lost: int
    """Save intervals of work that may have to be repeated, at most, the one in flight included."""
    restarts: bool = True
    """Whether the ranks must be started again; else they may, or go on as if nothing had been."""
    steps: int = 0
    """How many steps a fast machine may train before it strikes or is noticed, about."""
    leads: bool = False
    """Whether the supervisor lives through it and starts the ranks again: then another fault may
    strike meanwhile."""
    follow: Strike | None = None
    """How it strikes while the run recovers from another; None where it does not."""


KINDS = (
    Kind("rank", "SIGKILL of a rank", 5, faults.rank_killed, 2,
         leads=True, follow=faults.rank_killed_meanwhile),
    Kind("agent", "SIGKILL of the agent of a host", 3, faults.agent_killed, 1,
         restarts=False, steps=60),
    Kind("supervisor", "SIGKILL of the supervisor, `resume`", 3, faults.supervisor_killed, 2,
         follow=faults.supervisor_killed_meanwhile),
    Kind("preempted", "SIGTERM to the supervisor, `resume`", 2, faults.supervisor_asked, 1,
         follow=faults.supervisor_asked_meanwhile),
    Kind("suspended", "supervisor suspended", 1, faults.supervisor_suspended, 2,
         steps=300, leads=True),
    Kind("cut", "control connection cut: SIGKILL of sshd and its sessions", 3,
         faults.control_cut, 1, restarts=False, steps=60),
    Kind("host", "power loss of a host", 2, faults.far_host_killed, 2, leads=True),
    Kind("replaced", "a host lost with its disk", 1, faults.far_host_replaced, 2,
         steps=100, leads=True),
    Kind("control", "power loss of the supervisor's host, `resume`", 2, faults.near_host_killed, 2,
         follow=faults.near_host_killed_meanwhile),
    Kind("link", "network link cut", 2, faults.link_cut, 2, leads=True),
    Kind("drop", "network drop-out of 0.2 to 1.5 s", 3, faults.link_dropped, 2, restarts=False),
    Kind("firewall", "firewall between the hosts", 1, faults.firewall_up, 2, leads=True),
    Kind("mtu", "large packets lost (wrong MTU)", 1, faults.large_packets_lost, 2, leads=True),
    Kind("disk", "disk full", 2, faults.disk_full, 3, restarts=False),
    Kind("damage", "newest checkpoint damaged", 3, faults.checkpoint_damaged, 3,
         follow=faults.damage_newest),
)  # fmt: skip

Volley = tuple[Kind, ...]


def draw(count: int, chance: random.Random, kinds: tuple[Kind, ...] = KINDS) -> list[Kind]:
    """So many faults in random order, every kind about in proportion to its weight."""
    rounds: list[Kind] = []
    while len(rounds) < count:
        rounds += [kind for kind in kinds for _ in range(kind.weight)]
    # Each kind once at least, then by weight.
    rest = list(rounds)
    for kind in kinds:
        rest.remove(kind)
    chosen = [*kinds, *chance.sample(rest, max(0, count - len(kinds)))][:count]
    chance.shuffle(chosen)
    return chosen


def pair(chosen: list[Kind], chance: random.Random) -> list[Volley]:
    """The same faults, as many of them in pairs as there can be, in random order."""
    leaders = [kind for kind in chosen if kind.leads]
    followers = [kind for kind in chosen if kind.follow and not kind.leads]
    others = [kind for kind in chosen if not (kind.leads or kind.follow)]
    chance.shuffle(leaders)
    chance.shuffle(followers)
    while len(leaders) > len(followers) + 1 and any(kind.follow for kind in leaders):
        followers.append(leaders.pop(next(i for i, kind in enumerate(leaders) if kind.follow)))
    volleys: list[Volley] = [(kind,) for kind in others]
    # A host without its disk leaves one whole checkpoint: that must not be damaged, too.
    for leader in sorted(leaders, key=lambda kind: kind.name != "replaced"):
        fits = [kind for kind in followers if (leader.name, kind.name) != ("replaced", "damage")]
        if fits:
            followers.remove(fits[0])
        volleys.append((leader, *fits[:1]))
    volleys += [(kind,) for kind in followers]
    chance.shuffle(volleys)
    return volleys
