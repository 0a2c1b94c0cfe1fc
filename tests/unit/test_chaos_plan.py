"""What a chaos campaign plans and reports; the campaign itself is ``pytest -m chaos``."""

from __future__ import annotations

import random

import pytest

from tests.chaos.kinds import KINDS, draw

pytestmark = pytest.mark.nightly


def test_a_seed_is_a_plan() -> None:
    plan = draw(30, random.Random(7))
    assert plan == draw(30, random.Random(7))
    assert plan != draw(30, random.Random(8))
    assert set(plan) == set(KINDS), "every kind at least once"
    many = draw(500, random.Random(7))
    assert len(many) == 500
    for kind in KINDS:
        expected = 500 * kind.weight / sum(k.weight for k in KINDS)
        assert abs(many.count(kind) - expected) < 8, kind.name
