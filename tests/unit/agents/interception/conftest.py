from collections.abc import Iterator

import pytest

from tests.wire_server import WireServer


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server
