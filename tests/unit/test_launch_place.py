"""A run directory that is removed, or moved away, while the ranks train."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from llmx.launch.supervision.console import Console, RunLog
from llmx.launch.supervision.place import REMOVED, RunPlace
from llmx.launch.supervision.signals import ShutdownRequest
from llmx.run.rundir import RunDir
from llmx.train.status import RankStatus
from tests.rundirs import experiment, write_run


class Site:
    def __init__(self, root: Path) -> None:
        self.run = write_run(experiment(root, ranks=1))
        self.run.ranks.mkdir()
        self.run.logs.mkdir()
        self.shutdown, self.warnings = ShutdownRequest(), list[str]()
        console = Console(io.StringIO(), total_steps=6)
        log = RunLog(self.run.supervisor_log, console, self.warnings)
        self.place = RunPlace(self.run, log, self.shutdown)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "runs" / "run")


def test_nothing_is_said_of_a_directory_that_stays(site: Site) -> None:
    site.place.check()
    assert (site.warnings, site.shutdown.count) == ([], 0)


@pytest.mark.parametrize("what", ["all", "files", "moved"])
def test_a_removed_one_is_made_again_and_the_ranks_save(site: Site, what: str) -> None:
    config = site.run.config.read_bytes()
    if what == "moved":
        site.run.root.rename(site.run.root.with_name("elsewhere"))
    elif what == "all":
        shutil.rmtree(site.run.root)
    else:
        for path in list(site.run.root.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    site.place.check()
    site.place.check()
    (warning,) = site.warnings
    assert "removed" in warning
    assert (site.shutdown.count, site.shutdown.source) == (1, REMOVED)
    assert site.run.config.read_bytes() == config
    assert site.run.ranks.is_dir()


def test_the_heartbeat_of_a_rank_does_not_make_it_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    status = RankStatus(run, rank=0)
    run.root.rename(tmp_path / "moved")
    status.enter("training")
    assert not run.root.exists()
