"""The endpoint: an HTTP server with the wire formats of LLM providers, for connections from forwarded ports.

The server does not listen on a port. It passes each request of an agent to the `Line` of the agent's episode, and
returns the response in the wire format of the request.

A response may take longer than the time limit of the agent's HTTP client. Until it is available, the endpoint therefore
sends keepalives. A stream starts immediately, and its keepalives are events. If the client did not request a stream,
the keepalives are spaces, which JSON parsers ignore before an object. They start after half a minute. The end of a
response is sent only after the response was recorded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from ares_exp.agents.interception.line import Line, LineClosedError, Turn
from ares_exp.agents.interception.served_formats import ChatCompletionsWire, MessagesWire, ResponsesWire
from ares_exp.agents.interception.served_generate_content import GenerateContentWire, split_path
from ares_exp.agents.interception.served_wire import Asked, Wire
from ares_exp.errors import WireFormatError
from ares_exp.llms.wire import parse_body

WIRES: tuple[Wire, ...] = (ChatCompletionsWire(), ResponsesWire(), MessagesWire(), GenerateContentWire())
"""All supported wire formats. The first one is the format of errors for requests to unknown paths."""


def wire_at(path: str) -> Wire | None:
    """Returns the wire format for requests to the URL path `path`, or `None` if the path is unknown."""
    return next((wire for wire in WIRES if path in (wire.path, wire.count_path)), None)


IDLE_SEC = 600.0
"""Time limit in seconds for an idle connection, and for receiving a request body."""
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_HEAD_LINE_BYTES = 32 * 1024
MAX_HEADERS = 128

_unused_log = logging.getLogger(f"{__name__}.access")
_unused_log.disabled = True


class Connection(web.RequestHandler):
    """An HTTP connection from an agent. It may transport several requests, one after the other.

    Attributes:
        line: `Line` that connects the agent to its LLM.
        request: HTTP request that is being handled; `None` between requests.
        is_half_closed: Whether the client has closed its sending side, but may still read the response.
        served: Call whose response was sent completely for the last HTTP request; `None` if there is none.
        waits_for: Call whose response the client waits for; `None` if it does not wait.
    """

    def __init__(self, server: web.Server, line: Line) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=_unused_log,
            keepalive_timeout=IDLE_SEC,
            max_line_size=MAX_HEAD_LINE_BYTES,
            max_field_size=MAX_HEAD_LINE_BYTES,
            max_headers=MAX_HEADERS,
        )
        self.line = line
        self.request: web.BaseRequest | None = None
        self.is_half_closed = False
        self.served: Turn | None = None
        self.waits_for: Turn | None = None

    async def stream(self, request: web.BaseRequest, wire: Wire, asked: Asked, turn: Turn) -> web.StreamResponse:
        """Sends the response to `request` as a stream of events.

        Raises `ConnectionError` if the client has disconnected, and `LineClosedError` if the line was closed.
        """
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await out.prepare(request)
        if opening := wire.opening(asked):
            await out.write(opening)
        keepalives = 0
        while (response := await turn.respond(self.line.keepalive_sec)) is None:
            keepalives += 1
            await self._write(out, wire.keepalive(asked, keepalives))
        *events, last = wire.events(asked, response, keepalives)
        await self._write(out, b"".join(events))
        await self._end(out, last, turn)
        return out

    async def whole(
        self, request: web.BaseRequest, wire: Wire, asked: Asked, turn: Turn, *, starts_sec: float
    ) -> web.StreamResponse:
        """Sends the response as one JSON body, with keepalives after `starts_sec`. Raises the errors of `stream`."""
        out = web.StreamResponse(headers={"Content-Type": "application/json"})
        response = await turn.respond(starts_sec)
        if response is None:
            await out.prepare(request)
        while response is None:
            await self._write(out, b" ")
            response = await turn.respond(self.line.keepalive_sec)
        text = wire.whole(asked, response)
        if not out.prepared:
            out.content_length = len(text)
            await out.prepare(request)
        await self._end(out, text, turn)
        return out

    async def _write(self, out: web.StreamResponse, data: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("The client closed the connection.")
        await out.write(data)

    async def _end(self, out: web.StreamResponse, last: bytes, turn: Turn) -> None:
        """Ends the HTTP response and marks the call as delivered. If the connection breaks, the mark is removed."""
        await self._write(out, last)
        await out.write_eof()
        if self.transport is not None and not self.is_half_closed:
            turn.is_delivered = True
            self.served = turn

    @contextmanager
    def waiting_for(self, turn: Turn) -> Iterator[None]:
        """Counts the client in `turn.waiting`, until the context exits or the connection is closed."""
        self.waits_for = turn
        turn.waiting += 1
        if self.is_half_closed:
            self._wait_no_more()
        try:
            yield
        finally:
            self._wait_no_more()

    def _wait_no_more(self) -> None:
        if self.waits_for is not None:
            self.waits_for.waiting -= 1
            self.waits_for = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Rejects a malformed HTTP request. Its wire format is unknown, so the error has the first format in `WIRES`.

        Unlike the base class, logs no traceback, unless the error is on the side of the server.
        """
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        found = (message or "").strip().partition("\n")[0].replace(self.line.key, "***").partition(". Please")[0]
        reason = f"Expected a valid HTTP request, got an invalid one ({found:.200})."
        self.line.refuse(f"{status}, {reason}")
        response = _json(WIRES[0].error(status, reason), status=status)
        response.force_close()
        return response

    def eof_received(self) -> bool:  # type: ignore[override]
        """Is called when the client closes its sending side. Keeps the connection open if a request is complete.

        The client may have disconnected, or may still read the response. The endpoint cannot know which is true, so the
        client no longer counts as waiting, and the response does not count as delivered.
        """
        self.is_half_closed = self.request is not None and self.request.content.is_eof()
        if self.is_half_closed:
            self._wait_no_more()
        return self.is_half_closed

    def connection_lost(self, exc: BaseException | None) -> None:
        """Is called when the connection is closed. The client then no longer counts as waiting.

        If the connection broke, its last response is marked as not delivered, because the client may not have it.
        """
        self._wait_no_more()
        if exc is not None and self.served is not None:
            self.served.is_delivered = False
        super().connection_lost(exc)


