"""Fixtures that every test may use: golden files, and the folder of real data.

``LLMX_RECORD_GOLDEN=1 python -m pytest ...`` (``make golden``) records golden files anew.
"""

from __future__ import annotations

import difflib
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

from tests.chromium import Browser
from tests.forked_ranks import Server, shared

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("llmx", deadline=None, max_examples=40)
settings.load_profile("llmx")

GOLDEN = Path(__file__).parent / "golden"
REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    """Ctrl-C works in the programs that tests start, also where a shell started the tests in the
    background (`make test &`), which ignores it, and all that is started there with it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Many tests plan; those of traces (test_plan_trace) ask for them.
    os.environ["LLMX_TRACES"] = "off"
    os.environ["LLMX_LEARNED"] = "off"  # plans of tests know nothing of runs of tests


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs real data."""
    for item in items:
        if "real_data" in getattr(item, "fixturenames", ()):
            item.add_marker("real_data")


def pytest_collection_finish() -> None:
    """What was imported stays, and is not looked at again (7 % of tests/unit/test_compose.py).

    Networks of tests compute on one thread. They are tiny, and where other processes want the
    cores, two threads spend their time waiting for each other: ten tests of environments, in three
    processes at once on two cores, took 544 s with two threads and 140 s with one. Results depend
    less on the machine, too.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_terminal() -> None:
    """Tables are as wide as off a terminal, whatever the caller (or xdist) exports; before a
    fixture of a module runs a command."""
    os.environ.pop("COLUMNS", None)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What a test (or what it calls) sets ends with it: with a LOCAL_RANK that stays, libraries
    take the process of the next one for a rank."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def made_up_traces(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Plans have a memory, without a process that traces a network."""
    from tests import made_up_traces

    monkeypatch.setenv("LLMX_TRACES", "on")
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("llmx.lifecycle.knowledge.ask", made_up_traces.answers)


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare text with a file under ``tests/golden``; a difference prints the diff."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("LLMX_RECORD_GOLDEN") == "1":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing; record it: make golden"
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
            )
            pytest.fail("\n".join([*diff, "", "If this is what you mean: make golden"]))

    return check


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets; skips, saying so, where it is absent."""
    folder = os.environ.get("LLMX_REAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("LLMX_REAL_DATA does not name the folder of real data sets")
    return Path(folder)


@pytest.fixture(scope="session")
def ranks() -> Server:
    """Starts runs at little cost; one for all tests of a process of pytest."""
    return shared()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all pages of a process of pytest."""
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed as dist

    store = dist.FileStore(str(tmp_path / "group"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk on which fsync costs nothing, where there is one."""
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="llmx-faults-", dir=place) as name:
        yield Path(name)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; root only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "llmx-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)  # a store is mapped
