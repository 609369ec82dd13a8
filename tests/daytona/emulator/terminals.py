"""Pseudo-terminals of sandboxes over WebSockets: bytes both ways, and messages about its start and end."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import WSMsgType, web

from ares_exp.containers.terminal import Terminal

_TELLS_OF_THE_END = "X-Daytona-Pty-Exit-Control"


async def connected(request: web.Request, terminal: Terminal) -> web.WebSocketResponse:
    """Serves a client until it goes, or the terminal ends."""
    socket = web.WebSocketResponse(protocols=[_TELLS_OF_THE_END])
    await socket.prepare(request)
    await socket.send_json({"type": "control", "status": "connected"})
    printing = asyncio.create_task(_print(terminal, socket))
    try:
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                with contextlib.suppress(OSError):
                    await terminal.write(message.data)
    finally:
        printing.cancel()
        await asyncio.wait({printing})
    return socket


async def _print(terminal: Terminal, socket: web.WebSocketResponse) -> None:
    with contextlib.suppress(OSError):
        while data := await terminal.read():
            await socket.send_bytes(data)
    if socket.ws_protocol is not None:
        await socket.send_json({"type": "control", "status": "exited", "exitCode": 0})
    await socket.close(message=b'{"exitCode": 0}')
