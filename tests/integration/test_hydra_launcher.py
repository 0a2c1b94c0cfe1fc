"""Hydra's own conformance suite for launchers, and our launcher in a real multirun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite
from hydra_plugins.llmx_deepspeed.launcher import DeepSpeedLauncher

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
    task.steps=2 task.log_every_steps=1 task.eval_generate=0 task.save_model=false
""".split()


@pytest.mark.deepspeed
def test_a_sweep_ends_with_its_table(tmp_path: Path) -> None:
    """A trial that trains and one that is refused: both are in it, the exit code is the error's."""
    argv = [sys.executable, "-m", "llmx", "-m", "optim.lr=1e-3,-1", *SMALL]
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stderr
    table = done.stdout[done.stdout.rindex("Sweep: 1 of 2 trials ended well") :]
    first = next(line for line in table.splitlines() if "optim.lr=0.001" in line)
    assert first.split()[2:4] == ["ok", "2"]
    assert "[1] refused: optim.lr=-1" in table
    (markdown,) = tmp_path.glob("outputs/sweeps/*/sweep.md")
    assert "| 0 | optim.lr=0.001 | ok | 2 |" in markdown.read_text()
