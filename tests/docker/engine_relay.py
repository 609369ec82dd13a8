"""A unix socket in front of the real engine, for faults between it and us."""

import asyncio
import contextlib
import re
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.loopback_endpoint import stop_accepting

ENGINE = "/var/run/docker.sock"


class EngineRelay:
    """Relays connections to the engine.

    Attributes:
        host: What DOCKER_HOST has to be.
        responses_to_lose: So many requests to create a container get no answer: their connection breaks when the engine
            has done them.
        creates_to_delay: So many have their connection broken at once, and reach the engine `delay_sec` later.
        created: How many requests to create a container have reached the engine.
        hangs: Nothing passes any more.
        cuts: The connection of a request whose first line holds this breaks after so many bytes of its answer.
        holds: Requests whose first line holds this are kept back until `released`; `held` is set when one is.
    """

    delay_sec = 0.5

    def __init__(self) -> None:
        self.responses_to_lose = self.creates_to_delay = self.created = 0
        self.hangs = False
        self.holds = b""
        self.cuts: tuple[bytes, int] | None = None
        self.held, self.released = asyncio.Event(), asyncio.Event()
        self._directory = tempfile.TemporaryDirectory(prefix="relay-")  # the path of a socket has to be short
        self._path = Path(self._directory.name) / "s"
        self.host = f"unix://{self._path}"
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, str(self._path))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
        self._directory.cleanup()

    async def close(self) -> None:
        """Breaks every connection; no request gets a response any more."""
        self.cut_all()
        await self.stop_accepting()
        self.cut_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop_accepting(self) -> None:
        """Takes no new connections, as an engine that is being stopped; open ones still work."""
        if self._path.exists():
            await stop_accepting(self._server)
            self._path.unlink()

    def cut_all(self) -> None:
        """Breaks every open connection; new ones are accepted."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            engine_reader, engine_writer = await asyncio.open_unix_connection(ENGINE)
        except BaseException:
            writer.transport.abort()
            self._tasks.discard(task)
            raise
        back = asyncio.create_task(self._pass_on(engine_reader, writer))
        try:
            while data := await reader.read(65536):
                while self.hangs:  # noqa: ASYNC110 (ended by a cancellation only)
                    await asyncio.sleep(0.05)
                if self.holds and self.holds in data.split(b"\r\n", 1)[0]:
                    self.held.set()
                    await self.released.wait()
                if self.cuts is not None and self.cuts[0] in data.split(b"\r\n", 1)[0]:
                    back.cancel()
                    await asyncio.wait({back})
                    await self._send(engine_writer, data)
                    passed = await engine_reader.readexactly(self.cuts[1])
                    await self._send(writer, passed)
                    return
                if re.match(rb"POST /v[\d.]+/containers/create\?", data):
                    data = await self._whole_request(reader, data)
                    if self.creates_to_delay:
                        self.creates_to_delay -= 1
                        writer.transport.abort()
                        await asyncio.sleep(self.delay_sec)
                    if self.responses_to_lose:
                        self.responses_to_lose -= 1
                        back.cancel()
                        await asyncio.wait({back})
                        await self._send(engine_writer, data)
                        await engine_reader.read(1)
                        self.created += 1
                        return
                    self.created += 1
                await self._send(engine_writer, data)
            engine_writer.write_eof()
            await back
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            back.cancel()
            writer.transport.abort()
            engine_writer.transport.abort()
            self._tasks.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                while self.hangs:  # noqa: ASYNC110 (ended by a cancellation only)
                    await asyncio.sleep(0.05)
                await self._send(writer, data)
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    async def _whole_request(self, reader: asyncio.StreamReader, data: bytes) -> bytes:
        while b"\r\n\r\n" not in data:
            data += await reader.read(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        return data + await reader.readexactly(int(length[1]) - len(body))