WHOLE_STARTS_SEC = 30.0
"""Time in seconds after which a client that did not request a stream gets the first keepalive."""
UNWIND_SEC = 2.0
_LARGE_BYTES = 1024 * 1024  # of a request body that is parsed in a thread
_LONGEST_CONTEXT = 1_000_000
_MODELS = re.compile(r"/v1(?:beta)?/models(?:/(.+))?")

_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = WeakKeyDictionary()


class Endpoint:
    """The HTTP server for the agents whose episodes run on one event loop."""

    def __init__(self, *, whole_starts_sec: float = WHOLE_STARTS_SEC) -> None:
        """Creates a server without connections. `whole_starts_sec` replaces `WHOLE_STARTS_SEC`."""
        self._loop = asyncio.get_running_loop()
        self._whole_starts_sec = whole_starts_sec
        self._server = web.Server(self._handle, request_factory=self._request)
        self._connections: dict[Line, set[Connection]] = {}

    @classmethod
    def of_loop(cls) -> Endpoint:
        """Returns the endpoint of the running event loop, which the first call creates."""
        loop = asyncio.get_running_loop()
        if (endpoint := _of_loops.get(loop)) is None:
            endpoint = _of_loops[loop] = cls()
        return endpoint

    async def serve(self, line: Line, client: socket.socket) -> None:
        """Serves a connection from an agent in the background. Its requests are passed to `line`."""
        connections = self._connections.setdefault(line, set())
        connections -= {one for one in connections if one.transport is None}
        made = Connection(self._server, line)
        try:
            await self._loop.connect_accepted_socket(lambda: made, client)
        except BaseException:
            client.close()
            raise
        connections.add(made)

    async def close(self, line: Line) -> None:
        """Closes a line with its connections, and cancels its calls. May be called several times."""
        await line.close()
        open_ones = self._connections.pop(line, set())
        for connection in open_ones:
            if isinstance(connection.transport, asyncio.WriteTransport):
                connection.transport.abort()
        await asyncio.gather(*(connection.shutdown(UNWIND_SEC) for connection in open_ones))

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        made = web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=MAX_BODY_BYTES)
        protocol.request = made
        return made

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Responds to one HTTP request. Closes the connection if it cannot be used for another request."""
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.served = None
        path = request.path.rstrip("/") or "/"
        if path != "/" and not path.startswith("/v1"):
            path = f"/v1{path}"
        path, fields = split_path(path, request.query.get("alt", "json"))
        wire = wire_at(path)
        try:
            response = await self._respond(request, connection, path, fields, wire)
        except _RefusedError as refused:
            if refused.status != 426 and request.method != "HEAD":  # clients expect these to fail
                connection.line.refuse(f"{request.method:.20} {request.path:.100}: {refused.status}, {refused!s:.300}")
            shown = wire or WIRES[0]
            response = _json(shown.error(refused.status, str(refused)), status=refused.status)
        except (LineClosedError, ConnectionError):
            # The connection is closed without a response, so that the agent does not see an artificial error.
            if request.transport is not None:
                request.transport.abort()
            response = web.Response()
        connection.request = None
        is_broken = request.content.exception() is not None
        if is_broken:
            request.content.feed_eof()  # otherwise, aiohttp reads the rest and logs a traceback
        if is_broken or connection.is_half_closed:
            response.force_close()
        return response

    async def _respond(
        self,
        request: web.BaseRequest,
        connection: Connection,
        path: str,
        fields: Mapping[str, Any],
        wire: Wire | None,
    ) -> web.StreamResponse:
        line = connection.line
        if path == "/" and request.method in ("HEAD", "GET"):
            return web.Response()
        listed = _MODELS.fullmatch(path) if request.method == "GET" else None
        if wire is None and listed is None:
            paths = ", ".join(wire.path for wire in WIRES)
            raise _RefusedError(404, f"{request.method:.20} {request.path:.200} is not supported. Use one of {paths}.")
        keys = client_keys(request.headers, request.query)
        if not any(line.opens_for(key) for key in keys):
            got = "another key" if keys else "no key"
            raise _RefusedError(
                401,
                f"Expected the key in the environment variable ARES_LLM_KEY, got {got}. Send it in the header "
                "`Authorization: Bearer KEY` or `x-api-key: KEY`.",
            )
        if request.method == "GET" and "upgrade" in request.headers:
            raise _RefusedError(426, "WebSocket connections are not supported. Send a POST request.")
        if wire is None:
            return _json(_models(listed[1] if listed else None))
        if request.method != "POST":
            raise _RefusedError(405, f"Expected a POST to {path}, got {request.method:.20}.")
        try:
            body = await _body(request)
            if path == wire.count_path and (counted := wire.count(body)) is not None:
                return _json(counted)
            asked = wire.read({**body, **fields} if isinstance(body, dict) else body)
        except WireFormatError as error:
            raise _RefusedError(400, str(error)) from None
        turn = line.ask(asked.request, request.headers)
        with connection.waiting_for(turn):
            if asked.streamed:
                return await connection.stream(request, wire, asked, turn)
            return await connection.whole(request, wire, asked, turn, starts_sec=self._whole_starts_sec)


class _RefusedError(Exception):
    """A rejected request. The client gets the HTTP status `status` and the error's message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def client_keys(headers: Mapping[str, str], query: Mapping[str, str]) -> list[str]:
    """Returns the API keys in a request: from all headers that LLM clients use, and from the query parameter `key`."""
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    named = [headers.get(name) for name in ("x-api-key", "x-goog-api-key", "api-key")]
    keys = [bearer.strip() if scheme.lower() == "bearer" else None, *named, query.get("key")]
    return [key for key in keys if key]


