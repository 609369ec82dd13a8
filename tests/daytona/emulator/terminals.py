"""Pseudo-terminals of sandboxes over WebSockets: bytes both ways, and messages about its start and end.

Like the daemon of the service, it disconnects a client that does not read the output or that sends too much at once.
A terminal continues without a client.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field

from aiohttp import WSCloseCode, WSMsgType, web

from ares_exp.cancellation import cancel_all
from ares_exp.containers.terminal import Terminal

MAX_INPUT_BYTES = 64 * 1024
MAX_QUEUED = 256
_TELLS_OF_THE_END = "X-Daytona-Pty-Exit-Control"


@dataclass
class Traffic:
    """How the messages of all terminals fare.

    Attributes:
        message_sec: How long each takes to a client.
        input_passes: Cleared while nothing gets to the terminals.
        cut_off: How many clients were too slow.
        sockets: The open connections.
        typed: The end of what each sandbox was sent, by its id.
    """

    message_sec: float = 0.0
    input_passes: asyncio.Event = field(default_factory=asyncio.Event)
    cut_off: int = 0
    sockets: set[web.WebSocketResponse] = field(default_factory=set)
    typed: dict[str, bytes] = field(default_factory=dict)

    def cut(self) -> None:
        """Breaks all connections."""
        for socket in self.sockets:
            transport = socket._req.transport if socket._req is not None else None
            if transport is not None:
                transport.abort()


async def connected(request: web.Request, terminal: Terminal, traffic: Traffic) -> web.WebSocketResponse:
    """Serves a client until it goes, or the terminal ends."""
    socket = web.WebSocketResponse(protocols=[_TELLS_OF_THE_END], max_msg_size=MAX_INPUT_BYTES)
    await socket.prepare(request)
    traffic.sockets.add(socket)
    await socket.send_json({"type": "control", "status": "connected"})
    waiting: asyncio.Queue[bytes] = asyncio.Queue(MAX_QUEUED)
    tasks = {
        asyncio.create_task(_hear(terminal, waiting, socket, traffic)),
        asyncio.create_task(_print(waiting, socket, traffic)),
    }
    try:
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await traffic.input_passes.wait()
                of = request.match_info["id"]
                traffic.typed[of] = (traffic.typed.get(of, b"") + message.data)[-MAX_INPUT_BYTES:]
                with contextlib.suppress(OSError):
                    await terminal.write(message.data)
    finally:
        traffic.sockets.discard(socket)
        await cancel_all(*tasks)
    return socket


async def _hear(
    terminal: Terminal, waiting: asyncio.Queue[bytes], socket: web.WebSocketResponse, traffic: Traffic
) -> None:
    with contextlib.suppress(OSError):
        while data := await terminal.read():
            try:
                waiting.put_nowait(data)
            except asyncio.QueueFull:
                traffic.cut_off += 1
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"slow consumer")
                return
    await waiting.put(b"")


async def _print(waiting: asyncio.Queue[bytes], socket: web.WebSocketResponse, traffic: Traffic) -> None:
    while data := await waiting.get():
        await asyncio.sleep(traffic.message_sec)
        await socket.send_bytes(data)
    if socket.ws_protocol is not None:
        await socket.send_json({"type": "control", "status": "exited", "exitCode": 0})
    await socket.close(message=b'{"exitCode": 0}')
