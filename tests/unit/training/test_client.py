"""The client of the rollout service: retries, streams that break, the relay, and errors."""

import asyncio
import base64
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ares_exp.errors import ConfigError, ServiceError
from ares_exp.training.client import Client, Episode, Request, Response
from ares_exp.training.service.bodies import Submitted
from tests.closed_port import closed_port
from tests.loopback_endpoint import Behaviour, Received, drop, error, json_body, raw, serving
from tests.service_contract import until

SUBMITTED = Submitted(submission_id="s", rollout_ids=["r1", "r2"])
INFO = {
    "protocol": 1, "ares_exp_version": "0", "version": None, "tasks": 1, "agent": "tools", "modes": [], "wires": [],
    "capacity": {"running": 0, "waiting": 0, "limit": 1}, "unacknowledged": 0, "run_dir": "/run",
}  # fmt: skip


@asynccontextmanager
async def answering(*behaviours: Behaviour) -> AsyncIterator[tuple[str, list[Received]]]:
    """Serves one behaviour per request. Yields the URL and the requests."""
    left, requests = list(behaviours), list[Received]()

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        requests.append(Received(request.method, str(request.rel_url), dict(request.headers), body))
        return await left.pop(0)(request, requests[-1])

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with serving(app) as port:
        yield f"http://127.0.0.1:{port}", requests


def line(rollout_id: str, cursor: int, **fields: Any) -> dict[str, Any]:
    row = {
        "conversation": "main", "made": "clean", "ids": [1, 2, 3], "mask": [0, 0, 1], "logprobs": [0.0, 0.0, -0.5],
        "prompt_tokens": 2, "steps": [1], "starts": [2], "versions": ["7"], "finish_reason": "stop",
    }  # fmt: skip
    return {
        "cursor": cursor, "rollout_id": rollout_id, "submission_id": "s", "group_id": None, "task": "task",
        "attempt": 0, "episode_id": "e", "replaces": None, "losses": [], "state": "finished",
        "reward": 1.0, "rewards": {"tests": 1.0},
        "trainable": True, "error": None, "versions": ["7"], "version_min": 7, "version_max": 7, "staleness": 0,
        "finish": "submitted", "encoding": "json", "rows": [row], "calls": None, "trajectory": None,
        "times": {"queue": 0.0, "start": 0.0, "engine": 0.0, "tools": 0.0, "verify": 0.0},
        "tokens": {"prompt": 2, "sampled": 1}, "metadata": {}, "of_a_newer_service": 1, **fields,
    }  # fmt: skip