async def _body(request: web.BaseRequest) -> Any:
    """Reads and parses the JSON body of a request.

    Raises `_RefusedError` if the body is too large, too slow or cannot be decoded, and `WireFormatError` if it is not
    valid JSON.
    """
    try:
        async with asyncio.timeout(IDLE_SEC):
            raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        limit = MAX_BODY_BYTES / 2**20
        raise _RefusedError(413, f"Expected a request body of at most {limit:g} MiB, got a larger one.") from None
    except web.RequestPayloadError:
        if request.transport is None:
            raise ConnectionResetError("The client closed the connection.") from None
        encoding = request.headers.get("content-encoding", "identity")
        raise _RefusedError(
            400, f"The request body cannot be decoded with the content encoding {encoding:.20} of its header."
        ) from None
    except TimeoutError:
        raise _RefusedError(408, f"Expected the complete request body within {IDLE_SEC:g} s.") from None
    return await asyncio.to_thread(parse_body, raw) if len(raw) > _LARGE_BYTES else parse_body(raw)


def _json(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _models(name: str | None) -> bytes:
    """Returns the JSON description of the model `name`, or a list with the model `policy` if `name` is `None`.

    A description contains the fields of all wire formats, so that the clients of all formats accept it.
    """
    created = int(time.time())
    model = {
        "id": name or "policy",
        "object": "model",
        "type": "model",
        "display_name": name or "policy",
        "created": created,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        "owned_by": "ares_exp",
        "max_input_tokens": _LONGEST_CONTEXT,
        "max_tokens": _LONGEST_CONTEXT,
        "name": f"models/{name or 'policy'}",
        "inputTokenLimit": _LONGEST_CONTEXT,
        "outputTokenLimit": _LONGEST_CONTEXT,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
    listed = {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
    listed["models"] = [model]
    return json.dumps(model if name else listed).encode()
