"""Fixtures of the cluster tests: all of them skip, with the reason, where no cluster can be.

``make_cluster(hosts=2, private_paths=[...])`` makes as many as a test wants; ``cluster`` is a
healthy pair for a whole module, for tests that leave it as they found it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.netns import Cluster, Unsupported
from tests.cluster.requirements import missing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("cluster")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A fault that this kernel cannot make skips the test that asks for it."""
    try:
        return (yield)
    except Unsupported as reason:
        pytest.skip(str(reason))


@pytest.fixture(autouse=True, scope="session")
def _can_make_clusters() -> None:
    if reason := missing():
        pytest.skip(f"no test cluster: {reason}")


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    """Makes clusters (the arguments of Cluster), and closes them after the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Cluster(**options))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two healthy hosts that share this machine's disks."""
    with Cluster(hosts=2) as pair:
        yield pair


@pytest.fixture(scope="session")
def torch_extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where DeepSpeed's extension for gloo lies, built: half a minute, but once and not in a test.

    Ranks started through ssh need the folder in ``TORCH_EXTENSIONS_DIR``. It is PyTorch's own: a
    run on this machine may have built the extension already.
    """
    version = f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    default = Path.home() / ".cache" / "torch_extensions" / version
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    accelerator = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder)}
    # The ninja beside this Python: another version cannot read its log, and builds again.
    ninja = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(
        [sys.executable, HERE / "allreduce.py", tmp_path_factory.mktemp("extensions")],
        env={**os.environ, **alone, **rendezvous, **accelerator, **ninja},
        check=True,
        timeout=500,
    )
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def need() -> Callable[..., None]:
    """``need("pdsh")`` skips the test where a transport's programs are missing."""

    def check(*transports: str) -> None:
        if reason := missing(*transports):
            pytest.skip(reason)

    return check
