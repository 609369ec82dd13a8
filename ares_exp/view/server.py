"""The server: the page, and the payloads that it asks for. It only reads, unless it is to pass on orders."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import TypeVar

from aiohttp import web

from ares_exp.control.orders import MAX_BYTES, Order, look
from ares_exp.ctl.giving import give_to_run
from ares_exp.ctl.targets import RunTarget
from ares_exp.errors import ConfigError, TrajectoryFormatError
from ares_exp.pages.page import json_text, page_foot, page_head, policy
from ares_exp.pages.run_payload import payload_of
from ares_exp.records.run_dir import RunDir
from ares_exp.view.guard import NAMES, Guard
from ares_exp.view.shelf import Shelf, ShelvedRun

T = TypeVar("T")

CONNECT = "'self'"
ORDER = "/api/order"
ANSWERED_SEC = 5.0
"""How long it is waited for what comes of an order."""
END_SEC = 2.0
READ_SEC = 300.0
"""How long an answer may take: a trajectory is read whole."""


class Server:
    """The application of one folder."""

    def __init__(self, shelf: Shelf, *, control: bool = False) -> None:
        """Keeps the arguments.

        Args:
            shelf: The folder.
            control: Whether orders to runs are taken.
        """
        self._shelf = shelf
        self._control = control
        self.guard = Guard(policy(connect=CONNECT), posted=ORDER if control else None)

    def application(self) -> web.Application:
        """Makes the application."""
        application = web.Application(client_max_size=MAX_BYTES, middlewares=[self.guard.middleware()])
        application.router.add_get("/", self._page)
        application.router.add_get("/api/runs", self._runs)
        application.router.add_get("/api/run", self._run)
        application.router.add_get("/api/episode", self._episode)
        if self._control:
            application.router.add_post(ORDER, self._order)
        return application

    async def _page(self, request: web.Request) -> web.Response:
        listed = await _in_thread(self._shelf.listed)
        payload = payload_of(listed, live=True, control=self._control)
        text = page_head(f"ares-exp: {self._shelf.path}", connect=CONNECT) + page_foot(payload)
        return web.Response(text=text, content_type="text/html")

    async def _runs(self, request: web.Request) -> web.Response:
        text = json_text({"runs": await _in_thread(self._shelf.listed)})
        return _json(request, text, sha256(text.encode()).hexdigest()[:32])

    async def _run(self, request: web.Request) -> web.Response:
        run = await _in_thread(lambda: self._found(request))
        if self._control:
            await _in_thread(lambda: look(RunDir(run.path).control))
        return _json(request, *await _in_thread(run.text))

    async def _order(self, request: web.Request) -> web.Response:
        """Passes on an order, and answers with its outcome."""
        try:
            asked = json.loads(await request.text())
            key, verb = str(asked.pop("run")), asked.pop("verb")
            order = Order.made(verb, **asked)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
            raise web.HTTPBadRequest(text="Expected a JSON object with `run`, `verb` and what it takes.") from None
        except ConfigError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from None
        run = await _in_thread(lambda: self._run_of(key))
        answer = await _in_thread(lambda: give_to_run(RunTarget(run.path), order, wait_sec=ANSWERED_SEC))
        return web.json_response({"outcome": answer.outcome, "says": answer.says})

    async def _episode(self, request: web.Request) -> web.Response:
        run, episode_id = await _in_thread(lambda: self._found(request)), request.query.get("id", "")
        try:
            return _json(request, *await _in_thread(lambda: run.episode_text(episode_id)))
        except KeyError:
            raise web.HTTPNotFound(text="There is no trajectory of that episode.") from None

    def _found(self, request: web.Request) -> ShelvedRun:
        return self._run_of(request.query.get("run", ""))

    def _run_of(self, key: str) -> ShelvedRun:
        try:
            return self._shelf.run(key)
        except KeyError:
            raise web.HTTPNotFound(text="There is no such run.") from None


async def _in_thread(read: Callable[[], T]) -> T:
    try:
        return await asyncio.wait_for(asyncio.to_thread(read), READ_SEC)
    except (ConfigError, TrajectoryFormatError) as error:
        raise web.HTTPUnprocessableEntity(text=str(error)) from None
    except OSError as error:
        raise web.HTTPUnprocessableEntity(text=f"{error.filename}: {error.strerror}") from None


def _json(request: web.Request, text: str, tag: str) -> web.Response:
    etag = f'"{tag}"'
    if request.headers.get("If-None-Match") == etag:
        return web.Response(status=304, headers={"ETag": etag})
    return web.Response(text=text, content_type="application/json", headers={"ETag": etag})


@asynccontextmanager
async def listening(shelf: Shelf, *, port: int, control: bool = False) -> AsyncIterator[str]:
    """Serves a folder on the loopback interface while the body runs; yields the first address, with its token.

    Args:
        shelf: The folder.
        port: Where; 0 for any that is free.
        control: Whether orders to runs are taken.

    Raises:
        ConfigError: The port is in use, or not allowed.
    """
    server = Server(shelf, control=control)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=END_SEC)
    await runner.setup()
    try:
        site = web.TCPSite(runner, NAMES[0], port)
        try:
            await site.start()
        except OSError as error:
            reason = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"Cannot listen on port {port}: {reason}. Choose another with `--port`.") from None
        server.guard.port = runner.addresses[0][1]
        yield server.guard.address
    finally:
        await runner.cleanup()
