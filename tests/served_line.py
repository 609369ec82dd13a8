"""A line behind a real TCP port, as a forwarded port serves it, and the HTTP requests of an agent's client."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ares_exp.agents.interception.agent_endpoint import Endpoint
from ares_exp.agents.interception.line import Line
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse

CHAT = "/v1/chat/completions"


@dataclass
class Recorder:
    """An LLM client that responses by a number, when it may.

    Attributes:
        calls: What it was asked.
        gate: It answers while this is set.
        given_up: How many calls were given up before they had a response.
    """

    calls: list[LLMRequest] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: int = 0
    on_call: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        self.calls.append(request)
        number = len(self.calls)
        self.on_call.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return LLMResponse.from_text(f"answer {number} " + "x" * 2000)

    @property
    def conversations(self) -> list[str]:
        return [request.origin.conversation if request.origin is not None else "" for request in self.calls]


class Port:
    """A port behind which a line is served."""

    def __init__(self, line: Line, port: int) -> None:
        self.line = line
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def post(self, body: Any, *, path: str = CHAT, key: str | None = None, **headers: str) -> tuple[int, bytes]:
        """Sends one request on a connection of its own; returns the status and the body."""
        async with aiohttp.ClientSession() as session:
            given = {"Authorization": f"Bearer {key or self.line.key}", **headers}
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with session.post(self.url + path, data=data, headers=given) as response:
                return response.status, await response.read()

    async def raw(self, body: Any, path: str = CHAT) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends one request, and leaves the connection to the caller."""
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.line.key}\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def served(line: Line, *, endpoint: Endpoint | None = None) -> AsyncIterator[Port]:
    endpoint = endpoint or Endpoint()

    async def accept() -> None:
        import socket

        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        listening.set_result(listener.getsockname()[1])
        try:
            while True:
                client, _ = await asyncio.get_running_loop().sock_accept(listener)
                client.setblocking(False)
                await endpoint.serve(line, client)
        finally:
            listener.close()

    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    accepting = asyncio.create_task(accept())
    try:
        yield Port(line, await listening)
    finally:
        accepting.cancel()
        await asyncio.wait({accepting})
        await endpoint.close(line)


def chat(*texts: str, tools: bool = False, **more: Any) -> Mapping[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    return {"model": "policy", "messages": messages, **({"tools": [tool]} if tools else {}), **more}


def text_of(body: bytes) -> str:
    if not body.lstrip().startswith(b"data:"):
        return str(json.loads(body)["choices"][0]["message"]["content"])
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)
