"""Hydra's own conformance suite for launchers, and our launcher in a real multirun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)
from hydra.version import VersionBase
from hydra_plugins.llmx_deepspeed.launcher import DeepSpeedLauncher

from llmx.run.rundir import read_json
from llmx.run.sweepdir import Sweep, load
from tests.cluster.host import wait_until
from tests.command_runs import llmx

# The suite composes without a version_base, of which Hydra warns.
pytestmark = pytest.mark.filterwarnings("ignore:Future Hydra versions")


@pytest.fixture(autouse=True)
def _no_version_base() -> None:
    """Nor one that an earlier test of this process has left: by it jobs would stay where they are,
    and the suite looks for their logs in its own directory."""
    Singleton._instances.pop(VersionBase, None)


def test_discovery() -> None:
    names = [plugin.__name__ for plugin in Plugins.instance().discover(Launcher)]
    assert "DeepSpeedLauncher" in names
    assert DeepSpeedLauncher.__module__ == "hydra_plugins.llmx_deepspeed.launcher"


@pytest.mark.parametrize(("launcher_name", "overrides"), [("deepspeed", [])])
class TestConformance(LauncherTestSuite):
    """What Hydra asks of every launcher."""


@pytest.mark.parametrize(
    ("launcher_name", "overrides"), [("deepspeed", ["hydra.sweeper.max_batch_size=2"])]
)
class TestConformanceBatched(BatchedSweeperTestSuite):
    """The same, with a sweeper that hands over its jobs in parts."""


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=deepspeed"])]
)
class TestConformanceIntegration(IntegrationTestSuite):
    """The same, as processes of their own."""


SMALL = """
    hardware=cpu2 model.config.num_hidden_layers=1 model.config.hidden_size=64 data.max_rows=64
    sweep.trial_steps=3 task.eval_generate=0 task.log_every_steps=1
""".split()
GRID = ["-m", "zero=stage1,stage2", "optim.lr=1e-3,-1", *SMALL, "sweep.slots_per_trial=1"]


def training(root: Path, *indices: int) -> Sweep | None:
    """The journal of the sweep below ``root`` once all those trials write metrics."""
    for path in root.glob("outputs/sweeps/*/sweep.json"):
        journal = load(path.parent)
        if all((journal.trials[i].run_dir / "metrics.jsonl").is_file() for i in indices):
            return journal
    return None


def losses(run: Path) -> list[tuple[float, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"]


@pytest.mark.nightly
@pytest.mark.deepspeed
def test_trials_beside_each_other_train_what_each_trains_alone(tmp_path: Path) -> None:
    """Two at a time, and two that are refused; the sweep is killed while both train, and goes on.
    What they trained, each trains alone, bit for bit."""
    words, quiet = [sys.executable, "-m", "llmx", *GRID], subprocess.DEVNULL
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=quiet, stderr=quiet)
    try:
        journal = wait_until(lambda: training(tmp_path, 0, 2), timeout_s=240, what="trials 0, 2")
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert {entry.slots for entry in journal.trials} == {"localhost:0", "", "localhost:1"}
    one, other = (journal.trials[0], journal.trials[2])
    assert one.started is not None
    assert other.started is not None
    # On a slow machine the first may have ended before the other one's first step.
    assert one.started < other.started < (one.ended or time.time()), "at the same time"

    done = llmx(tmp_path, *GRID)
    assert done.returncode == 2, done.stdout
    assert f"Continuing the sweep of {journal.directory}: " in done.stdout
    again = load(journal.directory)
    assert again.complete
    assert [entry.outcome for entry in again.trials] == ["ok", "refused", "ok", "refused"]
    one, other = (again.trials[0], again.trials[2])
    runs = [again.directory / entry.run_dir for entry in (one, other)]
    ports = {*re.findall(r"MASTER_PORT=(\d+)", "".join((r / "ds_env").read_text() for r in runs))}
    assert len(ports) == 2
    for run in runs:
        assert not (run / "model").exists()
        assert not list(run.glob("checkpoints/*"))
        # It was killed in the first attempt, perhaps after its last step.
        aside = run.with_name(f"{run.name}.attempt-1")
        assert aside.is_dir() or read_json(run / "result.json")["outcome"] == "ok"
    table = done.stdout[done.stdout.rindex("Sweep: ") :]
    assert "2 of 4 trials succeeded; 2 refused" in table
    assert "[1, 3] refused: optim.lr=-1" in table
    assert (
        "| 0 | zero=stage1 optim.lr=0.001 | ok | 3 |" in (again.directory / "sweep.md").read_text()
    )
    assert (again.directory / "sweep.html").is_file()
    best = (again.directory / "best.yaml").read_text()
    assert "best of 2 by tokens_per_s" in best

    alone = llmx(tmp_path, "reproduce", str(runs[1]))
    assert alone.returncode == 0, alone.stdout
    same = "bitwise identical: 3 logged lines up to step 3, and the hash of the weights at step 3."
    assert same in " ".join(alone.stdout.split())
    assert losses(runs[0]) == losses(runs[1]), "of one rank, ZeRO changes nothing"
