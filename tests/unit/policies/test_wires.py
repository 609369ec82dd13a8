"""The policies of all three wires: an agent of parallel tool calls, and servers that stream, fail, refuse and count.

The streams of these servers are written by the side of the wires that serves agents, which the vendors' own clients
judge (`tests/unit/agents/interception`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ares_exp import errors
from ares_exp.agents.interception.served_formats import ChatCompletionsWire, MessagesWire, ResponsesWire
from ares_exp.agents.interception.served_wire import Wire
from ares_exp.agents.tools_agent import ToolsAgentFactory
from ares_exp.llms import anthropic_messages, openai_chat, openai_responses
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.llms.wire import EventReader
from ares_exp.policies.anthropic import AnthropicPolicy
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.policies.endpoint_policy import EndpointPolicy
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.responses import OpenAIResponsesPolicy
from ares_exp.testing.echo_container import RehearsalContainer
from tests.drawn_responses import responses
from tests.examples import examples
from tests.loopback_endpoint import LoopbackEndpoint, drop, json_body, streamed

HI = LLMRequest([{"role": "user", "content": "hi"}], system_prompt="Be kind.")
KEY = "sk-the-secret-of-this-test"


def said(text: str, calls: dict[str, str], thought: str = "", **usage: int) -> LLMResponse:
    thinking = [ThinkingData(thought, "SEALED")] if thought else []
    called = [ToolCallData(f"id_{name}", name, given) for name, given in calls.items()]
    pieces = [*thinking, *([TextData(text)] if text else []), *called]
    counts = Usage(1000, 50, cached_tokens=600, **usage)
    return LLMResponse(pieces, usage=counts, model="m-1", finish_reason="tool_calls" if calls else "stop")


class Chat:
    policy = OpenAIPolicy
    path, key_header = "/v1/chat/completions", ("authorization", f"Bearer {KEY}")
    served: Wire = ChatCompletionsWire()

    @staticmethod
    def respond(text: str, calls: dict[str, str], thought: str = "") -> dict[str, Any]:
        return openai_chat.response_to_body(said(text, calls))

    @staticmethod
    def refusal() -> dict[str, Any]:
        return openai_chat.response_to_body(replace(said("I will not.", {}), finish_reason="refusal"))

    @staticmethod
    def error(kind: str, message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}

    @staticmethod
    def results(body: dict[str, Any]) -> list[tuple[str, str]]:
        return [(one["tool_call_id"], one["content"]) for one in body["messages"] if one["role"] == "tool"]


class Responses(Chat):
    policy = OpenAIResponsesPolicy
    path = "/v1/responses"
    served: Wire = ResponsesWire()

    @staticmethod
    def respond(text: str, calls: dict[str, str], thought: str = "") -> dict[str, Any]:
        return openai_responses.response_to_body(said(text, calls, thought, reasoning_tokens=20))

    @staticmethod
    def refusal() -> dict[str, Any]:
        body = Responses.respond("x", {})
        body["output"][0]["content"] = [{"type": "refusal", "refusal": "I will not."}]
        return body

    @staticmethod
    def results(body: dict[str, Any]) -> list[tuple[str, str]]:
        return [(one["call_id"], one["output"]) for one in body["input"] if one["type"] == "function_call_output"]


class Anthropic:
    policy = AnthropicPolicy
    path, key_header = "/v1/messages", ("x-api-key", KEY)
    served: Wire = MessagesWire()

    @staticmethod
    def respond(text: str, calls: dict[str, str], thought: str = "") -> dict[str, Any]:
        return anthropic_messages.response_to_body(said(text, calls, thought, cache_write_tokens=100))

    @staticmethod
    def refusal() -> dict[str, Any]:
        return {**Anthropic.respond("I will not.", {}), "stop_reason": "refusal"}

    @staticmethod
    def error(kind: str, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}

    @staticmethod
    def results(body: dict[str, Any]) -> list[tuple[str, str]]:
        blocks = [block for message in body["messages"] for block in message["content"]]
        return [(one["tool_use_id"], one["content"]) for one in blocks if one["type"] == "tool_result"]


WIRES = [Chat, Responses, Anthropic]
TWO_CALLS = {"bash": '{"command": "echo a"}', "edit": '{"command": "view", "path": "/b"}'}


@dataclass
class Server:
    wire: Any
    endpoint: LoopbackEndpoint

    def policy(self, **more: Any) -> EndpointPolicy:
        settings = {"model": "m", "base_url": self.endpoint.url, "api_key_env": "TEST_KEY", "retry_base_sec": 0.01}
        return self.wire.policy(**{**settings, **more})

    def fails(self, status: int, kind: str, message: str = "no") -> None:
        self.endpoint.then(json_body(self.wire.error(kind, message), status=status))

    async def solve(self, **more: Any) -> RehearsalContainer:
        policy, container = self.policy(**more), RehearsalContainer()
        try:
            client = policy.for_episode(EpisodeSpec("t"))
            await ToolsAgentFactory()(container=container, llm_client=client).run("Do it.")
        finally:
            await policy.close()
        return container

    async def ask(self, request: LLMRequest = HI, **more: Any) -> LLMResponse:
        policy = self.policy(**more)
        try:
            return await policy(request)
        finally:
            await policy.close()


@pytest.fixture(params=WIRES, ids=[one.__name__ for one in WIRES])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TEST_KEY", KEY)
    wire = request.param
    with LoopbackEndpoint(otherwise=json_body(wire.respond("hello", {}))) as endpoint:
        yield Server(wire, endpoint)


async def test_agent_of_parallel_calls_runs_through_failures(server: Server) -> None:
    wire, endpoint = server.wire, server.endpoint
    endpoint.then(
        json_body(wire.respond("I look.", TWO_CALLS, "First both.")),
        json_body(wire.error("rate_limit_error", "slow down"), status=429),
        json_body(wire.error("overloaded_error", "busy"), status=529),
        drop(),
        json_body(wire.respond("", {"submit": "{}"})),
    )
    container = await server.solve()
    assert [one.path for one in endpoint.requests] == [wire.path] * 5
    first, *_, last = endpoint.requests
    assert len(first.body["tools"]) == 3
    assert last.body == endpoint.requests[1].body
    assert [call for call, _ in wire.results(last.body)] == ["id_bash", "id_edit"]
    assert "echo a" in wire.results(last.body)[0][1]
    assert last.headers[wire.key_header[0]] == wire.key_header[1]
    assert container.commands == 2


async def test_tokens_and_cost_are_read(server: Server) -> None:
    price = {"input_per_million_usd": 10, "output_per_million_usd": 100, "cached_per_million_usd": 1}
    response = await server.ask(prices={"m-1": {**price, "cache_write_per_million_usd": 20}})
    usage = response.usage
    written = 100 if server.wire is Anthropic else 0
    assert (usage.prompt_tokens, usage.generated_tokens) == (1000, 50)
    assert (usage.cached_tokens, usage.cache_write_tokens) == (600, written)
    assert response.cost == pytest.approx(((400 - written) * 10 + 600 * 1 + written * 20 + 50 * 100) / 1e6)
    assert (response.text, response.model, response.finish_reason) == ("hello", "m-1", "stop")
    plain = await server.ask(prices={"m-1": {"input_per_million_usd": 10, "output_per_million_usd": 100}})
    assert plain.cost == pytest.approx((1000 * 10 + 50 * 100) / 1e6)


@pytest.mark.parametrize(
    ("status", "kind", "message", "expected", "tries"),
    [
        (401, "authentication_error", "no", errors.AuthenticationError, 1),
        (400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum", errors.ContextOverflowError, 1),
        (400, "invalid_request_error", "Your credit balance is too low", errors.QuotaError, 1),
        (429, "rate_limit_error", "no", errors.RateLimitError, 2),
        (529, "overloaded_error", "no", errors.ServerError, 2),
    ],
)
async def test_error_responses_become_their_error_class(
    server: Server, status: int, kind: str, message: str, expected: type[Exception], tries: int
) -> None:
    for _ in range(tries):
        server.fails(status, kind, message)
    with pytest.raises(expected) as raised:
        await server.ask(max_retries=1)
    assert len(server.endpoint.requests) == tries
    assert KEY not in str(raised.value)


async def test_refusal_is_a_response_or_an_error(server: Server) -> None:
    server.endpoint.then(json_body(server.wire.refusal()), json_body(server.wire.refusal()))
    response = await server.ask()
    assert (response.text, response.finish_reason) == ("I will not.", "refusal")
    with pytest.raises(errors.RefusalError, match="I will not") as raised:
        await server.ask(on_refusal="error")
    assert raised.value.response.usage.prompt_tokens == 1000


async def test_invalid_body_is_a_malformed_response(server: Server) -> None:
    server.endpoint.then(json_body({"hello": 1}), json_body([]))
    for _ in range(2):
        with pytest.raises(errors.MalformedResponseError):
            await server.ask()


async def test_error_with_a_good_status_is_retried(server: Server) -> None:
    error = server.wire.error("rate_limit_error", "slow down")
    failed = {**server.wire.respond("", {}), **error, "status": "failed"} if server.wire is Responses else error
    server.endpoint.then(json_body(failed))
    assert (await server.ask()).text == "hello"
    assert len(server.endpoint.requests) == 2


def failure(wire: Any, message: str) -> bytes:
    """The event of a server that cannot continue a stream."""
    failed = {
        "type": "response.failed",
        "response": {"status": "failed", "error": {"code": "server_error", "message": message}},
    }
    told = failed if wire is Responses else {"type": "error", **wire.error("server_error", message)}
    return f"event: {told['type']}\ndata: {json.dumps(told)}\n\n".encode()


def events_of(wire: Any, whole: LLMResponse, *, fails_with: str | None = None) -> list[bytes]:
    """A stream, in its items; the last one ends it."""
    asked_for = {"model": "m", "stream": True, "max_tokens": 9, **wire.policy.wire.stream_fields}
    said_to_it = [{"role": "user", "content": "hi"}]
    asked = wire.served.read({**asked_for, "input" if wire is Responses else "messages": said_to_it})
    ends = [failure(wire, fails_with)] if fails_with else wire.served.events(asked, whole, 1)
    return [wire.served.opening(asked), wire.served.keepalive(asked, 1), *ends]


def calling(*names: str) -> LLMResponse:
    calls = [ToolCallData(f"id_{name}", name, TWO_CALLS.get(name, "{}")) for name in names]
    return LLMResponse([TextData("I look."), *calls], usage=Usage(1000, 50, cached_tokens=600))


async def test_agent_with_parallel_calls_survives_failed_streams(server: Server) -> None:
    wire, endpoint = server.wire, server.endpoint
    whole, last = (events_of(wire, calling(*names)) for names in (("bash", "edit"), ("submit",)))
    middle = b"".join(last)[: len(b"".join(last)) // 2]
    endpoint.then(
        streamed(b"".join(whole)),
        json_body(wire.error("rate_limit_error", "slow down"), status=429),
        streamed(b"".join(events_of(wire, calling(), fails_with="I broke."))),
        streamed(middle),
        drop(middle, content_type="text/event-stream"),
        streamed(middle, then_silent=True),
        streamed(b"".join(last)),
    )
    container = await server.solve(stream=True, stream_idle_sec=0.5)
    first, *others = endpoint.requests
    assert len(others) == 6
    assert all(one.body == others[0].body for one in others)
    assert (first.body["stream"], "stream_options" in first.body) == (True, wire is Chat)
    assert [call for call, _ in wire.results(others[0].body)] == ["id_bash", "id_edit"]
    assert container.commands == 2


async def test_failed_stream_gives_a_masked_error(server: Server) -> None:
    events = events_of(server.wire, calling("bash"))
    start = b"".join(events)[: len(b"".join(events)) // 2]
    error = {"type": "error", **server.wire.error("invalid_request_error", "prompt is too long")}
    too_long = f"event: error\ndata: {json.dumps(error)}\n\n".encode()
    for behaviour, expected in (
        (streamed(start), errors.EndpointUnreachableError),
        (streamed(start, then_silent=True), errors.EndpointTimeoutError),
        (streamed(b"".join(events_of(server.wire, calling(), fails_with=f"I broke {KEY}."))), errors.ServerError),
        (streamed(events[0] + too_long), errors.ContextOverflowError),
        (streamed(b"data: {nothing}\n\n"), errors.MalformedResponseError),
        (streamed(b"data: []\n\n"), errors.MalformedResponseError),
        (streamed(b""), errors.EndpointUnreachableError),
        (
            streamed(b"".join(events_of(server.wire, LLMResponse.from_text("x" * 50_000)))),
            errors.MalformedResponseError,
        ),
    ):
        server.endpoint.then(behaviour)
        with pytest.raises(expected) as raised:
            await server.ask(stream=True, max_retries=0, stream_idle_sec=0.5, max_response_bytes=20_000)
        assert KEY not in str(raised.value)


async def test_streamed_refusal_has_usage(server: Server) -> None:
    reason = "content_filter" if server.wire is Responses else "refusal"
    refused = LLMResponse([TextData("I will not.")], finish_reason=reason, usage=Usage(1000, 50, cached_tokens=600))
    server.endpoint.then(streamed(b"".join(events_of(server.wire, refused))))
    with pytest.raises(errors.RefusalError, match="I will not") as raised:
        await server.ask(stream=True, on_refusal="error")
    assert raised.value.response.usage == refused.usage


async def test_whole_response_to_a_stream_request_is_read(server: Server) -> None:
    assert (await server.ask(stream=True)).text == "hello"


async def test_missing_end_of_stream_is_not_awaited(server: Server) -> None:
    server.endpoint.then(streamed(b"".join(events_of(server.wire, calling("bash"))), then_silent=True))
    assert (await server.ask(stream=True, max_retries=0)).text == "I look."
    assert server.endpoint.left.wait(30)


@examples(100)
@given(said=responses, wire=st.sampled_from(WIRES))
def test_stream_reads_like_a_whole_response(said: LLMResponse, wire: Any) -> None:
    asked_for = {"model": "m", "stream": True, "max_tokens": 9, **wire.policy.wire.stream_fields}
    asked = wire.served.read({**asked_for, "input" if wire is Responses else "messages": []})
    written = b"".join([wire.served.opening(asked), *wire.served.events(asked, said, 0)])
    reader, response_stream = EventReader(), wire.policy.wire.streamed()
    for start in range(0, len(written), 1000):
        for data in reader.feed(written[start : start + 1000]):
            response_stream.add(data)
    policy = wire.policy(model="m")
    whole, losses = json.loads(wire.served.whole(asked, said)), []
    assert response_stream.may_end
    assert policy.read_response(response_stream.body(), losses.append) == policy.read_response(whole, lambda _: None)


async def test_preflight_asks_with_the_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.policy().preflight()
    [asked] = server.endpoint.others
    assert not server.endpoint.requests, "the preflight must not pay for a response"
    assert (asked.path, asked.headers[server.wire.key_header[0]]) == ("/v1/models", server.wire.key_header[1])
    monkeypatch.delenv("TEST_KEY")
    with pytest.raises(errors.PreflightError, match="TEST_KEY"):
        await server.policy().preflight()


@pytest.mark.parametrize("server", [Responses, Anthropic], indirect=True)
async def test_sealed_reasoning_is_sent_back_in_order(server: Server) -> None:
    looks, submits = server.wire.respond("I look.", TWO_CALLS, "First both."), server.wire.respond("", {"submit": "{}"})
    server.endpoint.then(json_body(looks), json_body(submits))
    await server.solve()
    body = server.endpoint.requests[1].body
    if server.wire is Anthropic:
        assistant = next(one for one in body["messages"] if one["role"] == "assistant")
        assert assistant["content"][0] == {"type": "thinking", "thinking": "First both.", "signature": "SEALED"}
        assert [block["type"] for block in assistant["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    else:
        kinds = [item["type"] for item in body["input"]]
        assert kinds == ["message", "reasoning", "message", *["function_call"] * 2, *["function_call_output"] * 2]
        assert body["input"][1]["encrypted_content"] == "SEALED"
        assert (body["store"], body["include"]) == (False, ["reasoning.encrypted_content"])


@pytest.mark.parametrize("server", [Anthropic], indirect=True)
class TestAnthropic:
    """The cases of only that wire."""

    async def test_prompt_is_marked_for_the_cache(self, server: Server) -> None:
        roles = ("user", "assistant") * 3 + ("user",)
        long = [{"role": role, "content": f"message {place}"} for place, role in enumerate(roles)]
        tool = {"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}}
        await server.ask(LLMRequest(long, system_prompt="Be kind.", tools=[tool]))
        await server.ask(LLMRequest(long, tools=[tool]), cache="1h")
        await server.ask(LLMRequest(long, system_prompt="Be kind.", tools=[tool]), cache=False)
        with_system, without, off = [one.body for one in server.endpoint.requests]
        mark = {"cache_control": {"type": "ephemeral"}}
        assert with_system["system"] == [{"type": "text", "text": "Be kind.", **mark}]
        marked = ["cache_control" in message["content"][-1] for message in with_system["messages"]]
        assert marked == [False] * 4 + [True, False, True]
        assert json.dumps(with_system).count("cache_control") == 3
        assert without["tools"][-1]["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
        assert "cache_control" not in json.dumps(off)

    async def test_max_tokens_and_thinking_budget_are_sent(self, server: Server) -> None:
        await server.ask()
        await server.ask(max_output_tokens=5000, thinking_tokens=2000, temperature=1)
        first, second = [one.body for one in server.endpoint.requests]
        assert first["max_tokens"] == 32_000
        assert (second["max_tokens"], second["thinking"]) == (5000, {"type": "enabled", "budget_tokens": 2000})
        assert server.endpoint.requests[0].headers["anthropic-version"] == "2023-06-01"
        assert "authorization" not in server.endpoint.requests[0].headers


@pytest.mark.parametrize("server", [Responses], indirect=True)
async def test_responses_wire_has_no_stop_sequences(server: Server) -> None:
    with pytest.raises(errors.UnsendableRequestError, match="stop_sequences"):
        await server.ask(stop_sequences=["x"])
    assert (await server.ask(stop_sequences=["x"], strict=False, reasoning_effort="low")).text == "hello"
    assert server.endpoint.requests[0].body["reasoning"] == {"effort": "low"}
