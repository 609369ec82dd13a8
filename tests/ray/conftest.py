"""One cluster for all tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.ray.cluster import SmallCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if "tests/ray/" in item.path.as_posix():
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.once)


@pytest.fixture(scope="session")
def cluster() -> Iterator[SmallCluster]:
    """A head and three nodes, a test leaves as many as it found."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not to be had here: pip install 'ares-exp[ray]'")
    made = SmallCluster(3)
    yield made
    made.close()
