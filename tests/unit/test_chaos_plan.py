"""What a chaos campaign plans and reports; the campaign itself is ``pytest -m chaos``."""

from __future__ import annotations

import random
from pathlib import Path

from tests.chaos.campaign import Report, Strike
from tests.chaos.kinds import KINDS, draw, pair
from tests.chaos.record import BEGIN, END, table, write_into_docs


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


def test_faults_come_in_pairs() -> None:
    for seed in range(40):
        plan = draw(30, random.Random(seed))
        volleys = pair(plan, random.Random(seed))
        assert sorted(kind.name for volley in volleys for kind in volley) == sorted(
            kind.name for kind in plan
        )
        pairs = [volley for volley in volleys if len(volley) > 1]
        assert len(pairs) >= 8
        for first, second in pairs:
            assert first.leads
            assert second.follow
            assert (first.name, second.name) != ("replaced", "damage")
    assert volleys == pair(plan, random.Random(seed)), "a seed is a plan"


def test_the_record_replaces_the_last_one(tmp_path: Path) -> None:
    report = Report(seed=7, faults=2, steps=180, equal_losses=180, versions={"torch": "2.13.0"})
    report.strikes = [
        Strike(1, "rank", step=70, restarts=1, repeated=8, took_s=12.0, survived=True),
        Strike(2, "rank", step=130, restarts=1, repeated=3, took_s=14.0, survived=True),
    ]
    assert report.passed
    assert "| SIGKILL of a rank | 2 | 2 | 8 | 14 |" in table(report)
    path = tmp_path / "reliability.md"
    path.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\nafter\n")
    write_into_docs(report, path)
    write_into_docs(report, path)
    text = path.read_text()
    assert text.count("2 of 2 faults survived") == 1
    assert "old" not in text
    assert text.endswith(f"{END}\nafter\n")
    report.problems.append("step 9: loss")
    assert not report.passed


def test_the_results_have_a_place_for_it() -> None:
    text = (Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "chaos.md").read_text()
    assert text.index(BEGIN) < text.index(END)
