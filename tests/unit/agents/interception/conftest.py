from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.wire_server import WireServer


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: WireServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="key-1", max_retries=0) as client:
        yield client