def lines(*values: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


COMPLETE = {"submission_id": "s", "complete": True}
ACKED = json_body({"freed": 1})


async def test_calls_are_repeated_while_the_service_is_full_or_away() -> None:
    full, away = error(429, headers={"Retry-After": "0"}), error(503, headers={"Retry-After": "0"})
    async with answering(full, drop(), away, json_body(INFO)) as (url, requests), Client(url) as client:
        assert (await client.info()).capacity.limit == 1
    assert len(requests) == 4


@pytest.mark.parametrize(
    ("behaviour", "status", "code", "message"),
    [
        (error(404, "No rollout r9.", type="Unknown"), 404, "Unknown", "returned 404: No rollout r9."),
        (raw(b"<html>", status=500, content_type="text/html"), 500, None, "returned 500: Internal Server Error"),
        (error(429, "Full.", type="Full", headers={"Retry-After": "9"}), 429, "Full", "returned 429: Full."),
        (json_body({"state": "?"}), None, None, "The rollout service returned an invalid RolloutFacts"),
    ],
)
async def test_errors_have_the_status_and_the_message(
    behaviour: Behaviour, status: int | None, code: str | None, message: str
) -> None:
    async with answering(behaviour) as (url, _), Client(url, full_sec=1.0) as client:
        with pytest.raises(ServiceError, match=message) as caught:
            await client.status("r9")
    assert (caught.value.status, caught.value.code) == (status, code)


async def test_an_unreachable_service_is_named() -> None:
    with closed_port() as port:
        async with Client(f"http://127.0.0.1:{port}", retry_sec=0.0) as client:
            with pytest.raises(ServiceError, match=f"GET http://127.0.0.1:{port}/v1/info failed: ClientConnector"):
                await client.info()


@pytest.mark.parametrize("arguments", [{"url": "localhost:8300"}, {"url": "http://h:1", "key_env": "UNSET_VARIABLE"}])
def test_a_client_rejects_wrong_arguments(arguments: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"(the URL of the rollout service|for the key of the rollout service)"):
        Client(**arguments)


async def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", "secret")
    async with answering(json_body(INFO)) as (url, requests), Client(url, key_env="SERVICE_KEY") as client:
        await client.info()
    assert requests[0].headers["Authorization"] == "Bearer secret"


async def test_episodes_continue_after_a_broken_stream() -> None:
    """The second stream starts after the last episode that the consumer took, which is acknowledged."""
    broken = drop(after=lines(line("r2", 3)) + b'{"cursor": 4, "rol')
    rest = raw(lines(line("r1", 4), COMPLETE), content_type="application/x-ndjson")
    async with answering(broken, ACKED, raw(b""), rest, ACKED) as (url, requests), Client(url) as client:
        episodes = [one async for one in client.episodes(SUBMITTED)]
    assert [(one.rollout_id, one.cursor) for one in episodes] == [("r2", 3), ("r1", 4)]
    polls = [one.path for one in requests if one.method == "GET"]
    assert ["after=0" in path for path in polls] == [True, False, False]
    assert all("after=3" in path for path in polls[1:])
    assert [one.body["cursor"] for one in requests if one.path == "/v1/ack"] == [3, 4]


async def test_an_episode_is_not_acknowledged_before_the_next() -> None:
    async with answering(raw(lines(line("r1", 1)))) as (url, requests), Client(url) as client:
        async for _ in client.episodes(SUBMITTED):
            break
    assert [one.method for one in requests] == ["GET"]


def test_packed_rows_and_calls_are_decoded() -> None:
    def packed(kind: str, values: list[Any]) -> str:
        return base64.b64encode(array(kind, values).tobytes()).decode()

    plain = Episode.model_validate(line("r1", 1))
    row = {**line("r1", 1)["rows"][0], "ids": packed("i", [1, 2, 3]), "mask": packed("B", [0, 0, 1])}
    call = {
        "step": 1, "conversation": "main", "prompt_ids": packed("i", [1, 2]), "ids": packed("i", [3]),
        "logprobs": packed("f", [-0.5]), "version": "7", "finish_reason": "stop",
    }  # fmt: skip
    both = Episode.model_validate(line("r1", 1, rows=[{**row, "logprobs": packed("f", [0, 0, -0.5])}], calls=[call]))
    assert both.report == plain.report
    assert not plain.report.is_lost
    assert plain.report.rows[0].response_ids == (3,)
    [sampled] = both.sampled_calls
    assert (sampled.prompt, sampled.completion, sampled.logprobs) == ((1, 2), (3,), (-0.5,))


def test_episodes_that_cannot_be_trained_on_are_lost() -> None:
    assert Episode.model_validate(line("r1", 1, trainable=False, state="stale")).report.is_lost
    assert Episode.model_validate(line("r1", 1, reward=None, trainable=False, rows=None)).report.is_lost


async def test_relay_samples_concurrently_and_ends_with_its_error() -> None:
    """A request that is handed out again is not sampled twice at the same time."""
    together, responses = asyncio.Barrier(2), []
    handed = {"request_id": "a", "rollout_id": "r1", "prompt_ids": [1], "sampling": {}, "deadline": 1.0, "more": 1}
    polls = [[handed], [handed, {**handed, "request_id": "b"}], [{**handed, "request_id": "c"}]]

    async def sample(request: Request) -> Response:
        if request.request_id == "c":
            raise ValueError("no engine")
        await together.wait()
        return Response([2], [-0.5], "7")

    async def hand_out(request: web.Request) -> web.Response:
        if len(polls) == 1:
            await until(lambda: len(responses) == 2)
        return web.json_response({"requests": polls.pop(0)})

    async def take(request: web.Request) -> web.Response:
        responses.append(await request.json())
        return web.json_response({"accepted": True})

    app = web.Application()
    app.add_routes([web.get("/v1/requests", hand_out), web.post("/v1/responses", take)])
    async with serving(app) as port, Client(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(ValueError, match="no engine"):
            await client.relay(SUBMITTED, sample)
    assert sorted(one["request_id"] for one in responses) == ["a", "b"]
    assert responses[0] == {**responses[0], "ids": [2], "logprobs": [-0.5], "version": "7", "stop": "stop"}
