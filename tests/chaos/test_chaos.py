"""A training that is hit by faults must end as if by none: ``pytest -m chaos``.

``make chaos N=200 SEED=7`` for more of them, and the table of benchmarks/results/chaos.md.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.campaign import SFT, Setup, campaign
from tests.chaos.kinds import KINDS, Kind, pair
from tests.chaos.rollouts import SYNCHRONOUS
from tests.cluster.requirements import missing

pytestmark = pytest.mark.chaos

SEED = 20_300_101
FIVE = ("rank", "supervisor", "host", "link", "damage")


def survived(directory: Path, setup: Setup, kinds: list[Kind]) -> None:
    """Assert that the run ends as if undisturbed. A fault strikes while it recovers from another,
    where that can be."""
    if reason := missing("rsync"):
        pytest.skip(f"no test cluster: {reason}")
    report = campaign(directory, setup, pair(kinds, random.Random(SEED)), seed=SEED)
    assert not report.problems, report.problems[0]
    assert report.survived == len(kinds)
    assert {strike.kind for strike in report.strikes} == {kind.name for kind in kinds}
    assert report.equal_losses == report.steps
    assert len(report.weights_hash) >= 16


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FIVE, id="five"),
        pytest.param([kind.name for kind in KINDS], id="all", marks=pytest.mark.nightly),
    ],
)
def test_as_if_undisturbed(names: Sequence[str], tmp_path: Path) -> None:
    survived(tmp_path, SFT, [kind for kind in KINDS if kind.name in names])


@pytest.mark.nightly
def test_as_if_drawn_by_the_ranks(tmp_path: Path) -> None:
    """A rollout server dies."""
    survived(tmp_path, SYNCHRONOUS, [k for k in SYNCHRONOUS.kinds if k.name == "server"])
