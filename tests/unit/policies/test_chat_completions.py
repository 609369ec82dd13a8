"""The policy against a real HTTP server: its requests, responses, costs and bounds."""

import asyncio
import logging
from typing import Any

import pydantic
import pytest

from ares_exp.errors import MalformedResponseError, PreflightError, UnsendableRequestError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData
from ares_exp.policies.asked_ahead import concurrency_of
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.policies.policy import AdvancingClient, EpisodeSpec
from tests.loopback_endpoint import (
    LoopbackEndpoint,
    completion,
    endless,
    error,
    json_body,
    raw,
    respond,
    slow,
)
from tests.unit.policies.conftest import KEY, Make

HI = LLMRequest([{"role": "user", "content": "hi"}])


async def test_missing_settings_are_reported_together(make: Make) -> None:
    with pytest.raises(PreflightError, match=r"(?s)`policy\.model` is required.*\n.*environment variable NO_SUCH_KEY"):
        await make(model=None, api_key_env="NO_SUCH_KEY").preflight()
    with pytest.raises(PreflightError, match=r"call preflight\(\) first"):
        await make(model=None)(HI)


async def test_extra_body_overrides_config_and_config_the_request(endpoint: LoopbackEndpoint, make: Make) -> None:
    policy = make(temperature=0.0, stop_sequences=["END"], seed=7, extra_body={"top_k": 3, "seed": 8})
    answered = await policy(
        LLMRequest(HI.messages, temperature=1.0, top_p=0.5, max_output_tokens=9, top_k=1, stream=True)
    )
    sent = endpoint.requests[0].body
    del sent["messages"]
    assert answered.sampling == {name: value for name, value in sent.items() if name != "model"}
    assert sent == {
        "model": "m",
        "temperature": 0.0,
        "top_p": 0.5,
        "max_completion_tokens": 9,
        "stop": ["END"],
        "seed": 8,
        "top_k": 3,
    }


@pytest.mark.parametrize("send_reasoning", [False, True])
async def test_concurrency_per_episode_has_a_default_and_option(make: Make, send_reasoning: bool) -> None:
    for options, expected in (({}, 16), ({"max_concurrency_per_episode": 3}, 3)):
        policy = make(send_reasoning=send_reasoning, **options)
        assert concurrency_of(policy) == concurrency_of(policy.for_episode(EpisodeSpec("t"))) == expected


async def test_request_seed_follows_the_episode(endpoint: LoopbackEndpoint, make: Make) -> None:
    policy = make(seed="episode")
    await policy.for_episode(EpisodeSpec("t", seed=2**40 + 5))(HI)
    await policy(HI)
    assert endpoint.requests[0].body["seed"] == 5
    assert "seed" not in endpoint.requests[1].body
    await make(seed=3).for_episode(EpisodeSpec("t", seed=4))(HI)
    await make().for_episode(EpisodeSpec("t", seed=4))(HI)
    assert [received.body.get("seed") for received in endpoint.requests[2:]] == [3, None]


