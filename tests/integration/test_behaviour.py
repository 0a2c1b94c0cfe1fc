"""A training that is recorded is equal when it is compared, on this machine: the tool works, and
what it records is deterministic.

``python -m pytest -m deepspeed tests/integration/test_behaviour.py``
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behaviour.__main__ import main
from tests.behaviour.recording import Recording

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]


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
