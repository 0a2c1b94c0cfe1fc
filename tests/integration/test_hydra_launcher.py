"""Hydra's own conformance suite for launchers, and our launcher in a real multirun."""

from __future__ import annotations

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
