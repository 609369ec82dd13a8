"""A persistent shell in a container: runs one script at a time, and forks the next script's process ahead."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ares_exp.containers.container import User
from ares_exp.containers.shell_script import ShellInfo, parse_hello, parse_number, server
from ares_exp.errors import ContainerDiedError

_MARK = b"\x1e"
_MAX_WORD_BYTES = 8192

_MAX_COMPLAINT = 500
# Time from its answer to a channel's readiness. Longer: a background process holds it.
_SETTLE_SEC = 0.05
Script = Callable[[str, ShellInfo], str]
"""A function that makes the source of a script for the key and the shell of a channel."""


class MarkParser:
    """Splits the byte stream of a shell into output and the marks `RS key SP word RS` that frame its scripts.

    The transport may cut a mark anywhere. Only new bytes and a carry shorter than a mark are searched: searching
    everything received so far would take quadratic time.
    """

    def __init__(self, key: str, sign: bytes = _MARK) -> None:
        """Args: key: Random hex, unknown to programs in the container. sign: The byte around a mark."""
        self._sign = sign
        self._prefix = sign + key.encode() + b" "
        self._carry = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, str | None]]:
        """Yields (output, following mark) pairs; the mark is `None` while none has arrived.

        Raises:
            ValueError: A mark does not end, so it is not ours.
        """
        data, self._carry = self._carry + data, b""
        while (start := data.find(self._prefix)) >= 0:
            word = start + len(self._prefix)
            end = data.find(self._sign, word)
            if end < 0:
                if len(data) - word > _MAX_WORD_BYTES:
                    raise ValueError("A mark does not end.")
                self._carry = data[start:]
                yield data[:start], None
                return
            yield data[:start], data[word:end].decode("utf-8", "replace")
            data = data[end + 1 :]
        cut = data.rfind(self._sign, max(0, len(data) - len(self._prefix) + 1))
        if cut >= 0 and self._prefix.startswith(data[cut:]):
            data, self._carry = data[:cut], data[cut:]
        yield data, None


class BoundedOutput:
    """The first and the last `limit / 2` bytes of a stream of any length, in O(`limit`) memory."""

    def __init__(self, limit: int) -> None:
        """Args: limit: Bytes to keep, at least 0."""
        self._limit = limit
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    @property
    def elided_bytes(self) -> int:
        """Bytes dropped between head and tail."""
        return max(0, self._total - self._limit)

    def add(self, data: bytes) -> None:
        """Appends bytes."""
        self._total += len(data)
        room = self._limit - self._tail_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + 65536:  # rarely, so that the copying stays linear
            del self._tail[: len(self._tail) - self._tail_limit]

    def text(self) -> str:
        """Returns head and tail, decoded as UTF-8; invalid bytes become U+FFFD."""
        if self._total <= self._limit:
            return (self._head + self._tail).decode("utf-8", "replace")
        tail = self._tail[max(0, len(self._tail) - self._tail_limit) :]
        return self._head.decode("utf-8", "replace") + tail.decode("utf-8", "replace")


class StreamLostError(OSError):
    """The connection to a shell broke while the shell may still run: its effects are unknown."""


class ChannelStream(Protocol):
    """The stdin and stdout of one running `sh`, which reads source text from its stdin.

    All methods are called from one event loop. Cancelling `read` loses no data.
    """

    async def read(self) -> bytes:
        """The next bytes of the shell's stdout; `b""` at its end. Its stderr is discarded, not mixed in.

        Raises:
            StreamLostError: The connection broke, and not because the shell has ended.
            OSError: The connection broke; treated like the end of the stream.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Sends `data` to the shell's stdin; waits for flow control.

        Raises:
            OSError: The connection broke.
        """
        ...

    def close(self) -> None:
        """Releases the shell at once, killing it if nothing else ends it. Idempotent, never blocks or raises."""
        ...


class ScriptRun:
    """The state of one script in a channel's shell.

    Attributes:
        output: Receives what the script printed until its exit code.
        pid: The process of the script, which becomes the command; 0 before it starts.
        sink: The process named by the script's mark `sink`, whose stdout may be written to.
        answered: Set when the exit code is known, or will never be known.
        word: The exit code in decimal; empty while unknown.
    """

    def __init__(self, output: BoundedOutput) -> None:
        self.output = output
        self.pid = 0
        self.sink: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.answered = asyncio.Event()
        self.word = ""

    def answer(self, word: str = "") -> None:
        """Records the exit code, or that there will be none, and wakes the waiters."""
        if not self.answered.is_set():
            self.word = word
            self.answered.set()
            self.sink.cancel()


class Channel:
    """A persistent shell and the task that reads its output.

    Attributes:
        user: Who runs it.
        shell: The pid and bash that the shell reported.
        ready: Done when a script may be run, or when the channel has closed (see `is_open`).
        run: The current script, until the next one may start; `None` when ready.
        settling_until: `time.monotonic()` until which it is expected to become ready.
    """

    def __init__(self, stream: ChannelStream, user: User | None, on_change: Callable[[Channel], None]) -> None:
        """Takes over the stream and starts the script server in its shell.

        Args:
            stream: A fresh shell.
            user: Who runs it.
            on_change: Called when it becomes ready, and when it has closed.
        """
        self.user = user
        self.shell = ShellInfo()
        self.run: ScriptRun | None = None
        self.settling_until = 0.0
        self._lost: StreamLostError | None = None
        self.is_open = True
        self.complaint = ""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._key = secrets.token_hex(8)
        self._parser = MarkParser(self._key)
        self._stream = stream
        self._on_change = on_change
        self._listener = asyncio.create_task(self._listen())
        # A callback, not a `finally` in the task: a task that is cancelled before its first step never enters it.
        self._listener.add_done_callback(lambda _: self.close())

    def start(self, output: BoundedOutput) -> ScriptRun:
        """Prepares a ready channel for the script that is sent next.

        Args:
            output: Where its output goes.
        """
        self.ready = asyncio.get_running_loop().create_future()
        self.settling_until = 0.0
        self.run = ScriptRun(output)
        return self.run

    async def send(self, script: Script) -> None:
        """Sends a script, made for this channel's key and shell, or input for the running one."""
        with contextlib.suppress(OSError):  # the listener sees the end of the stream
            await self._stream.write(script(self._key, self.shell).encode("utf-8", "surrogateescape"))

    async def play(self, run: ScriptRun, script: Script, seconds: float | None) -> None:
        """Sends the script of `run` and waits up to `seconds` for its exit code (`None`: no bound)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.send(script)
                await run.answered.wait()

    def raise_if_lost(self) -> None:
        """Raises if the connection broke, as opposed to the shell having ended.

        Raises:
            ContainerDiedError: It broke: the shell's effects are unknown.
        """
        if self._lost is not None:
            reason = self._lost.__cause__ or self._lost
            raise ContainerDiedError(f"The connection to a shell of the container broke. {reason}") from reason

    async def wait_closed(self) -> None:
        """Waits until the reading task has ended after `close`."""
        await asyncio.wait({self._listener})

    def close(self) -> None:
        """Releases the shell; the waiter of its script gets no answer. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        self._listener.cancel()
        self._stream.close()
        if self.run is not None:
            self.run.answer()
        if not self.ready.done():
            self.ready.set_result(None)
        self._on_change(self)

    async def _listen(self) -> None:
        try:
            await self._stream.write(server(self._key).encode())
            while data := await self._stream.read():
                for output, mark in self._parser.feed(data):
                    if output:
                        self._take_in(output)
                    if mark:
                        word, _, rest = mark.partition(" ")
                        self._note(word, rest)
                        if word in ("hello", "start"):  # not earlier: a shell reads ahead while it parses its source
                            await self._stream.write(f"{self._key}\n".encode())
        except StreamLostError as error:
            self._lost = error
        except (OSError, ValueError):
            pass  # as at the end of the stream; a malformed mark: something in the container knows the key

    def _take_in(self, output: bytes) -> None:
        if self.run is None:  # before the first script: the engine's message when it could not start the shell
            self.complaint = (self.complaint + output.decode("utf-8", "replace"))[:_MAX_COMPLAINT].strip()
        elif self.run.pid and not self.run.word:
            self.run.output.add(output)

    def _note(self, word: str, rest: str) -> None:
        """Handles a mark. Raises `ValueError` if it is not one of a server or a script."""
        run = self.run
        if word == "hello":
            self.shell = parse_hello(rest)
        elif word == "ready":
            if run is not None:
                run.answer()
            self.run = None
            if not self.ready.done():
                self.ready.set_result(None)
            self._on_change(self)
        elif word == "start":
            if run is not None:
                run.pid = parse_number(rest)
        elif word == "sink":
            if run is not None and not run.sink.done():
                run.sink.set_result(parse_number(rest))
        elif run is None or not run.pid:
            self.close()  # the process forked for the next script has ended early (`pkill bash`)
        else:
            parse_number(word)
            self.settling_until = time.monotonic() + _SETTLE_SEC
            run.answer(word)
