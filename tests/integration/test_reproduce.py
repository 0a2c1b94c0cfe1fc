"""A run is repeated bit for bit, and what keeps it from that is named: through the command.

In a clone of the repository, so that code can be edited and the code of then checked out.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from llmx.run import snapshot
from llmx.run.metrics.equality import compare_runs
from llmx.run.rundir import RunDir, read_json, write_json
from tests.command_runs import SMALL, llmx
from tests.conftest import REPOSITORY
from tests.resumed_runs import events

pytestmark = pytest.mark.deepspeed

RUN = (
    *SMALL, "hardware=cpu2", "precision=fp32",
    "task.steps=12", "task.log_every_steps=2", "checkpoint.every_steps=4",
    "checkpoint.keep.last=9",
)  # fmt: skip


class Clone:
    """A clone of this repository, and ``python -m llmx`` with its code."""

    def __init__(self, root: Path) -> None:
        self.root, self.work = root / "clone", root
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(self.root)], check=True)

    def llmx(self, *words: str, code: int = 0) -> str:
        """All that was said by a command that ends with this code."""
        done = llmx(self.work, *words, PYTHONPATH=f"{self.root}:{self.root / 'launchers'}")
        assert done.returncode == code, done.stdout
        return done.stdout

    def factor(self, text: str) -> None:
        """What the module has that git does not know."""
        (self.root / "llmx" / "train" / "extra.py").write_text(f"FACTOR = {text}\n")

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Clone:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout: there is no other code to run")
    return Clone(tmp_path_factory.mktemp("reproduce"))


@pytest.fixture(scope="module")
def run(clone: Clone) -> RunDir:
    """12 steps, with a new file that git does not know and that the training needs; the third
    is passed over, as after a divergence. Planned first, and started by ``resume``."""
    clone.factor("1.0")
    clone.edit(
        "llmx/train/schedule.py",
        "return optim.lr * (step + 1) / warmup",
        "from llmx.train.extra import FACTOR\n\n"
        "        return FACTOR * optim.lr * (step + 1) / warmup",
    )
    made = RunDir(clone.work / "a")
    clone.llmx("plan", *RUN, f"data.cache_dir={clone.work}/cache", f"run_dir={made.root}")
    write_json(made.resume, {"step": None, "skip_steps": [3], "attempt": 1})
    said = clone.llmx("resume", str(made.root))
    assert "was planned and never started" in said
    recorded = read_json(made.provenance)
    assert "from llmx.train.extra import FACTOR" in recorded["git"]["diff"]
    assert recorded["git"]["untracked"]["llmx/train/extra.py"] == "FACTOR = 1.0\n"
    assert recorded["fingerprints"]["data"]["exact"]
    assert len(read_json(made.inputs)["data"]) == 64
    return made


@pytest.fixture(scope="module")
def other(clone: Clone, run: RunDir) -> tuple[RunDir, str, str]:
    """Reproduced with other code: what was said where it must be the same, and where not."""
    clone.factor("1.0 + 1e-6")
    refused = clone.llmx("reproduce", str(run.root), "strict=true", code=1)
    assert not list(clone.work.glob("a_reproduced*"))
    target = RunDir(clone.work / "other")
    said = clone.llmx("reproduce", str(run.root), "to_step=4", f"run_dir={target.root}")
    clone.factor("1.0")
    return target, refused, said


@pytest.fixture(scope="module")
def same(clone: Clone, run: RunDir, other: object) -> tuple[RunDir, str]:
    """Reproduced with the code of then, and what was said."""
    target = RunDir(clone.work / "same")
    said = clone.llmx(
        "reproduce", str(run.root), "to_step=8", "strict=true",
        f"run_dir={target.root}", "launch.max_restarts=0",
    )  # fmt: skip
    return target, said


def test_other_code_is_named_and_the_first_step_that_differs(
    other: tuple[RunDir, str, str],
) -> None:
    target, refused, said = other
    assert "code that trains" in refused
    assert "train/extra.py" in refused
    assert "strict=true: 1 difference above may change the numbers" in refused
    made = read_json(target.root / "reproduction.json")
    assert not made["identical"]
    assert (made["first_difference"]["step"], made["first_difference"]["name"]) == (1, "lr")
    assert made["first_difference"]["relative"] == pytest.approx(1e-6, rel=1e-3)
    assert made["weights"] == "differ"
    assert (made["last_step"], made["other_inputs"]) == (4, [])
    assert "differs first at step 1: lr" in said
    assert [row["severity"] for row in made["differences"]] == ["may change"]


def test_the_same_code_gives_the_same_bits(run: RunDir, same: tuple[RunDir, str]) -> None:
    target, said = same
    assert "nothing differs from the recorded code" in said
    assert "bitwise identical: 6 of 9 logged lines up to step 8 of 12, and the hash of" in said
    made = read_json(target.root / "reproduction.json")
    assert made["identical"]
    assert (made["last_step"], made["lines"], made["weights"]) == (8, 6, "equal")
    assert [line["step"] for line in events(target, "skipped")] == [3]
    exp = snapshot.load(target)
    assert (exp.task.stop_at_step, exp.task.steps, exp.launch.max_restarts) == (8, 12, 0)
    assert read_json(target.identity)["parent"] == snapshot.run_id(run)


def test_a_finished_run_goes_on_longer_and_from_an_earlier_step(
    clone: Clone, run: RunDir, same: tuple[RunDir, str]
) -> None:
    said = clone.llmx(
        "resume", str(run.root), "step=8", "task.steps=16", "task.log_every_steps=4",
        "zero=stage3", "tracking=csv",
    )  # fmt: skip
    assert "task.steps            12 -> 16  (trains differently from here on)" in said
    assert "zero.stage            2 -> 3  (equal within rounding)" in said
    assert "from      the checkpoint of step 8; 4 steps are trained again" in said
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == [1, 2, 4, 6, 8, 12, 16]
    assert lines[-1]["step"] == 16
    # Up to the step it resumed from, it is still the run it was.
    assert compare_runs(same[0], run).identical
