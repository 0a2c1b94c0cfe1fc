"""Fixtures of the cluster tests: all of them skip, with the reason, where no cluster can be.

``make_cluster(hosts=2, private_paths=[...])`` makes as many as a test wants; ``cluster`` is a
healthy pair for a whole module, for tests that leave it as they found it.
"""

from __future__ import annotations

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


@pytest.fixture
def need() -> Callable[..., None]:
    """``need("pdsh")`` skips the test where a transport's programs are missing."""

    def check(*transports: str) -> None:
        if reason := missing(*transports):
            pytest.skip(reason)

    return check
