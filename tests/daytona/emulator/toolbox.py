"""The routes of the daemon in each sandbox: commands and files."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from aiohttp import BodyPartReader, web
from daytona_toolbox_api_client_async import models

from ares_exp.containers.terminal import Terminal
from tests.daytona.emulator import commands, files
from tests.daytona.emulator.boxes import Box
from tests.daytona.emulator.sandbox import GONE, Sandbox
from tests.daytona.emulator.sessions import Session
from tests.daytona.emulator.terminals import connected
from tests.daytona.emulator.wire import BODY, Refusal, answer, check, received

if TYPE_CHECKING:
    from tests.daytona.emulator.emulator import Emulator

DAEMON = "DAYTONA_DAEMON"
MAX_ARGUMENT_BYTES = 128 * 1024
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Toolbox:
    """What is asked of the daemons, one method per route."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    def routes(self) -> list[web.RouteDef]:
        one = "/toolbox/{id}"
        return [
            web.post(one + "/process/execute", self.execute),
            web.get(one + "/process/session", self.list_sessions),
            web.post(one + "/process/session", self.create_session),
            web.get(one + "/process/session/{session}", self.get_session),
            web.delete(one + "/process/session/{session}", self.delete_session),
            web.post(one + "/process/session/{session}/exec", self.session_execute),
            web.get(one + "/process/session/{session}/command/{command}", self.session_command),
            web.get(one + "/process/session/{session}/command/{command}/logs", self.session_logs),
            web.post(one + "/process/pty", self.create_terminal),
            web.get(one + "/process/pty/create-connect", self.create_and_connect_terminal),
            web.get(one + "/process/pty/{terminal}/connect", self.connect_terminal),
            web.delete(one + "/process/pty/{terminal}", self.delete_terminal),
            web.post(one + "/files/bulk-upload", self.bulk_upload),
            web.post(one + "/files/bulk-download", self.bulk_download),
            web.get(one + "/files/download", self.download),
            web.post(one + "/files/upload", self.upload),
            web.post(one + "/files/upload-v2", self.upload),
            web.post(one + "/files/folder", self.folder),
            web.get(one + "/files/info", self.info),
            web.delete(one + "/files", self.delete),
            web.get(one + "/work-dir", self.work_dir),
            web.get(one + "/user-home-dir", self.home_dir),
        ]

    async def execute(self, request: web.Request) -> web.Response:
        asked = await received(request, models.ExecuteRequest)
        box = self._box(request)
        command, env = asked["command"], asked.get("envs") or {}
        if not command.strip():
            raise Refusal(400, "command cannot be empty or whitespace-only", "BAD_REQUEST", DAEMON)
        if bad := next((name for name in env if not _NAME.fullmatch(name)), None):
            raise Refusal(400, f"invalid environment variable name: '{bad}'", "BAD_REQUEST", DAEMON)
        limit = self._emulator.max_command_bytes
        if limit is not None and len(command.encode("utf-8", "replace")) >= limit:
            outcome = commands.Outcome(-1, f"fork/exec {box.shell}: argument list too long")
        else:
            outcome = await commands.run(
                box, command, cwd=asked.get("cwd"), env=env, timeout=asked.get("timeout") or None
            )
        if outcome.timed_out:
            raise Refusal(408, "command execution timeout", "PROCESS_EXECUTION_TIMEOUT", DAEMON)
        return answer(models.ExecuteResponse, {"exitCode": outcome.exit_code, "result": outcome.output})

    async def list_sessions(self, request: web.Request) -> web.Response:
        self._box(request)
        return web.json_response([await _session(name, one) for name, one in self._sandbox(request).sessions.items()])

    async def create_session(self, request: web.Request) -> web.Response:
        name = (await received(request, models.CreateSessionRequest))["sessionId"]
        box, sessions = self._box(request), self._sandbox(request).sessions
        if name in sessions:
            raise Refusal(409, "session already exists", "CONFLICT", DAEMON)
        sessions[name] = await Session.open(box, name)
        return web.Response(status=201)

    async def get_session(self, request: web.Request) -> web.Response:
        return answer(models.Session, await _session(*self._session(request)))

    async def delete_session(self, request: web.Request) -> web.Response:
        name, session = self._session(request)
        del self._sandbox(request).sessions[name]
        await session.close()
        return web.Response(status=204)

    async def session_execute(self, request: web.Request) -> web.Response:
        asked = await received(request, models.SessionExecuteRequest)
        is_async = bool(asked.get("runAsync") or asked.get("async"))
        done = await self._session(request)[1].execute(asked["command"], is_async=is_async)
        return answer(models.SessionExecuteResponse, done, status=202 if is_async else 200)

    async def session_command(self, request: web.Request) -> web.Response:
        return answer(models.Command, await self._session(request)[1].described(self._command(request)))

    async def session_logs(self, request: web.Request) -> web.Response:
        logs = await self._session(request)[1].logs(self._command(request))
        return answer(models.SessionCommandLogsResponse, logs)

    async def create_terminal(self, request: web.Request) -> web.Response:
        asked = await received(request, models.PtyCreateRequest)
        await self._open_terminal(request, asked["id"], asked.get("cols") or 80, asked.get("rows") or 24)
        return answer(models.PtyCreateResponse, {"sessionId": asked["id"]}, status=201)

    async def create_and_connect_terminal(self, request: web.Request) -> web.WebSocketResponse:
        asked = request.query
        return await connected(
            request, await self._open_terminal(request, asked["id"], int(asked["cols"]), int(asked["rows"]))
        )

    async def connect_terminal(self, request: web.Request) -> web.WebSocketResponse:
        return await connected(request, self._terminal(request)[1])

    async def delete_terminal(self, request: web.Request) -> web.Response:
        name, terminal = self._terminal(request)
        del self._sandbox(request).terminals[name]
        await terminal.close()
        return web.json_response({"message": "PTY session deleted"})

    async def _open_terminal(self, request: web.Request, name: str, columns: int, lines: int) -> Terminal:
        terminals = self._sandbox(request).terminals
        if name in terminals:
            raise Refusal(409, f"PTY session with ID '{name}' already exists", "CONFLICT", DAEMON)
        terminal = await self._box(request).open_terminal(columns=columns, lines=lines)
        terminals[name] = terminal
        return terminal

    def _terminal(self, request: web.Request) -> tuple[str, Terminal]:
        name, terminals = request.match_info["terminal"], self._sandbox(request).terminals
        if name not in terminals:
            raise Refusal(404, "PTY session not found", "NOT_FOUND", DAEMON)
        return name, terminals[name]

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

    async def download(self, request: web.Request) -> web.StreamResponse:
        return await files.send_one(self._box(request), _path(request), request)

    async def upload(self, request: web.Request) -> web.Response:
        box, path = self._box(request), _path(request)
        async for part in _parts(request):
            if part.name == "file" and (error := await files.receive(box, part, path)):
                raise Refusal(400, error, "BAD_REQUEST", DAEMON)
        return web.Response()

    async def folder(self, request: web.Request) -> web.Response:
        await files.make_folder(self._box(request), _path(request), request.query.get("mode") or "0755")
        return web.Response(status=201)

    async def info(self, request: web.Request) -> web.Response:
        return answer(models.FileInfo, await files.info(self._box(request), _path(request)))

    async def delete(self, request: web.Request) -> web.Response:
        await files.delete(self._box(request), _path(request), is_recursive=request.query.get("recursive") == "true")
        return web.Response(status=204)

    async def work_dir(self, request: web.Request) -> web.Response:
        return answer(models.WorkDirResponse, {"dir": self._box(request).workdir})

    async def home_dir(self, request: web.Request) -> web.Response:
        return answer(models.UserHomeDirResponse, {"dir": self._box(request).home})

    def _sandbox(self, request: web.Request) -> Sandbox:
        sandbox = self._emulator.service.by_id.get(request.match_info["id"])
        if sandbox is None or sandbox.state in GONE:
            raise Refusal(404, f"Sandbox with ID {request.match_info['id']} not found", "NOT_FOUND")
        return sandbox

    def _session(self, request: web.Request) -> tuple[str, Session]:
        self._box(request)
        name = request.match_info["session"]
        session = self._sandbox(request).sessions.get(name)
        if session is None:
            raise Refusal(404, "session not found", "NOT_FOUND", DAEMON)
        return name, session

    def _command(self, request: web.Request) -> str:
        command = request.match_info["command"]
        if command not in self._session(request)[1].commands:
            raise Refusal(404, "command not found", "NOT_FOUND", DAEMON)
        return command

    def _box(self, request: web.Request) -> Box:
        sandbox = self._sandbox(request)
        if sandbox.box is None or sandbox.dies.is_set():
            raise Refusal(400, "failed to get runner info: Sandbox is not started", "BAD_REQUEST")
        self._emulator.service.deadlines.note_activity(sandbox)
        return sandbox.box


async def _session(name: str, session: Session) -> dict[str, Any]:
    described = [await session.described(command) for command in session.commands]
    return dict(check(models.Session, {"sessionId": name, "commands": described}).to_dict())  # type: ignore[attr-defined]


async def _parts(request: web.Request) -> AsyncIterator[BodyPartReader]:
    parts = await request.multipart()
    while isinstance(part := await parts.next(), BodyPartReader):
        yield part


def _path(request: web.Request) -> str:
    path = request.query.get("path")
    if not path:
        raise Refusal(400, "path is required", "BAD_REQUEST", DAEMON)
    return path
