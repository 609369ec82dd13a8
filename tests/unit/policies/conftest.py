from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loopback_endpoint import LoopbackEndpoint


@pytest.fixture
def endpoint() -> Iterator[LoopbackEndpoint]:
    with LoopbackEndpoint() as endpoint:
        yield endpoint
