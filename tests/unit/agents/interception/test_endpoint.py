"""The endpoint and the line, by real connections: what a request becomes, and what asks for a response once more."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest

from ares_exp.agents.interception import agent_endpoint as endpoint
from ares_exp.agents.interception.agent_endpoint import Endpoint
from ares_exp.agents.interception.line import Line
from ares_exp.containers.filesystem.zstd import zstd
from tests.fault_proxy import CUTS, Cut, FaultProxy, reset
from tests.served_line import CHAT, Port, Recorder, chat, served, text_of

LIMIT_SEC = 30.0
GOOGLE = "/v1beta/models/m"


@pytest.fixture
def llm() -> Recorder:
    return Recorder()


@pytest.fixture
async def port(llm: Recorder) -> AsyncIterator[Port]:
    async with asyncio.timeout(LIMIT_SEC), served(Line(llm, keepalive_sec=0.02)) as port:
        yield port


async def settled(llm: Recorder, calls: int) -> None:
    await until(lambda: len(llm.calls) >= calls)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SEC):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_request_is_a_call(port: Port, llm: Recorder, stream: bool) -> None:
    status, body = await port.post(chat("do it", tools=True, stream=stream, temperature=0.5, seed=3))
    assert (status, text_of(body)[:8]) == (200, "answer 1")
    assert (b"[DONE]" in body) == stream
    (request,) = llm.calls
    assert request.messages[0]["content"] == "do it"
    assert (request.origin.wire, request.origin.conversation, request.origin.model) == (
        "chat_completions",
        "main",
        "policy",
    )
    assert (request.temperature, request.origin.sampling["temperature"]) == (None, 0.5)
    assert port.line.report.requests == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat("do it", temperature=0.5, max_tokens=7)),
        (f"{GOOGLE}:generateContent", {"contents": [], "generationConfig": {"temperature": 0.5, "maxOutputTokens": 7}}),
    ],
)
async def test_sampling_is_forwarded_on_demand(llm: Recorder, path: str, body: object) -> None:
    async with served(Line(llm, forward_sampling=True)) as port:
        await port.post(body, path=path)
    assert (llm.calls[0].temperature, llm.calls[0].max_output_tokens) == (0.5, 7)


@pytest.mark.parametrize("path", [CHAT, "/chat/completions", "/v1/messages", f"{GOOGLE}:generateContent"])
async def test_wrong_key_is_refused(port: Port, llm: Recorder, path: str) -> None:
    status, body = await port.post(chat("do it"), path=path, key="ares-key-wrong")
    assert status == 401
    assert "ARES_LLM_KEY, got another key" in json.loads(body)["error"]["message"]
    assert llm.calls == []
    assert (port.line.report.requests, port.line.report.refused) == (0, 1)
    assert f"POST {path}: 401" in str(port.line.report.last_refusal)
    assert "ares-key" not in str(port.line.report.last_refusal)


@pytest.mark.parametrize("name", ["x-api-key", "x-goog-api-key", "api-key"])
async def test_key_is_accepted_in_every_header(port: Port, name: str) -> None:
    status, _ = await port.post(chat("do it"), Authorization="Basic x", **{name: port.line.key})
    assert (status, port.line.report.refused) == (200, 0)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", b"{no json", 400, "JSON"),
        ("/v1/chat/completions", {"model": "m"}, 400, "messages"),
        (f"{GOOGLE}:generateContent", [], 400, "the request"),
        ("/v1/messages/count_tokens", [], 400, "the request"),
        ("/v1/nothing", {}, 404, "Use one of /v1/chat/completions"),
    ],
)
async def test_unreadable_body_is_explained(
    port: Port, llm: Recorder, path: str, body: object, status: int, says: str
) -> None:
    got, text = await port.post(body, path=path)
    assert (got, says in json.loads(text)["error"]["message"]) == (status, True)
    assert (llm.calls, says in str(port.line.report.last_refusal)) == ([], True)


@pytest.mark.parametrize(
    "start", ["NOT HTTP", "POST /v1/messages HTTP/1.1\r\nbad header", "POST /v1beta/models/m:x?key=AIza-secret HTP"]
)
async def test_malformed_http_gets_a_json_error(port: Port, caplog: pytest.LogCaptureFixture, start: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(f"{start}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert "a valid HTTP request" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert (port.line.report.refused, "Traceback" in caplog.text) == (1, False)
    assert "AIza-secret" not in f"{answer!r}{port.line.report}{caplog.text}"


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_body_that_cannot_be_decoded_is_refused(
    port: Port, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    status, body = await port.post(b"{}", **{"Content-Encoding": encoding})
    assert (status, f"content encoding {encoding}" in json.loads(body)["error"]["message"]) == (400, True)
    assert (await port.post(zstd.compress(json.dumps(chat("do it")).encode()), **{"Content-Encoding": "zstd"}))[
        0
    ] == 200
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_half_closed_client_gets_its_response(port: Port, llm: Recorder, stream: bool) -> None:
    llm.gate.clear()
    reader, writer = await port.raw(chat("do it", stream=stream))
    writer.write_eof()
    await settled(llm, 1)
    llm.gate.set()
    assert b"answer 1" in await reader.read()
    writer.close()
    # A client that has gone looks the same, so the same request gets the same response.
    assert text_of((await port.post(chat("do it")))[1]).startswith("answer 1")
    assert text_of((await port.post(chat("do it")))[1]).startswith("answer 2")


async def test_too_large_body_is_refused(llm: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint.MAX_BODY_BYTES == 64 * 2**20
    monkeypatch.setattr(endpoint, "MAX_BODY_BYTES", 2**18)
    async with served(Line(llm)) as port:
        status, body = await port.post(chat("x" * 2**18))
        assert (status, json.loads(body)["error"]["message"]) == (
            413,
            "Expected a request body of at most 0.25 MiB, got a larger one.",
        )
        assert (await port.post(chat("x" * 2**17)))[0] == 200


async def test_models_are_listed_and_other_methods_refused(port: Port) -> None:
    key = {"Authorization": f"Bearer {port.line.key}"}
    async with aiohttp.ClientSession(port.url, headers=key) as session:
        async with session.get("/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "policy"
        async with session.get("/v1/models/gpt-9") as response:
            assert (await response.json())["id"] == "gpt-9"
        async with session.get(f"{GOOGLE}?key={port.line.key}", headers={"Authorization": ""}) as response:
            assert (await response.json())["name"] == "models/m"
        async with session.get("/v1/responses", headers={"Upgrade": "websocket", "Connection": "upgrade"}) as response:
            assert response.status == 426
        async with session.get("/v1/chat/completions") as response:
            assert response.status == 405
        async with session.head("/") as response:
            assert response.status == 200


async def test_stream_starts_immediately_and_is_kept_alive(port: Port, llm: Recorder) -> None:
    llm.gate.clear()
    reader, writer = await port.raw(chat("do it", stream=True))
    head = await reader.readuntil(b'"role":')
    assert b"text/event-stream" in head
    assert len(llm.calls) == 1
    for _ in range(3):
        await reader.readuntil(b": keepalive")
    llm.gate.set()
    rest = await reader.readuntil(b"[DONE]")
    assert b"answer 1" in rest
    writer.close()
    assert len(llm.calls) == 1


async def test_slow_whole_response_starts_with_blanks(llm: Recorder) -> None:
    llm.gate.clear()
    async with served(Line(llm, keepalive_sec=0.02), endpoint=Endpoint(whole_starts_sec=0.05)) as port:
        reader, writer = await port.raw(chat("do it"))
        await reader.readuntil(b"1\r\n \r\n1\r\n \r\n")  # two blanks, in chunks of their own
        llm.gate.set()
        body = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    assert b"answer 1" in body


async def test_stream_end_is_sent_after_the_response(port: Port, llm: Recorder) -> None:
    llm.gate.clear()
    reader, writer = await port.raw(chat("do it", stream=True))
    await llm.on_call.wait()
    seen = await reader.readuntil(b": keepalive")
    assert b'finish_reason":"stop' not in seen.replace(b" ", b"")
    writer.close()


async def test_repeated_request_attaches_to_pending_call(port: Port, llm: Recorder) -> None:
    llm.gate.clear()
    _, writer = await port.raw(chat("do it", stream=True))
    await settled(llm, 1)
    reset(writer)  # the client's own time limit
    again = asyncio.create_task(port.post(chat("do it", stream=False)))  # some fall back to whole responses
    await until(lambda: port.line.report.retries == 1)
    llm.gate.set()
    assert text_of((await again)[1]).startswith("answer 1")
    assert (len(llm.calls), llm.given_up) == (1, 0)


async def test_missed_response_is_sent_on_retry(port: Port, llm: Recorder) -> None:
    llm.gate.clear()
    _, writer = await port.raw(chat("do it"))
    await settled(llm, 1)
    reset(writer)
    llm.gate.set()
    assert text_of((await port.post(chat("do it")))[1]).startswith("answer 1")
    assert port.line.report.retries == 1
    # That one was delivered: who asks anew, without saying that it is a retry, gets a new response.
    assert text_of((await port.post(chat("do it")))[1]).startswith("answer 2")
    # And who says so gets the last one.
    status, body = await port.post(chat("do it"), **{"x-stainless-retry-count": "1"})
    assert (status, text_of(body)[:8]) == (200, "answer 2")
    assert port.line.report.retries == 2


@pytest.mark.parametrize("leave", [reset, asyncio.StreamWriter.close])
async def test_different_request_cancels_the_abandoned_call(
    port: Port, llm: Recorder, leave: Callable[[asyncio.StreamWriter], None]
) -> None:
    llm.gate.clear()
    _, writer = await port.raw(chat("do it"))
    await settled(llm, 1)
    leave(writer)
    other = asyncio.create_task(port.post(chat("do it", "", "why do you not answer?")))
    await settled(llm, 2)
    assert llm.given_up == 1
    llm.gate.set()
    assert text_of((await other)[1]).startswith("answer 2")
    assert len(set(llm.conversations)) == 1


async def test_parallel_requests_are_separate_conversations(port: Port, llm: Recorder) -> None:
    await port.post(chat("do it", tools=True))
    llm.gate.clear()
    first = asyncio.create_task(port.post(chat("part one", tools=True)))
    second = asyncio.create_task(port.post(chat("part two", tools=True)))
    title = asyncio.create_task(port.post(chat("a title for: do it")))
    await settled(llm, 4)
    llm.gate.set()
    await asyncio.gather(first, second, title)
    await port.post(chat("part two", "response", "go on", tools=True))
    await port.post(chat("do it", "response", "thanks", tools=True))
    by_text = {str(call.messages[0]["content"]): [] for call in llm.calls}  # type: dict[str, list[str]]
    for call, conversation in zip(llm.calls, llm.conversations, strict=True):
        by_text[str(call.messages[0]["content"])].append(conversation)
    assert by_text["do it"] == ["main", "main"]
    assert len(set(by_text["part two"])) == 1
    assert by_text["part two"][0].startswith("sub-")
    assert by_text["part one"] != by_text["part two"][:1]
    assert by_text["a title for: do it"][0].startswith("side-")
    assert len(port.line.report.conversations) == 4


async def test_repeated_response_continues_its_conversation(port: Port) -> None:
    _, body = await port.post(chat("do it"))
    await port.post(chat("a file", "Ok.", "do it", text_of(body), "again"))
    assert port.line.report.conversations == ("main",)
    await port.post(chat("a file", "Ok.", "another task"))
    assert len(port.line.report.conversations) == 2


async def test_conversation_names_are_independent_of_order() -> None:
    async def names(order: list[str]) -> dict[str, str]:
        llm = Recorder()
        async with served(Line(llm)) as port:
            await port.post(chat("main"))
            for text in order:
                await port.post(chat(text))
        return {
            str(call.messages[0]["content"]): conversation
            for call, conversation in zip(llm.calls, llm.conversations, strict=True)
        }

    assert await names(["one", "two"]) == await names(["two", "one"])


async def test_headers_name_conversations(llm: Recorder) -> None:
    async with served(Line(llm, conversation_headers=("x-agent-id",))) as port:
        await port.post(chat("do it", tools=True))
        await port.post(chat("sub", tools=True), **{"X-Agent-Id": "a1"})
        await port.post(chat("a summary of what was", tools=True))  # the main conversation, compacted
        await port.post(chat("sub, compacted", tools=True), **{"X-Agent-Id": "a1"})
        await port.post(chat("a title"))
        await port.post(chat("sub", tools=True), **{"X-Agent-Id": "a2"})
    main, sub, other = llm.conversations[0], llm.conversations[1], llm.conversations[5]
    assert llm.conversations[2:4] == [main, sub]
    assert llm.conversations[4].startswith("side-")
    assert len({main, sub, other}) == 3


async def test_dropped_field_is_reported_once(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ares_exp")
    for text in ("one", "two"):
        await port.post(chat(text, web_search_options={"search_context_size": "low"}))
    said = [record.getMessage() for record in caplog.records if "web_search_options" in record.getMessage()]
    assert len(said) == 1
    assert any("web_search_options" in name for name in port.line.report.dropped)


async def test_closed_line_cuts_connections_and_cancels_calls(llm: Recorder) -> None:
    llm.gate.clear()
    async with served(Line(llm)) as port:
        reader, writer = await port.raw(chat("do it", stream=True))
        await settled(llm, 1)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readuntil(b"[DONE]")
    writer.close()
    assert llm.given_up == 1


@pytest.mark.parametrize("seed", range(6))
async def test_cut_connections_need_no_second_response(llm: Recorder, seed: int) -> None:
    await run_through_cuts(llm, seed)


async def run_through_cuts(llm: Recorder, seed: int, turns: int = 4) -> list[Cut]:
    """Runs turns with a client that asks again, unmarked and byte for byte the same, whenever a response is cut."""
    rng = random.Random(seed)
    plan = [rng.choice([*CUTS, None]) for _ in range(3 * turns)]
    async with asyncio.timeout(LIMIT_SEC), served(Line(llm)) as port:
        next_cut = iter([*plan, *[None] * 1000])
        async with FaultProxy(("127.0.0.1", port.port), lambda: next(next_cut)) as proxy:
            behind = Port(port.line, proxy.port)
            texts = ["do it"]
            for turn in range(1, turns + 1):
                response = await _until_whole(behind, texts)
                assert response.startswith(f"answer {turn} ")
                texts += [response, f"result {turn}"]
    assert len(llm.calls) == turns
    assert port.line.report.conversations == ("main",)
    assert port.line.report.retries == len(proxy.cuts)
    return proxy.cuts


async def _until_whole(port: Port, texts: list[str]) -> str:
    while True:
        try:
            _, body = await port.post(chat(*texts, stream=True))
        except aiohttp.ClientError:
            continue
        if b"[DONE]" in body:
            return text_of(body)
