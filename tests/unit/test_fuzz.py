"""300 random command lines, config files and hostfiles, and 50 commands after training on damaged
run directories; more by ``python -m tests.fuzz`` and ``python -m tests.fuzz --after``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import base_run
from tests.fuzz.after import finished_run
from tests.fuzz.cases import make_case
from tests.fuzz.check import run_case

pytestmark = pytest.mark.nightly

CHUNK = 50


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_run(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("chunk", range(6))
def test_accepted_or_refused_in_one_message(chunk: int, base: Path, tmp_path: Path) -> None:
    for number in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        case = make_case(1, number)
        outcome = run_case(case, tmp_path / "case", base=base)
        # On a busy machine time is no measure; the campaign looks at it.
        faults = [fault for fault in outcome.faults if not fault.startswith("slow")]
        assert not faults, f"python -m tests.fuzz --case 1:{number}\n{case.argv}\n{faults}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("finished") / "base")


def test_damaged_runs_are_refused_without_a_traceback(finished: Path, tmp_path: Path) -> None:
    for number in range(CHUNK):
        case = make_case(1, number, after=True)
        outcome = run_case(case, tmp_path / "case", base=finished)
        assert not outcome.faults, f"--after --case 1:{number}\n{case.argv}\n{outcome.faults}"


def test_a_case_is_a_function_of_its_numbers() -> None:
    assert [make_case(3, n).argv for n in range(50)] == [make_case(3, n).argv for n in range(50)]
    assert len({tuple(make_case(3, n).argv) for n in range(50)}) > 40
