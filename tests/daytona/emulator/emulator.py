"""The service as a whole: its address, what it was asked, what it does wrong, and its end."""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Self

from aiohttp import web

from ares_exp.cancellation import cancel_all
from ares_exp.errors import ContainerError
from tests.daytona.emulator.boxes import Backend, Boxes, Source
from tests.daytona.emulator.faults import Fault, Faults
from tests.daytona.emulator.sandboxes import DEFAULT_SNAPSHOT, Sandbox, Sandboxes, Snapshot
from tests.daytona.emulator.server import Api
from tests.daytona.emulator.terminals import Traffic
from tests.daytona.emulator.toolbox import Toolbox
from tests.daytona.emulator.wire import BODY, HALF, Cut, InvalidMessage, Refusal, Request, body_of

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MAX_BODY_BYTES = 1 << 31


class Emulator:
    """A Daytona service on 127.0.0.1 while its context lasts. At its end nothing is left of its sandboxes.

    Attributes:
        url: Base address of the API (`DAYTONA_API_URL`).
        api_key: What requests must carry (`DAYTONA_API_KEY`).
        requests: Everything that was asked, in order.
        unknown: Requests that are not implemented, as `"METHOD path"`.
        invalid: Messages that the SDK's models do not take: the client's, or bugs of this emulator. They fail the
            context at its end.
        faults: What it does wrong.
        traffic: How the messages of terminals fare.
        service: Its sandboxes and snapshots.
    """

    def __init__(self, *, box: Backend = "local", port: int = 0) -> None:
        """Starts nothing yet."""
        self.api_key = f"dtn_{secrets.token_hex(16)}"
        self.requests: list[Request] = []
        self.unknown: list[str] = []
        self.invalid: list[str] = []
        self.faults = Faults()
        self.traffic = Traffic()
        self.traffic.input_passes.set()
        self._boxes = Boxes(box)
        self.service = Sandboxes(self._boxes)
        self.service.snapshots[DEFAULT_SNAPSHOT] = Snapshot(DEFAULT_SNAPSHOT, Source("FROM debian:bookworm-slim\n"))
        self._port = port
        self._runner: web.AppRunner | None = None
        self.base = ""

    @property
    def url(self) -> str:
        return f"{self.base}/api"

    @property
    def sandboxes(self) -> dict[str, Sandbox]:
        return self.service.by_id

    def lose(self, sandbox_id: str, state: str = "destroyed") -> None:
        """The sandbox dies by itself, and is forgotten or shown in another state; who waits for it gets no answer."""
        self.service.lose(self.sandboxes[sandbox_id], state)

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        return self

    async def _open(self) -> None:
        await self._boxes.open()
        app = web.Application(middlewares=[self._handle], client_max_size=_MAX_BODY_BYTES)
        app.add_routes(Api(self).routes())
        app.add_routes(Toolbox(self).routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=1024)
        await site.start()
        self.base = "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        assert not self.invalid, self.invalid

    async def close(self) -> None:
        """Removes every sandbox and ends the service. Idempotent."""
        runner, self._runner = self._runner, None
        try:
            for site in list(runner.sites) if runner is not None else ():
                await site.stop()
            await self.service.close()
            if runner is not None:
                await runner.cleanup()
        finally:
            await self._boxes.close()

    @web.middleware
    async def _handle(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        body = await request.read() if request.content_type == "application/json" else b""
        record = Request(request.method, request.path, dict(request.query), body_of(body, request.content_type))
        self.requests.append(record)
        try:
            response = await self._answer(request, handler)
        except Cut:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()  # no client receives it
        record.status = response.status
        record.body = request.get(BODY, record.body)
        return response

    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        fault = self.faults.next(request.method, request.path)
        if fault is None:
            return await self._serve(request, handler)
        if fault.kind == "status":
            return _faulty(fault, request)
        if fault.kind == "drop":
            raise Cut
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        if fault.kind == "half":
            request[HALF] = True
        if fault.kind == "lost":
            self.service.lose(self.service.find(request.match_info["id"]))
        response = await self._serve(request, handler)
        if fault.kind == "status_after":
            return _faulty(fault, request)
        if fault.kind == "drop_after":
            raise Cut
        if fault.kind == "half":
            await _send_half(request, response)
        return response

    async def _serve(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return Refusal(401, "Invalid credentials").response(request)
        if isinstance(request.match_info.http_exception, web.HTTPException):
            self.unknown.append(f"{request.method} {request.path}")
            return Refusal(404, f"Cannot {request.method} {request.path}").response(request)
        try:
            return await self._while_it_lives(request, handler)
        except Refusal as refusal:
            return refusal.response(request)
        except InvalidMessage as error:
            self.invalid.append(f"{request.method} {request.path}: {error}")
            return Refusal(500, f"Invalid message: {error}").response(request)
        except (ContainerError, OSError) as error:
            raise Cut from error

    async def _while_it_lives(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Handles a request; one to the daemon of a sandbox gets no answer when the sandbox dies."""
        if not request.path.startswith("/toolbox/"):
            return await handler(request)
        sandbox = self.sandboxes.get(request.match_info["id"])
        if sandbox is None or sandbox.dies.is_set():
            return await handler(request)
        work = asyncio.ensure_future(handler(request))
        death = asyncio.create_task(sandbox.dies.wait())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Cut
            return work.result()
        finally:
            await cancel_all(work, death)


def _faulty(fault: Fault, request: web.Request) -> web.Response:
    if fault.body is None:
        response = Refusal(fault.status, "Something went wrong on purpose").response(request)
    elif isinstance(fault.body, str):
        response = web.Response(text=fault.body, status=fault.status)
    else:
        response = web.json_response(fault.body, status=fault.status)
    if fault.retry_after is not None:
        response.headers["Retry-After"] = str(fault.retry_after)
    return response


async def _send_half(request: web.Request, response: web.StreamResponse) -> None:
    if isinstance(response, web.Response) and not response.prepared:
        body = response.body if isinstance(response.body, bytes) else b""
        half = web.StreamResponse(status=response.status, headers=response.headers)
        half.content_length = len(body)
        with contextlib.suppress(OSError):
            await half.prepare(request)
            await half.write(body[: len(body) // 2])
    raise Cut
