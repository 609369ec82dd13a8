"""The relay, with samplers that poll it as a trainer does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ares_exp.errors import ConfigError, ContextOverflowError, UnsendableRequestError, WireFormatError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.training.sampled_calls import distinct_versions
from ares_exp.training.service.bodies import SampledBody
from ares_exp.training.service.rollout_policies import Relay

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
Said = tuple[str, str, str | None]
"""Text, stop reason and version."""


async def opened(relay: Relay, **more: Any) -> tuple[asyncio.Task[Any], dict[str, Any]]:
    """Adds a request, and polls it once."""
    waiting = asyncio.ensure_future(relay.sampled("r1", [1, 2], {"max_tokens": 4}, EpisodeSpec("t", **more)))
    (asked,) = await relay.requests(30, 8)
    return waiting, asked


def response_to(asked: dict[str, Any], **more: Any) -> SampledBody:
    made = {"request_id": asked["request_id"], "ids": [3, 4], "logprobs": [-0.5, -1.0], "version": "1", "stop": "stop"}
    return SampledBody.model_validate(made | more)


async def test_second_response_is_dropped() -> None:
    relay = Relay(lease_sec=60)
    waits: list[float] = []
    waiting, asked = await opened(relay, on_wait=waits.append)
    assert (asked["rollout_id"], asked["prompt_ids"], asked["sampling"]) == ("r1", [1, 2], {"max_tokens": 4})
    assert await relay.requests(0, 8) == [], "its lease has not ended"
    assert relay.respond(response_to(asked))
    assert not relay.respond(response_to(asked, ids=[9], logprobs=[0.0]))
    response, version = await waiting
    assert (response.ids, version) == ([3, 4], "1")
    assert not relay.respond(response_to(asked)), "the request is gone"


async def test_request_is_handed_out_again_after_lease() -> None:
    relay = Relay(lease_sec=0.01)
    waiting, asked = await opened(relay, version=lambda: "5")
    (again,) = await relay.requests(30, 8)
    assert again["request_id"] == asked["request_id"]
    assert again["deadline"] > asked["deadline"]
    assert relay.respond(response_to(asked, version=None))
    assert (await waiting)[1] == "5"


async def test_cancelled_request_is_not_handed_out() -> None:
    relay = Relay(lease_sec=60)
    waiting, asked = await opened(relay)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not relay.respond(response_to(asked))
    several = [asyncio.ensure_future(relay.sampled(f"r{n}", [n], {"max_tokens": 1}, EpisodeSpec(""))) for n in range(3)]
    handed_out = [*await relay.requests(30, 2, {"r2"}), *await relay.requests(30, 1), *await relay.requests(30, 2)]
    assert [one["rollout_id"] for one in handed_out] == ["r2", "r0", "r1"]
    assert await relay.requests(0, 8, {"r3"}) == []
    for one in several:
        one.cancel()
    await asyncio.wait(several)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids": [3, -1]}, "ids.1"),
        ({"ids": [3, True]}, "ids.1"),
        ({"ids": [3]}, "got 1 ids and 2 logprobs"),
        ({"logprobs": [0.0, float("nan")]}, "logprobs.1"),
        ({"logprobs": [0.0, 0.5]}, "logprobs.1"),
        ({"ids": [], "logprobs": []}, "expected sampled ids"),
        ({"ids": [1] * 5, "logprobs": [0.0] * 5}, "at most 4 token ids"),
        ({"stop": "tool_calls"}, "stop"),
        ({"version": 3}, "version"),
        ({"request_id": None}, "request_id"),
    ],
)
async def test_invalid_response_leaves_request_open(changed: dict[str, Any], message: str) -> None:
    relay = Relay(lease_sec=60)
    waiting, asked = await opened(relay)
    with pytest.raises((WireFormatError, ValidationError), match=message):
        relay.respond(response_to(asked, **changed))
    assert relay.respond(response_to(asked))
    await waiting


@pytest.mark.parametrize("sampling", [{"max_tokens": 0}, {"max_tokens": "9"}, {"stop": "END"}, {"stop": [""]}])
def test_invalid_sampling_is_rejected(sampling: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sampling"):
        Relay().check(sampling)


def test_changed_weights_count_as_two_versions() -> None:
    assert distinct_versions(["4", None, "4+5", "5"]) == ("4", "5")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tests.tiny_model import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer: Any, tmp_path: Path) -> str:
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


class Sampler:
    """A trainer's sampler, which says these texts.

    Attributes:
        asked: The requests that it polled.
    """

    def __init__(self, tokenizer: Any, *says: Said) -> None:
        self._tokenizer, self._says = tokenizer, [*says]
        self.asked: list[dict[str, Any]] = []

    @asynccontextmanager
    async def on(self, relay: Relay) -> AsyncIterator[None]:
        polling = asyncio.ensure_future(self._poll(relay))
        try:
            yield
        finally:
            polling.cancel()
            await asyncio.wait([polling])

    async def _poll(self, relay: Relay) -> None:
        while True:
            for asked in await relay.requests(30, 8):
                self.asked.append(asked)
                text, stop, version = self._says.pop(0)
                ids = self._tokenizer(text)["input_ids"] + ([self._tokenizer.eos_token_id] if stop == "stop" else [])
                logprobs = [-0.5] * len(ids)
                made = response_to(asked, ids=ids, logprobs=logprobs, version=version, stop=stop)
                assert relay.respond(made)


def whole(response: LLMResponse) -> list[int]:
    return [*(response.prompt_token_ids or ()), *(response.completion_token_ids or ())]


@pytest.mark.train
async def test_conversation_with_tool_call_continues_from_ids(tokenizer: Any, model: str) -> None:
    call = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    sampler = Sampler(tokenizer, (call, "stop", "1"), ("done", "stop", "2"), ("forked", "stop", "2"))
    relay = Relay(lease_sec=60)
    client: Any = relay.policy_for("r1", model, {"temperature": 1.0, "max_tokens": 200}, EpisodeSpec("t"))
    question = [{"role": "user", "content": "Which files?"}]
    async with sampler.on(relay):
        first = await client(LLMRequest(question, tools=TOOLS, temperature=0.2))
        text, made = first.data
        assert text == TextData("I look.")
        assert isinstance(made, ToolCallData)
        assert (first.finish_reason, first.policy_version) == ("tool_calls", "1")
        assert first.sampling["temperature"] == 1.0
        calls = [{"id": made.id, "type": "function", "function": {"name": made.name, "arguments": made.arguments}}]
        called = {"role": "assistant", "content": "I look.", "tool_calls": calls}
        result = {"role": "tool", "tool_call_id": made.id, "content": "a b"}
        later = LLMRequest([*question, called, result], tools=TOOLS, temperature=0.2)
        second = await client(later)
        assert second.prompt_token_ids[: len(whole(first))] == tuple(whole(first))
        assert (second.text, second.policy_version, second.logprobs) == ("done", "2", (-0.5,) * 5)

        resumed: Any = relay.policy_for("r1", model, {"max_tokens": 200}, EpisodeSpec("t"))
        resumed.advance(LLMRequest(question, tools=TOOLS), first)
        forked = await resumed(LLMRequest([*question, {**called, "content": "rewritten"}, result], tools=TOOLS))
        assert forked.prompt_token_ids[: len(whole(first))] != tuple(whole(first))
        with pytest.raises(UnsendableRequestError, match="cannot force"):
            await client(LLMRequest(question, tools=TOOLS, tool_choice="required"))
    assert sampler.asked[1]["prompt_ids"] == [*second.prompt_token_ids]


@pytest.mark.train
async def test_aborted_response_continues_with_new_weights(tokenizer: Any, model: str) -> None:
    sampler = Sampler(tokenizer, ("", "abort", "1"), ("ab", "abort", "1"), ("cdEND", "length", "2"))
    relay = Relay(lease_sec=60)
    async with sampler.on(relay):
        client = relay.policy_for("r1", model, {"max_tokens": 7, "stop": ["END"]})
        response = await client(LLMRequest([{"role": "user", "content": "?"}]))
    ids = tokenizer("abcdEND")["input_ids"]
    assert response.completion_token_ids == tuple(ids)
    assert (response.text, response.policy_version, response.finish_reason) == ("abcd", "1+2", "length")
    assert sampler.asked[2]["prompt_ids"] == [*(response.prompt_token_ids or ()), *ids[:2]]
    assert [one["sampling"]["max_tokens"] for one in sampler.asked] == [7, 7, 5]


@pytest.mark.train
async def test_prompt_beyond_context_is_overflow(tokenizer: Any, model: str) -> None:
    relay = Relay(lease_sec=60)
    async with Sampler(tokenizer, ("", "length", "1")).on(relay):
        with pytest.raises(ContextOverflowError):
            await relay.policy_for("r1", model, {})(LLMRequest([{"role": "user", "content": "?"}]))
