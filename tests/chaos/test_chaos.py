"""A training that is hit by faults must end as if by none: ``pytest -m chaos``.

``make chaos N=200 SEED=7`` for more of them, and the table of benchmarks/results/chaos.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.campaign import campaign
from tests.chaos.kinds import KINDS, Kind
from tests.chaos.rollouts import KINDS as ROLLOUT_KINDS
from tests.chaos.rollouts import SYNCHRONOUS
from tests.cluster.requirements import missing

pytestmark = pytest.mark.chaos

SEED = 20_300_101
FIVE = tuple(k for k in KINDS if k.name in ("rank", "supervisor", "host", "link", "damage"))


@pytest.mark.parametrize(
    "kinds",
    [pytest.param(FIVE, id="five"), pytest.param(KINDS, id="all", marks=pytest.mark.nightly)],
)
def test_as_if_undisturbed(kinds: tuple[Kind, ...], tmp_path: Path) -> None:
    if reason := missing("rsync"):
        pytest.skip(f"no test cluster: {reason}")
    report = campaign(tmp_path, faults=len(kinds), seed=SEED, kinds=kinds)
    assert not report.problems, report.problems[0]
    assert report.survived == len(report.strikes) == len(kinds)
    assert {strike.kind for strike in report.strikes} == {kind.name for kind in kinds}
    assert report.equal_losses == report.steps
    assert len(report.weights_hash) >= 16


@pytest.mark.nightly
def test_as_if_drawn_by_the_ranks(tmp_path: Path) -> None:
    """A rollout server dies."""
    if reason := missing("rsync"):
        pytest.skip(f"no test cluster: {reason}")
    kinds = [kind for kind in ROLLOUT_KINDS if kind.name == "server"]
    report = campaign(tmp_path, SYNCHRONOUS, faults=len(kinds), seed=SEED, kinds=kinds)
    assert not report.problems, report.problems[0]
    assert report.survived == len(kinds)
    assert report.equal_losses == report.steps
