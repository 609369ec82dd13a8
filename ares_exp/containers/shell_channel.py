"""One persistent shell in a box: it runs one script at a time, and forks the process of the next one ahead."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Protocol

from ares_exp.containers.container import Shell, User
from ares_exp.containers.shell_output import BoundedOutput, MarkParser
from ares_exp.containers.shell_script import BoxShell, parse_hello, parse_number, server
from ares_exp.errors import ContainerDiedError

_MAX_COMPLAINT = 500
# How long after its answer a channel is ready again. Longer: a background process holds it.
_SETTLE_SEC = 0.05

Script = Callable[[str, BoxShell], str]
"""Makes the source of a script for a channel with this key and this shell."""


class StreamLostError(OSError):
    """The connection to a shell broke, and the shell may go on: what it has done by now is not known."""


class ChannelStream(Protocol):
    """Both ends of one running `sh`: what it reads as source text, what it prints.

    All methods are called from one event loop. Cancelling `read` loses no data.
    """

    @property
    def in_doubt(self) -> bool:
        """Whether what was written may still be under way, or what came of it. Never where that takes no time."""
        ...

    async def read(self) -> bytes:
        """The next bytes of the shell's stdout; `b""` at its end. Its stderr is discarded, not mixed in.

        Raises:
            StreamLostError: The connection broke, and not because the shell has ended.
            OSError: The connection broke; treated like the end.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Sends `data` to the shell's stdin; waits until it is on its way (flow control).

        Raises:
            OSError: The connection broke.
        """
        ...

    def rest(self) -> None:
        """Told that the shell prints nothing more until something is written. For those who have to ask for output."""
        ...

    def close(self) -> None:
        """Releases the shell at once (kills it where nothing else ends it). Idempotent, never blocks or raises."""
        ...


class ScriptRun:
    """One script in a channel's shell: what has been seen of it so far.

    Attributes:
        output: Receives what the script printed until its exit code.
        pid: The process that has begun it, which becomes the command; 0 before.
        sink: What its mark `sink` said: the process whose stdout may be written to.
        answered: Set when the exit code is known, or will never be.
        word: The exit code in decimal; empty while, or if, it is not known.
    """

    def __init__(self, output: BoundedOutput) -> None:
        """Args: output: Where its output goes."""
        self.output = output
        self.pid = 0
        self.sink: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.answered = asyncio.Event()
        self.word = ""

    @property
    def begun(self) -> bool:
        """Whether the box has begun it."""
        return self.pid != 0

    @property
    def lost(self) -> bool:
        """Whether no exit code was reported although the script began (asked once `answered` is set)."""
        return self.begun and not self.word

    def exit_code(self) -> int:
        """What the shell reported; 137 when the command killed the shell that was to report."""
        return int(self.word) if self.word else 137

    def answer(self, word: str = "") -> None:
        """Notes the exit code, or that there will be none, and wakes who waits for it."""
        if not self.answered.is_set():
            self.word = word
            self.answered.set()
            self.sink.cancel()


class Channel:
    """A shell and the task that reads it.

    Attributes:
        user: Who runs it.
        box: What it said of itself.
        ready: Done when a script may be run, or when none ever will (`is_open` tells).
        run: The script that has begun or is about to, until the next one may; `None` when ready.
        settling_until: `time.monotonic()` until which it can be expected to become ready.
    """

    def __init__(
        self, stream: ChannelStream, user: User | None, shell: Shell, on_change: Callable[[Channel], None]
    ) -> None:
        """Takes over the stream and makes its shell serve.

        Args:
            stream: A fresh shell.
            user: Who runs it.
            shell: What its commands are most likely read by.
            on_change: Called when it becomes ready, and when it has closed.
        """
        self.user = user
        self.box = BoxShell()
        self.run: ScriptRun | None = None
        self.settling_until = 0.0
        self._lost: StreamLostError | None = None
        self.is_open = True
        self.complaint = ""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._key = secrets.token_hex(8)
        self._parser = MarkParser(self._key)
        self._stream = stream
        self._shell: Shell = shell
        self._on_change = on_change
        self._listener = asyncio.create_task(self._listen())
        # A callback, not a `finally` in the task: a task that is cancelled before its first step never enters it.
        self._listener.add_done_callback(lambda _: self.close())

    @property
    def in_doubt(self) -> bool:
        """Whether a script that was sent may have begun, although nothing says so yet."""
        return self._stream.in_doubt

    def begin(self, output: BoundedOutput) -> ScriptRun:
        """Lets a channel that is ready expect a script, to be sent next.

        Args:
            output: Where its output goes.
        """
        self.ready = asyncio.get_running_loop().create_future()
        self.settling_until = 0.0
        self.run = ScriptRun(output)
        return self.run

    async def send(self, script: Script) -> None:
        """Sends a script, made for this channel's key and shell; or what one that runs waits for."""
        with contextlib.suppress(OSError):  # the listener sees the end of the stream
            await self._stream.write(script(self._key, self.box).encode("utf-8", "surrogateescape"))

    async def play(self, run: ScriptRun, script: Script, seconds: float | None) -> None:
        """Sends the script that `run` is to be and waits for its exit code, so long at most (`None`: no bound)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.send(script)
                await run.answered.wait()

    def raise_if_lost(self) -> None:
        """Tells a connection that broke from a shell that has ended.

        Raises:
            ContainerDiedError: It broke: what the shell has done by now is not known.
        """
        if self._lost is not None:
            reason = self._lost.__cause__ or self._lost
            raise ContainerDiedError(f"The connection to a shell of the container broke. {reason}") from reason

    async def wait_closed(self) -> None:
        """Waits until what reads the stream has noticed `close`."""
        await asyncio.wait({self._listener})

    def close(self) -> None:
        """Lets go of the shell; its script's waiter learns that no answer will come. Idempotent."""
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
            await self._stream.write(server(self._key, self._shell).encode())
            while data := await self._stream.read():
                for output, mark in self._parser.feed(data):
                    self._take_in(output)
                    word, _, rest = (mark or "").partition(" ")
                    if word:
                        self._note(word, rest)
                    if word in ("hello", "start"):  # not earlier: a shell reads ahead while it parses its source
                        await self._stream.write(f"{self._key}\n".encode())
        except StreamLostError as error:
            self._lost = error
        except (OSError, ValueError):
            pass  # the same as the end of the stream; a mark that is none: something in the box knows the key

    def _take_in(self, output: bytes) -> None:
        if self.run is None:  # before the first script: the engine's words when it could not start the shell
            self.complaint = (self.complaint + output.decode("utf-8", "replace"))[:_MAX_COMPLAINT].strip()
        elif self.run.begun and not self.run.word:
            self.run.output.add(output)

    def _note(self, word: str, rest: str) -> None:
        """Raises: ValueError: It is no mark of a server or a script."""
        run = self.run
        if word == "hello":
            self.box = parse_hello(rest)
        elif word == "ready":
            self._stream.rest()
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
        elif run is None or not run.begun:
            self.close()  # the process that was to become the next script has ended before (`pkill bash`)
        else:
            parse_number(word)
            self.settling_until = time.monotonic() + _SETTLE_SEC
            run.answer(word)
