"""The set-ups that are refused: each before a rank starts, with the fix, in time.
``python -m tests.cluster.setups`` has those that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.setups import SETUPS, Setup, try_setup

# Not in CI: those that train, need a run, wait for a time-out, or are refused by the config alone;
# and those of test_launch_failures and test_launch_stop.
ELSEWHERE = ("busy", "tunnel", "before ssh", "MPICH", "one address", "localhost beside")
ELSEWHERE += ("a firewall", "MTU 9000", "allocation that has ended")
REFUSED = [
    setup for setup in SETUPS if setup.refused and not any(w in setup.name for w in ELSEWHERE)
]


@pytest.mark.parametrize("setup", REFUSED, ids=lambda setup: setup.name)
def test_it_is_refused(setup: Setup, tmp_path: Path) -> None:
    assert try_setup(setup, tmp_path).problem == ""
