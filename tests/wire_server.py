"""A real HTTP server on 127.0.0.1 that responses by the wires, as an endpoint does, with whatever response it is told.

It runs in a thread of its own, so that the vendors' synchronous clients can be its judges:

    with WireServer() as server:
        server.response = LLMResponse.from_text("hi")
        OpenAI(base_url=f"{server.url}/v1", api_key="k").chat.completions.create(...)
        assert server.asked[-1].request.messages[0]["content"] == "hello"
"""

import asyncio
import threading
from typing import Any, Self

from aiohttp import web

from ares_exp.agents.interception.agent_endpoint import client_keys, wire_at
from ares_exp.agents.interception.served_generate_content import split_path
from ares_exp.agents.interception.served_wire import Asked, Wire
from ares_exp.errors import WireFormatError
from ares_exp.llms.response import LLMResponse
from ares_exp.llms.wire import parse_body


class WireServer:
    def __init__(self) -> None:
        self.response = LLMResponse.from_text("hi")
        self.keepalives = 0
        self.fails_with: str | None = None
        self.bodies: list[Any] = []
        self.asked: list[Asked] = []
        self.keys: list[str | None] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/{path:.*}", self._respond)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _respond(self, http: web.Request) -> web.StreamResponse:
        path, fields = split_path(http.path, http.query.get("alt", ""))
        wire = wire_at(path)
        if wire is None:
            raise web.HTTPNotFound
        self.keys.append(next(iter(client_keys(http.headers, http.query)), None))
        try:
            body = parse_body(await http.read())
            if path == wire.count_path:
                return web.Response(body=wire.count(body), content_type="application/json")
            self.bodies.append(body)
            asked = wire.read({**body, **fields})
        except WireFormatError as error:
            return web.Response(status=400, body=wire.error(400, str(error)), content_type="application/json")
        self.asked.append(asked)
        return await self._stream(wire, asked, http) if asked.streamed else self._whole(wire, asked)

    def _whole(self, wire: Wire, asked: Asked) -> web.Response:
        if self.fails_with is not None:
            return web.Response(status=500, body=wire.error(500, self.fails_with), content_type="application/json")
        return web.Response(body=wire.whole(asked, self.response), content_type="application/json")

    async def _stream(self, wire: Wire, asked: Asked, http: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(http)
        await stream.write(b"".join(self.written(wire, asked)))
        await stream.write_eof()
        return stream

    def written(self, wire: Wire, asked: Asked) -> list[bytes]:
        """The items of a stream, in order."""
        alive = [wire.keepalive(asked, number) for number in range(1, self.keepalives + 1)]
        return [wire.opening(asked), *alive, *wire.events(asked, self.response, self.keepalives)]


def event_data(written: bytes) -> list[Any]:
    import json

    blocks = written.decode().split("\n\n")
    lines = [line for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
