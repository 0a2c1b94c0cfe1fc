"""The tool that records results bit for bit: ``python -m tests.behaviour``.

``python -m pytest tests/unit/test_behaviour.py``. A training is recorded and compared in
``tests/integration/test_behaviour.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.behaviour.__main__ import main
from tests.behaviour.cases import CASES, Prepared, chosen, training_words
from tests.behaviour.differences import differences
from tests.behaviour.material import write_material
from tests.behaviour.recording import FILE, Recording
from tests.behaviour.runs import model_facts
from tests.behaviour.samples import digest
from tests.composing import composed


def test_a_digest_is_of_values_not_of_their_storage() -> None:
    stored = [(np.array([5, 6, 7], np.uint32), np.array([False, True, True]))]
    floats = [([5, 6, 7], [0.0, 1.0, 1.0])]
    assert digest(stored) == digest(floats)


@pytest.mark.parametrize(
    "other",
    [
        [([5, 6, 8], [0, 1, 1])],
        [([5, 6, 7], [0, 1, 0.5])],
        [([5, 6], [0, 1]), ([7], [1])],
        [([5, 6, 7], [0, 1, 1]), ([], [])],
    ],
)
def test_another_token_weight_or_border_is_another_digest(other: list[tuple[list, list]]) -> None:
    assert digest(other) != digest([([5, 6, 7], [0, 1, 1])])


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


@pytest.mark.parametrize(
    ("then", "now", "where"),
    [
        ([1, 2], [1, 2, 3], "its length"),
        ([1], [1.0], "entry 1"),
        (["a", None], ["a", "b"], "entry 2"),
        ({"a": 1}, {"a": 1, "b": 2}, '"b"'),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "the order of keys"),
    ],
)
def test_what_else_differs(then: object, now: object, where: str) -> None:
    (found,) = differences({"fact": then}, {"fact": now})
    assert found.where == where


def test_weights_are_the_same_in_one_file_and_in_several(tmp_path: Path) -> None:
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"transformers_version": "1", "a": 1}')
    save_file({"x": first, "y": second}, tmp_path / "one" / "model.safetensors")
    save_file({"y": second}, tmp_path / "two" / "model-1.safetensors")
    save_file({"x": first}, tmp_path / "two" / "model-2.safetensors")
    save_file({"x": first.T.copy(), "y": second}, tmp_path / "other" / "model.safetensors")
    one, two, other = (model_facts(tmp_path / name) for name in ("one", "two", "other"))
    assert one["model.weights"] == two["model.weights"]
    assert one["model.files"] != two["model.files"]
    assert one["model.weights"] != other["model.weights"]
    assert one["model.config"] == {"a": 1}


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


def test_a_wrong_call_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--only", "nothing-like-it"]) == 2
    assert "no case has this in its name" in capsys.readouterr().err
    assert main(["compare", "--file", str(tmp_path / "none.json")]) == 2
    assert "make behaviour-record" in capsys.readouterr().err
    file = str(tmp_path / "none.json")
    assert main(["record", "--file", file, "--keep", str(tmp_path)]) == 2
    assert "Name a new directory" in capsys.readouterr().err


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
