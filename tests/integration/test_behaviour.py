"""The tool that records results bit for bit, ``python -m tests.behaviour``; and what it records of
a training is deterministic on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.behaviour.__main__ import main
from tests.behaviour.cases import CASES, Prepared, chosen, training_words
from tests.behaviour.differences import differences
from tests.behaviour.material import write_material
from tests.behaviour.recording import FILE, Recording
from tests.composing import composed

pytestmark = pytest.mark.nightly


def test_the_first_step_that_differs_is_named() -> None:
    then = {"train.step": [1, 2, 4], "train.loss": [3.0, 2.0, 1.0], "weights_hash": "a"}
    now = {"train.step": [1, 2, 4], "train.loss": [3.0, 2.0, 1.0000000000000002]}
    loss, weights = differences(then, now)
    assert str(loss) == (
        "train.loss differs first at step 4: 1.0 recorded, 1.0000000000000002 now; "
        "at most 2.2e-16 relative"
    )
    assert str(weights) == 'weights_hash differs: "a" recorded, nothing now'
    assert differences(then, dict(then)) == []


def test_record_compare_and_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "behaviour.json"
    words = ["--only", "data/pairs", "data/mixture", "--file", str(file)]
    assert main(["record", *words]) == 0
    assert main(["compare", *words]) == 0
    assert "All 2 cases are equal: 9 facts." in capsys.readouterr().out

    recorded = Recording.load(file)
    recorded.cases["data/pairs"]["train.samples"][3] = "00000000"
    recorded.environment["torch"] = "1.0"
    recorded.save(file)
    assert main(["compare", *words, "--keep", str(tmp_path / "kept")]) == 1
    said = capsys.readouterr().out
    assert 'train.samples differs first at entry 4: "00000000" recorded' in said
    assert "1 of 2 cases differ." in said
    assert "Recorded elsewhere: equality to the last bit is not promised here." in said
    assert "torch: 1.0 recorded" in said

    # A part from here beside a part from elsewhere would be compared as one.
    assert main(["record", *words]) == 2
    assert "Record everything, without --only." in capsys.readouterr().err


def test_every_training_composes(tmp_path: Path) -> None:
    """So that a renamed option is noticed without running all of them."""
    write_material(tmp_path)
    for name, case in CASES.items():
        if not isinstance(case, Prepared) and case.command == "train" and case.of is None:
            words = [word.replace("{material}", str(tmp_path)) for word in training_words(case)]
            made = composed(words)
            assert made.plan.world_size == 2, name
            assert made.plan.precision == ("bf16" if "bf16" in name else "fp32"), name


def test_the_recording_has_every_case_and_a_fact_a_line() -> None:
    recorded = Recording.load(FILE)
    assert list(recorded.cases) == list(chosen([]))
    facts = sum(map(len, recorded.cases.values()))
    assert facts < len(FILE.read_text(encoding="utf-8").splitlines())
    assert json.loads(FILE.read_text(encoding="utf-8"))["commit"] == recorded.commit


@pytest.mark.deepspeed
def test_a_training_is_recorded_and_equal_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "behaviour.json"
    words = ["--only", "run/sft-stage1", "--file", str(file)]
    assert main(["record", *words]) == 0, capsys.readouterr().out
    assert main(["compare", *words]) == 0, capsys.readouterr().out
    facts = Recording.load(file).cases["run/sft-stage1"]
    assert facts["train.step"] == list(range(1, 9))
    assert len(set(facts["batches"])) == 8
