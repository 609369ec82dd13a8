"""A real HTTP server on 127.0.0.1 that speaks /v1/chat/completions, and misbehaves on demand.

With bodies of theirs (`json_body`), it is one of /v1/responses, /v1/messages and /v1/completions, too.

It runs in a thread of its own, so that async tests, sync tests and command lines in a subprocess can all use it:

    with LoopbackEndpoint() as endpoint:
        endpoint.then(error(500), error(429, headers={"Retry-After": "0"}))   # one behaviour a request, in order
        endpoint.otherwise = answer("hello")                                  # every request after those
        ... base_url=endpoint.url ...
        assert endpoint.requests[0].body["model"] == "m"
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TURNS_TO_CONNECT = 4
"""In so many turns of the event loop a connection that was accepted has its protocol."""


@dataclass(frozen=True)
class Received:
    """One request, as it arrived. Header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any] = field(default_factory=dict)


Behaviour = Callable[[web.Request, Received], Awaitable[web.StreamResponse]]


def completion(text: str | None, *, model: str = "loopback", **message: Any) -> dict[str, Any]:
    """The body of a chat completion that reports 10 prompt tokens and 5 generated ones."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


def respond(text: str | Callable[[dict[str, Any]], str]) -> Behaviour:
    """Answers with `text`, or with what it makes of the request's body."""

    async def behave(_: web.Request, received: Received) -> web.StreamResponse:
        said = text if isinstance(text, str) else text(received.body)
        return web.json_response(completion(said, model=received.body["model"]))

    return behave


def error(status: int, message: str = "no", *, headers: dict[str, str] | None = None, **more: Any) -> Behaviour:
    """Answers with an error in OpenAI's form; `more` goes beside the message (`code=…`)."""

    async def behave(_: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, **more}}, status=status, headers=headers)

    return behave


def json_body(body: Any, *, status: int = 200) -> Behaviour:
    async def behave(_: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return behave


def raw(body: bytes, *, status: int = 200, content_type: str = "application/json") -> Behaviour:
    async def behave(_: web.Request, received: Received) -> web.StreamResponse:
        return web.Response(body=body, status=status, content_type=content_type)

    return behave


def streamed(written: bytes, *, then_silent: bool = False) -> Behaviour:
    """Answers with a stream of events, in small parts; with `then_silent`, one that does not end then."""

    async def behave(request: web.Request, received: Received) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        part_bytes = max(7, len(written) // 30)
        for start in range(0, len(written), part_bytes):
            await response.write(written[start : start + part_bytes])
        if then_silent:
            await asyncio.sleep(60)
        await response.write_eof()
        return response

    return behave


def drop(after: bytes = b"", content_type: str = "application/json") -> Behaviour:
    """Closes the connection without a response, or in the middle of one that starts with `after`."""

    async def behave(request: web.Request, received: Received) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100000", "Content-Type": content_type})
        if after:
            await response.prepare(request)
            await response.write(after)
        assert request.transport is not None
        request.transport.abort()
        return response

    return behave


def endless(chunk: bytes = b"x" * 65536) -> Behaviour:
    async def behave(request: web.Request, received: Received) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(chunk)

    return behave


def slow(seconds: float, then: Behaviour | None = None) -> Behaviour:
    async def behave(request: web.Request, received: Received) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await (then or respond("late"))(request, received)

    return behave


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[int]:
    """Serves at a port of the loopback, and closes all connections at the end, one that was just accepted included.

    A server that is closed in the turn of the event loop in which it accepts a connection would forget that one.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    server = await loop.create_server(runner.server, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await stop_accepting(server)
        await runner.cleanup()


async def stop_accepting(server: asyncio.Server) -> None:
    """Closes a server; what it has accepted by now has its protocol, which is to be closed."""
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(TURNS_TO_CONNECT):
        await asyncio.sleep(0)
    server.close()


class LoopbackEndpoint:
    """The server. Use as a context manager; it listens from `__enter__` to `__exit__`.

    Attributes:
        url: What `policy.base_url` must be.
        requests: The requests for responses that arrived, in order.
        others: All other requests (`GET /v1/models`).
        otherwise: What to do with a request when nothing was queued by `then()`.
        models: What to do with `GET /v1/models`.
        in_flight, max_in_flight: Chat requests in progress now, and at most so far.
        gone: Chat requests whose client went away before it had its response.
        arrived, left: Set when a chat request arrives, and when a client goes away.
    """

    def __init__(self, *, otherwise: Behaviour | None = None) -> None:
        self.url = ""
        self.requests: list[Received] = []
        self.others: list[Received] = []
        self.otherwise = otherwise or respond("hello")
        self.models: Behaviour = json_body({"object": "list", "data": []})
        self.in_flight = self.max_in_flight = self.gone = 0
        self.arrived, self.left = threading.Event(), threading.Event()
        self._queued: deque[Behaviour] = deque()
        self._listening, self._stop = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="loopback-endpoint")

    def then(self, *behaviours: Behaviour) -> None:
        self._queued.extend(behaviours)

    def __enter__(self) -> LoopbackEndpoint:
        self._thread.start()
        assert self._listening.wait(60), "the loopback endpoint does not listen"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the loopback endpoint does not stop"

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=2**28)
        for path in ("chat/completions", "responses", "messages", "completions"):
            app.router.add_post(f"/v1/{path}", self._chat)
        app.router.add_post("/update_weights_from_disk", self._chat)
        app.router.add_route("*", "/{path:.*}", self._other)
        async with serving(app) as port:
            self.url = f"http://127.0.0.1:{port}/v1"
            self._listening.set()
            await self._stop.wait()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        received = _received(request, await request.json())
        self.requests.append(received)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self.arrived.set()
        try:
            return await (self._queued.popleft() if self._queued else self.otherwise)(request, received)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            self.left.set()
            raise
        finally:
            self.in_flight -= 1

    async def _other(self, request: web.Request) -> web.StreamResponse:
        received = _received(request)
        self.others.append(received)
        if request.path == "/v1/models":
            return await self.models(request, received)
        return web.json_response({"error": {"message": "no such path"}}, status=404)


def _received(request: web.Request, body: dict[str, Any] | None = None) -> Received:
    headers = {name.lower(): value for name, value in request.headers.items()}
    return Received(request.method, request.path, headers, body or {})
