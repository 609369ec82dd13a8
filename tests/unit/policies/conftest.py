from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from ares_exp.policies.chat_completions import OpenAIPolicy
from tests.loopback_endpoint import LoopbackEndpoint

KEY = "sk-loopback-0123456789"
Make = Callable[..., OpenAIPolicy]


@pytest.fixture
def endpoint() -> Iterator[LoopbackEndpoint]:
    with LoopbackEndpoint() as endpoint:
        yield endpoint


@pytest.fixture
async def make(endpoint: LoopbackEndpoint, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes policies for the endpoint, with a key and tiny waits; closes them all."""
    monkeypatch.setenv("LOOPBACK_KEY", KEY)
    async with AsyncExitStack() as stack:

        def make(**more: Any) -> OpenAIPolicy:
            settings = {"model": "m", "base_url": endpoint.url, "api_key_env": "LOOPBACK_KEY", "retry_base_sec": 0.01}
            policy = OpenAIPolicy(**{**settings, **more})
            stack.push_async_callback(policy.close)
            return policy

        yield make