async def test_unsupported_field_is_refused_or_dropped(
    endpoint: LoopbackEndpoint, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    request = LLMRequest(HI.messages, top_k=4)
    with pytest.raises(UnsendableRequestError, match="top_k"):
        await make()(request)
    assert not endpoint.requests
    lenient = make(strict=False)
    assert [(await lenient(request)).text for _ in range(2)] == ["hello"] * 2
    assert caplog.text.count("top_k") == 1


async def test_unknown_response_field_warns_once(
    endpoint: LoopbackEndpoint, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.otherwise = json_body(completion("x", audio={"id": "a"}, reasoning={"odd": 1}))
    policy = make()
    assert [(await policy(HI)).text for _ in range(3)] == ["x"] * 3
    assert caplog.text.count("`audio`") == 1
    assert caplog.text.count("`reasoning` that is not text") == 1


def conversation(*turns: str) -> LLMRequest:
    """A request whose messages are the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    return LLMRequest([{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)])


def thinking(text: str, thought: str) -> Any:
    return json_body(completion(text, reasoning_content=thought))


def sent_back(endpoint: LoopbackEndpoint, field: str) -> list[Any]:
    """The reasoning in the messages of the last request."""
    return [message.get(field) for message in endpoint.requests[-1].body["messages"]]


async def test_reasoning_is_not_sent_back_by_default(
    endpoint: LoopbackEndpoint, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.then(thinking("a", "hm"))
    client = make().for_episode(EpisodeSpec("t"))
    response = await client(conversation("1"))
    assert list(response.data) == [ThinkingData("hm"), TextData("a")]
    await client(conversation("1", "a", "2"))
    assert endpoint.requests[1].body["messages"] == [dict(one) for one in conversation("1", "a", "2").messages]
    assert "reasoning" not in caplog.text


@pytest.mark.parametrize(
    ("send", "field", "sent"),
    [
        (True, "reasoning_content", "hm"),
        ("reasoning_content", "reasoning_content", "hm"),
        ("reasoning", "reasoning", "hm"),
        ("reasoning_details", "reasoning_details", [{"type": "reasoning.text", "text": "hm"}]),
    ],
)
async def test_reasoning_is_sent_back_on_request(
    endpoint: LoopbackEndpoint, make: Make, send: Any, field: str, sent: Any
) -> None:
    endpoint.then(thinking("a", "hm"), respond("b"), thinking("a", "well"))
    policy = make(send_reasoning=send)
    client, other = (policy.for_episode(EpisodeSpec("t", attempt)) for attempt in range(2))
    await client(conversation("1"))
    await client(conversation("1", "a", "2"))
    assert sent_back(endpoint, field) == [None, sent, None]
    await client(conversation("1", "a", "2", "b", "3"))
    assert sent_back(endpoint, field) == [None, sent, None, None, None]
    await client(conversation("2", "b", "3", "a", "4"))
    last = sent_back(endpoint, field)[3]
    assert "well" in str(last), "the history was cut: the last of two equal responses is the later one"
    await other(conversation("1", "a", "2"))
    assert sent_back(endpoint, field) == [None] * 3, "another episode's"


async def test_reasoning_of_replayed_responses_is_sent_back(endpoint: LoopbackEndpoint, make: Make) -> None:
    earlier = [LLMResponse([ThinkingData("before the branch"), TextData("a")])]
    client = make(send_reasoning=True).for_episode(EpisodeSpec("t", earlier=earlier))
    assert isinstance(client, AdvancingClient)
    client.advance(conversation("1", "a", "2"), LLMResponse([ThinkingData("before the kill"), TextData("b")]))
    client.advance(conversation("1", "a", "2", "b", "3"), None)
    await client(conversation("1", "a", "2", "b", "3"))
    assert sent_back(endpoint, "reasoning_content") == [None, "before the branch", None, "before the kill", None]


async def test_reasoning_kept_by_an_agent_is_not_replaced(endpoint: LoopbackEndpoint, make: Make) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    endpoint.then(json_body(completion(None, tool_calls=[call], reasoning_content="hm")))
    client = make(send_reasoning=True).for_episode(EpisodeSpec("t"))
    await client(HI)
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    await client(LLMRequest([*HI.messages, asked, told]))
    assert sent_back(endpoint, "reasoning_content") == [None, "hm", None]
    await client(LLMRequest([*HI.messages, {**asked, "reasoning_content": "its own"}, told]))
    assert sent_back(endpoint, "reasoning_content") == [None, "its own", None]


async def test_reasoning_outside_an_episode_is_not_sent_back(
    endpoint: LoopbackEndpoint, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.then(thinking("a", "hm"))
    policy = make(send_reasoning=True)
    for asked in (conversation("1"), conversation("1", "a", "2")):
        await policy(asked)
    assert sent_back(endpoint, "reasoning_content") == [None] * 3
    assert caplog.text.count("policy.send_reasoning has no effect outside of episodes") == 1


PRICES = {"m": {"input_per_million_usd": 2.0, "output_per_million_usd": 10.0}}


async def test_cost_is_computed_from_prices(
    endpoint: LoopbackEndpoint, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await make(prices=PRICES)(HI)).cost == pytest.approx((10 * 2 + 5 * 10) / 1e6)
    dated = {**PRICES, "m-2026": {"input_per_million_usd": 0, "output_per_million_usd": 1}}
    endpoint.then(json_body(completion("x", model="m-2026")))
    assert (await make(prices=dated)(HI)).cost == pytest.approx(5 / 1e6)
    assert not caplog.records


async def test_unpriced_response_costs_zero_without_warning(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    policy = make()
    assert policy.unpriced == set()
    assert [(await policy(HI)).cost for _ in range(3)] == [0.0] * 3
    assert policy.unpriced == {"m"}
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


async def test_cost_reported_by_the_endpoint_is_used(endpoint: LoopbackEndpoint, make: Make) -> None:
    body = completion("x")
    body["usage"]["cost"] = 0.25
    endpoint.otherwise = json_body(body)
    assert (await make()(HI)).cost == 0.25
    assert (await make(prices=PRICES)(HI)).cost == pytest.approx(70 / 1e6)


@pytest.mark.parametrize("prices", [None, PRICES])
async def test_responses_without_usage_are_a_warning(
    endpoint: LoopbackEndpoint, make: Make, caplog: pytest.LogCaptureFixture, prices: Any
) -> None:
    body = completion("x")
    del body["usage"]
    endpoint.otherwise = json_body(body)
    policy = make(prices=prices)
    assert [(await policy(HI)).cost for _ in range(2)] == [0.0, 0.0]
    assert caplog.text.count("reports no token usage") == 1
    assert "Limits on tokens (`limits.tokens`, `budget.tokens`)" in caplog.text


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (raw(b"<html>busy</html>", content_type="text/html"), "Expected JSON .* got: '<html>busy"),
        (raw(b""), "Expected JSON"),
        (raw(b"[" * 100_000), "Expected JSON"),
        (raw(b"\xff\xfe{}"), "Expected JSON"),
        (json_body({"choices": []}), "at least one choice"),
        (json_body({"error": {"message": "overloaded " * 500}}), "overloaded"),
    ],
)
async def test_malformed_responses_are_errors(
    endpoint: LoopbackEndpoint, make: Make, behaviour: Any, said: str
) -> None:
    endpoint.then(behaviour)
    with pytest.raises(MalformedResponseError, match=said) as raised:
        await make()(HI)
    assert len(str(raised.value)) < 2500
    assert len(endpoint.requests) == 1


async def test_concurrency_is_bounded(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.otherwise = slow(0.03)
    policy = make(max_concurrency=4)
    responses = await asyncio.gather(*(policy(HI) for _ in range(24)))
    assert [response.text for response in responses] == ["late"] * 24
    assert endpoint.max_in_flight == 4


async def test_waiting_for_a_slot_is_not_latency(endpoint: LoopbackEndpoint, make: Make) -> None:
    """All requests together take longer than the limit of one try, and none of them fails."""
    endpoint.otherwise = slow(0.3)
    policy = make(max_concurrency=1, timeout_sec=2.0, max_retries=0)
    responses = await asyncio.gather(*(policy(HI) for _ in range(9)))
    assert all(0.3 <= (response.latency_sec or 0) < 2.0 for response in responses)


async def test_cancellation_closes_the_connection(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(slow(30))
    task = asyncio.create_task(make()(HI))
    assert await asyncio.to_thread(endpoint.arrived.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(endpoint.left.wait, 5)
    assert endpoint.gone == 1


async def test_request_after_close_opens_again(make: Make) -> None:
    policy = make()
    await policy.close()
    assert (await policy(HI)).text == "hello"
    await policy.close()
    await policy.close()
    assert (await policy(HI)).text == "hello"


async def test_second_event_loop_is_rejected(make: Make) -> None:
    policy = make()
    await policy(HI)
    with pytest.raises(RuntimeError, match="close"):
        await asyncio.to_thread(lambda: asyncio.run(policy(HI)))


async def test_invalid_unicode_is_rejected(endpoint: LoopbackEndpoint, make: Make) -> None:
    with pytest.raises(UnsendableRequestError, match="not valid Unicode"):
        await make()(LLMRequest([{"role": "user", "content": "\udcff"}]))
    assert not endpoint.requests


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"model": ""}, "model"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"timeout_sec": 0}, "timeout_sec"),
        ({"timeout_sec": float("inf")}, "timeout_sec"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"max_retries": -1}, "max_retries"),
        ({"seed": "other"}, "seed"),
        ({"base_url": "127.0.0.1:8000"}, "expected a URL such as"),
        ({"base_url": "http://127.0.0.1:99999/v1"}, "[Pp]ort"),
        ({"base_url": "https://me:pass@host/v1"}, "no user or password"),
        ({"api_key_env": KEY}, "api_key_env"),
        ({"extra_body": {"n": 2}}, "cannot set n"),
        ({"prices": {"m": {"input_per_million_usd": 1}}}, "output_per_million_usd"),
        ({"prices": {"m": {**PRICES["m"], "currency": "EUR"}}}, "currency"),
    ],
)
def test_wrong_settings_are_rejected(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=said):
        OpenAIPolicy(**{"model": "m", **setting})


async def test_key_is_only_in_its_header(
    endpoint: LoopbackEndpoint, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    endpoint.then(error(500, f"bad key {KEY}"), error(400, f"bad key {KEY}"), raw(KEY.encode()))
    endpoint.otherwise = json_body({"choices": KEY})
    policy = make()
    for _ in range(3):
        with pytest.raises(Exception, match=r"\*\*\*") as raised:
            await policy(HI)
        assert KEY not in str(raised.value)
        assert raised.value.__cause__ is None
        assert raised.value.__context__ is None
    assert KEY not in caplog.text + repr(policy)
    received = endpoint.requests[0]
    assert [name for name, value in received.headers.items() if KEY in value] == ["authorization"]
    assert received.headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in str(received.body)


async def test_no_key_means_no_header(endpoint: LoopbackEndpoint, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    await make(api_key_env=None)(HI)
    assert "authorization" not in endpoint.requests[0].headers
    assert KEY not in str(endpoint.requests[0])


async def test_endless_response_is_cut(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(endless())
    with pytest.raises(MalformedResponseError, match="more than 1000000 bytes"):
        await make(max_response_bytes=1_000_000)(HI)
    assert await asyncio.to_thread(endpoint.left.wait, 5)


async def test_large_response_arrives_complete(endpoint: LoopbackEndpoint, make: Make) -> None:
    text = "é\n" * 1_000_000
    endpoint.then(respond(text))
    assert (await make()(HI)).text == text


async def test_short_key_masks_no_words(
    endpoint: LoopbackEndpoint, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers without accounts are often given one letter."""
    monkeypatch.setenv("OPENAI_API_KEY", "e")
    endpoint.otherwise = error(400, "the request is broken")
    with pytest.raises(Exception, match="the request is broken"):
        await make()(HI)
