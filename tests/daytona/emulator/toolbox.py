"""The routes of the daemon in each sandbox: commands and files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiohttp import BodyPartReader, web
from daytona_toolbox_api_client_async import models

from tests.daytona.emulator import files
from tests.daytona.emulator.boxes import Box, run
from tests.daytona.emulator.files import DAEMON
from tests.daytona.emulator.sandboxes import GONE, Sandbox
from tests.daytona.emulator.terminals import connected
from tests.daytona.emulator.wire import BODY, Refusal, answer, received

if TYPE_CHECKING:
    from tests.daytona.emulator.emulator import Emulator


class Toolbox:
    """The requests of the daemons, one method per route."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    def routes(self) -> list[web.RouteDef]:
        one = "/toolbox/{id}"
        return [
            web.post(one + "/process/execute", self.execute),
            web.get(one + "/process/pty/create-connect", self.create_and_connect_terminal),
            web.delete(one + "/process/pty/{terminal}", self.delete_terminal),
            web.post(one + "/files/bulk-upload", self.bulk_upload),
            web.post(one + "/files/bulk-download", self.bulk_download),
            web.delete(one + "/files", self.delete),
        ]

    async def execute(self, request: web.Request) -> web.Response:
        asked = await received(request, models.ExecuteRequest)
        box = self._box(request)
        command = asked["command"]
        if not command.strip() or asked.get("cwd") or asked.get("envs"):
            raise Refusal(400, "expected a command alone, which the backend sends", "BAD_REQUEST", DAEMON)
        exit_code, output = await run(box, command)
        return answer(models.ExecuteResponse, {"exitCode": exit_code, "result": output})

    async def create_and_connect_terminal(self, request: web.Request) -> web.WebSocketResponse:
        asked = request.query
        name, sandbox, box = asked["id"], self._sandbox(request), self._box(request)
        if name in sandbox.terminals:
            raise Refusal(409, f"PTY session with ID '{name}' already exists", "CONFLICT", DAEMON)
        terminal = await box.open_terminal(columns=int(asked["cols"]), lines=int(asked["rows"]))
        sandbox.terminals[name] = terminal
        return await connected(request, terminal, self._emulator.traffic)

    async def delete_terminal(self, request: web.Request) -> web.Response:
        terminal = self._sandbox(request).terminals.pop(request.match_info["terminal"], None)
        if terminal is None:
            raise Refusal(404, "PTY session not found", "NOT_FOUND", DAEMON)
        await terminal.close()
        return web.json_response({"message": "PTY session deleted"})

    async def bulk_upload(self, request: web.Request) -> web.Response:
        box, wrong, targets = self._box(request), [], {}
        async for part in _parts(request):
            index, _, kind = (part.name or "").rpartition(".")
            if kind == "path":
                targets[index] = (await part.text()).strip()
            elif kind == "file" and index in targets:
                if error := await files.receive(box, part, targets[index]):
                    wrong.append(f"{targets[index]}: {error}")
            else:
                wrong.append(f"file[{index}]: missing .path metadata")
        request[BODY] = list(targets.values())
        if wrong:
            return web.json_response({"errors": wrong}, status=400)
        return web.json_response({"files": [{"path": path} for path in targets.values()]})

    async def bulk_download(self, request: web.Request) -> web.StreamResponse:
        asked = await received(request, models.FilesDownloadRequest)
        return await files.send_all(self._box(request), asked["paths"], request)

    async def delete(self, request: web.Request) -> web.Response:
        await files.delete(self._box(request), request.query["path"])
        return web.Response(status=204)

    def _sandbox(self, request: web.Request) -> Sandbox:
        sandbox = self._emulator.service.by_id.get(request.match_info["id"])
        if sandbox is None or sandbox.state in GONE:
            raise Refusal(404, f"Sandbox with ID {request.match_info['id']} not found", "NOT_FOUND")
        return sandbox

    def _box(self, request: web.Request) -> Box:
        sandbox = self._sandbox(request)
        if sandbox.box is None or sandbox.dies.is_set():
            raise Refusal(400, "failed to get runner info: Sandbox is not started", "BAD_REQUEST")
        return sandbox.box


async def _parts(request: web.Request) -> AsyncIterator[BodyPartReader]:
    parts = await request.multipart()
    while isinstance(part := await parts.next(), BodyPartReader):
        yield part
