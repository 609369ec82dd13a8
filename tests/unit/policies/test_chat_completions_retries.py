"""Retries, waits and immediate errors against a real HTTP server that misbehaves."""

from __future__ import annotations

import random
import time

import pytest

from ares_exp.backoff import retry_after_sec
from ares_exp.errors import (
    EndpointError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RateLimitError,
    ServerError,
    UnreachableError,
)
from ares_exp.llms.request import LLMRequest
from ares_exp.policies.endpoint_policy import Backoff
from ares_exp.policies.policy import Check, EpisodeSpec
from tests.closed_port import closed_port
from tests.loopback_endpoint import Behaviour, LoopbackEndpoint, drop, endless, error, raw, respond, slow
from tests.unit.policies.conftest import Make

HI = LLMRequest([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "behaviour",
    [
        error(408),
        error(409),
        error(429),
        error(500),
        error(503),
        raw(b"<html>Bad gateway</html>", status=502, content_type="text/html"),
        drop(),
        drop(after=b'{"choices": ['),
    ],
    ids=["408", "409", "429", "500", "503", "502-html", "dropped", "dropped-midway"],
)
async def test_tried_again(endpoint: LoopbackEndpoint, make: Make, behaviour: Behaviour) -> None:
    endpoint.then(behaviour, behaviour)
    assert (await make()(HI)).text == "hello"
    assert len(endpoint.requests) == 3
    assert endpoint.requests[0].body == endpoint.requests[2].body


async def test_a_slow_response_times_out_and_is_retried(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(slow(30), endless(b" "))
    started = time.perf_counter()
    response = await make(timeout_sec=0.8)(HI)
    assert response.text == "hello"
    assert len(endpoint.requests) == 3
    assert 1.6 < time.perf_counter() - started < 25
    assert response.latency_sec is not None
    assert response.latency_sec > 1.6


async def test_retries_end(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = error(503, "model is loading")
    with pytest.raises(
        ServerError, match=r"answered 503: model is loading\. Gave up after 3 tries \(policy\.max_retries=2\)"
    ) as raised:
        await make(max_retries=2)(HI)
    assert raised.value.status == 503
    assert len(endpoint.requests) == 3


async def test_a_timeout_names_its_limit(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = slow(30)
    with pytest.raises(EndpointTimeoutError, match=r"gave no response within 0\.05 s") as raised:
        await make(timeout_sec=0.05, max_retries=0)(HI)
    assert raised.value.status is None


async def test_a_long_error_is_shortened(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = error(400, "x" * 100_000)
    with pytest.raises(EndpointError) as raised:
        await make()(HI)
    assert len(str(raised.value)) < 700


async def test_retry_after_beyond_the_bound_is_an_error(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = error(429, headers={"Retry-After": "3600"})
    with pytest.raises(RateLimitError, match=r"asks to wait 3600 s, more than policy\.max_retry_wait_sec=60"):
        await make()(HI)
    assert len(endpoint.requests) == 1


async def test_a_refused_connection(endpoint: LoopbackEndpoint, make: Make) -> None:
    with closed_port() as port:
        url = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(EndpointUnreachableError, match=r"failed: .*Gave up after 2 tries") as raised:
            await make(base_url=url, max_retries=1)(HI)
    assert url in str(raised.value)
    assert "refused" in str(raised.value) or "Connect call failed" in str(raised.value)


async def test_outage_is_not_a_failed_try(make: Make) -> None:
    outages = [True, True, False]

    async def until_reachable(error: EndpointError, check: Check) -> bool:
        with pytest.raises(UnreachableError, match="Connect call failed"):
            await check()
        return outages.pop(0)

    with closed_port() as port:
        policy = make(base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
        client = policy.for_episode(EpisodeSpec("t", until_reachable=until_reachable))
        with pytest.raises(EndpointUnreachableError, match="Gave up after 1 try"):
            await client(HI)
    assert outages == []


@pytest.mark.parametrize("behaviour", [error(401), error(503), drop()], ids=["401", "503", "dropped"])
async def test_an_error_after_connecting_is_not_an_outage(
    endpoint: LoopbackEndpoint, make: Make, behaviour: Behaviour
) -> None:
    endpoint.then(behaviour)
    asked: list[object] = []

    async def until_reachable(error: EndpointError, check: Check) -> bool:
        asked.append(error)
        return True

    with pytest.raises(EndpointError):
        await make(max_retries=0).for_episode(EpisodeSpec("t", until_reachable=until_reachable))(HI)
    assert asked == []


async def test_a_failed_request_does_not_affect_later_requests(endpoint: LoopbackEndpoint, make: Make) -> None:
    policy = make()
    endpoint.then(error(400))
    with pytest.raises(EndpointError):
        await policy(HI)
    endpoint.then(respond("fine"))
    assert (await policy(HI)).text == "fine"


RETRYABLE = EndpointError("busy", status=503, retryable=True)


def test_backoff_doubles_up_to_its_bound() -> None:
    backoff = Backoff(max_retries=10_000, base_sec=1.0, max_wait_sec=5.0, rng=random.Random(0))
    for tries, longest in [(1, 1), (2, 2), (3, 4), (4, 5), (9_999, 5)]:
        waits = {backoff.wait_sec(tries, RETRYABLE) for _ in range(50)}
        assert longest / 2 <= min(waits) < max(waits) <= longest
        assert len(waits) > 40, "there is no jitter"


def test_backoff_waits_at_least_retry_after() -> None:
    backoff = Backoff(max_retries=1, base_sec=1.0, max_wait_sec=5.0)
    asked = EndpointError("busy", retryable=True, retry_after_sec=3.0)
    assert all(3.0 <= backoff.wait_sec(1, asked) <= 3.5 for _ in range(50))
    at_bound = EndpointError("busy", retryable=True, retry_after_sec=5.0)
    assert backoff.wait_sec(1, at_bound) == 5.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7.0),
        (" 1.5 ", 1.5),
        ("-3", 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("1e999", float("inf")),
        ("nan", None),
        ("soon", None),
        ("", None),
    ],
)
def test_retry_after_header(text: str, seconds: float | None) -> None:
    assert retry_after_sec({"retry-after": text}, now=10.0) == seconds


def test_no_retry_after_header() -> None:
    assert retry_after_sec({}) is None
