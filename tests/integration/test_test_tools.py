"""The tools of the tests: commands that are drawn at random (more by ``python -m tests.fuzz``, with
``--after`` on damaged run directories), recorded behaviour, planned faults, forked ranks."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.behaviour.__main__ import main
from tests.behaviour.cases import CASES, Prepared, training_words
from tests.behaviour.differences import differences
from tests.behaviour.material import write_material
from tests.behaviour.recording import Recording
from tests.chaos.kinds import KINDS, draw
from tests.cluster.host import wait_until
from tests.composing import composed
from tests.fuzz.__main__ import base_run
from tests.fuzz.after import finished_run
from tests.fuzz.cases import make_case
from tests.fuzz.check import run_case

pytestmark = pytest.mark.nightly


CHUNK = 50


@pytest.fixture(scope="module")
def planned_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_run(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("chunk", range(6))
def test_accepted_or_refused_in_one_message(chunk: int, planned_run: Path, tmp_path: Path) -> None:
    for number in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        case = make_case(1, number)
        outcome = run_case(case, tmp_path / "case", base=planned_run)
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


def test_the_first_step_that_differs_is_named() -> None:
    then = {"train.step": [1, 2, 4], "train.loss": [3.0, 2.0, 1.0], "weights_hash": "a"}
    now = {"train.step": [1, 2, 4], "train.loss": [3.0, 2.0, 1.0000000000000002]}
    loss, weights = differences(then, now)
    assert loss == (
        "train.loss differs first at step 4: 1.0 recorded, 1.0000000000000002 now; "
        "at most 2.2e-16 relative"
    )
    assert weights == 'weights_hash differs: "a" recorded, nothing now'
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
    assert main(["compare", *words]) == 1
    said = capsys.readouterr().out
    assert 'train.samples differs first at entry 4: "00000000" recorded' in said
    assert "1 of 2 cases differ." in said
    assert "Recorded elsewhere: equality to the last bit is not promised here." in said
    assert "torch: 1.0 recorded" in said

    # A part of this code beside a part of other code would be compared as one.
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


TESTS = """
import subprocess, sys
from tests.forked_ranks import Server

server = Server()
command = [str(server.deepspeed), "--num_gpus", "2", "--master_port", "1", *sys.argv[1:]]
subprocess.run(command, check=True)
"""
SPINNING_RANK = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    pass
"""


@pytest.mark.deepspeed
def test_a_spinning_rank_ends_when_its_tests_are_killed(tmp_path: Path) -> None:
    (tmp_path / "spin.py").write_text(SPINNING_RANK)
    (tmp_path / "pids").mkdir()
    command = [sys.executable, "-c", TESTS, str(tmp_path / "spin.py"), str(tmp_path / "pids")]
    root = Path(__file__).parents[2]

    def pids() -> list[int]:
        texts = [path.read_text() for path in (tmp_path / "pids").iterdir()]
        return [int(text) for text in texts if text]

    with subprocess.Popen(command, cwd=root) as tests:
        try:
            wait_until(lambda: len(pids()) == 2, timeout_s=300, what="two ranks")
        finally:
            tests.kill()
    wait_until(lambda: not any(map(runs, pids())), timeout_s=300, what="their end")


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
