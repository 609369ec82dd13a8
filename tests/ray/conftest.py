"""One cluster for all tests, and the run that those on it are compared with."""

import importlib.util
from collections.abc import Iterator

import pytest

from tests.e2e.killed_run import KilledRun
from tests.ray.cluster import SmallCluster
from tests.ray.runs import made, ran


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/ray/" in item.path.as_posix():
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.once)


@pytest.fixture(scope="session")
def cluster_and_whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SmallCluster, KilledRun]]:
    """Starts the one while the other is run."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not to be had here: pip install 'ares-exp[ray]'")
    with made(tmp_path_factory.mktemp("whole")) as run, ran(run.start) as running:
        cluster = SmallCluster(1)
        try:
            assert running.result() == 0, run.said
            yield cluster, run
        finally:
            cluster.close()


@pytest.fixture
def cluster(cluster_and_whole: tuple[SmallCluster, KilledRun]) -> SmallCluster:
    """A head and one node; a test leaves one at least."""
    return cluster_and_whole[0]


@pytest.fixture
def whole(cluster_and_whole: tuple[SmallCluster, KilledRun]) -> KilledRun:
    return cluster_and_whole[1]
