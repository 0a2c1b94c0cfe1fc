"""Hydra's own conformance suite for launchers, and our launcher in a real multirun."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite
from hydra_plugins.llmx_deepspeed.launcher import DeepSpeedLauncher

from llmx.run.rundir import read_json
from llmx.sweep import journal as journals

# The suite composes without a version_base, of which Hydra warns.
pytestmark = pytest.mark.filterwarnings("ignore:Future Hydra versions")


def test_discovery() -> None:
    names = [plugin.__name__ for plugin in Plugins.instance().discover(Launcher)]
    assert "DeepSpeedLauncher" in names


@pytest.mark.parametrize(("launcher_name", "overrides"), [("deepspeed", [])])
class TestConformance(LauncherTestSuite):
    """What Hydra asks of every launcher."""


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", "hydra/launcher=deepspeed"])],
)
class TestConformanceIntegration(IntegrationTestSuite):
    """The same, as processes of their own."""


def test_plugin_is_our_class() -> None:
    assert DeepSpeedLauncher.__module__ == "hydra_plugins.llmx_deepspeed.launcher"


SMALL = """
    hardware=cpu2 model.config.num_hidden_layers=1 model.config.hidden_size=64 data.max_rows=64
    sweep.trial_steps=3 task.eval_generate=0
""".split()
GRID = [sys.executable, "-m", "llmx", "-m", "optim.lr=1e-3,-1,2e-3,1e-3", *SMALL]


def running_trial(root: Path, index: int, *, limit_s: float) -> journals.Journal:
    """The journal of the sweep below ``root`` when that trial writes metrics."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for path in root.glob("outputs/sweeps/*/sweep.json"):
            journal = journals.load(path.parent)
            entry = journal.trials[index] if journal else None
            if not journal or not entry or entry.state != journals.RUNNING:
                continue
            if (path.parent / entry.run_dir / "metrics.jsonl").is_file():
                return journal
        time.sleep(0.05)
    raise AssertionError(f"trial {index} did not run within {limit_s:.0f} s")


@pytest.mark.deepspeed
def test_a_killed_sweep_goes_on_where_it_was_and_ends_with_its_table(tmp_path: Path) -> None:
    """Trials that train, one that is refused, and one that is the same as another."""
    first = subprocess.Popen(
        GRID, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        journal = running_trial(tmp_path, 2, limit_s=240)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert [entry.outcome for entry in journal.trials] == ["ok", "refused", "", ""]
    kept = read_json(journal.directory / journal.trials[0].run_dir / "result.json")

    done = subprocess.run(
        GRID, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"Continuing the sweep of {journal.directory}: 1 of 4 trials done" in done.stdout
    again = journals.load(journal.directory)
    assert again is not None
    assert again.complete
    assert [entry.outcome for entry in again.trials] == ["ok", "refused", "ok", "same"]
    directory = again.directory / again.trials[0].run_dir
    assert read_json(directory / "result.json") == kept, "what ended well is not run again"
    assert not (directory / "model").exists()
    assert not list(directory.glob("checkpoints/*"))
    assert [path.name for path in again.directory.glob("*.attempt-1")] == [
        f"{again.trials[2].run_dir}.attempt-1"
    ]
    table = done.stdout[done.stdout.rindex("Sweep: ") :]
    line = next(line for line in table.splitlines() if "optim.lr=0.002" in line)
    assert line.split()[2:4] == ["ok", "3"]
    assert "[1] refused: optim.lr=-1" in table
    markdown = (again.directory / "sweep.md").read_text()
    assert "| 0 | optim.lr=0.001 | ok | 3 |" in markdown
    best = (again.directory / "experiment" / "best.yaml").read_text()
    assert "best of 2 by tokens_per_s" in best
