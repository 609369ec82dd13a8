"""Terminals in a container: a login shell on a pseudo-terminal with typed input and raw output."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable

from ares_exp.cancellation import cancel_all, happened
from ares_exp.containers.container import User
from ares_exp.containers.shell_channel import BoundedOutput

TERM = "xterm-256color"
KEPT_BYTES = 128 * 1024
"""Maximum size of the output that is kept until the next read. Longer output is cut in the middle."""

PROMPT_SEC = 2.0
PROMPT_REST_SEC = 0.1  # wait for the rest of the prompt after its first bytes

FIND_SHELL = "SHELL=$(command -v bash || command -v sh); export SHELL"
"""Source text for `sh` that sets the variable `SHELL` to the login shell of a terminal: bash if available, or `sh`."""


class Terminal(Protocol):
    """An open terminal in a container, as seen from the host."""

    async def read(self) -> bytes:
        """Waits for output and returns its bytes; `b""` at the end. Raises `OSError` if the terminal has ended."""

    async def write(self, data: bytes) -> None:
        """Types `data` into the terminal. Raises `OSError` if the terminal has ended."""

    async def close(self) -> None:
        """Hangs up the terminal, which ends its processes unless they ignore SIGHUP. Idempotent, never raises."""


@runtime_checkable
class TerminalContainer(Protocol):
    """A `Container` that can open terminals. The image needs no additional software for this."""

    async def open_terminal(
        self, *, columns: int, lines: int, user: User | None = None, env: Mapping[str, str] | None = None
    ) -> Terminal:
        """Opens a terminal of `columns` and `lines` with a login shell in the default directory of commands.

        The terminal closes when the container stops. The default of `user` is the image's user. `env` adds environment
        variables to the variables of the container.

        Raises:
            ContainerDiedError: The container is gone.
            ContainerError: The terminal could not be opened.
        """


class TerminalSession:
    """An open terminal whose output is read continuously, so that its programs never block on a full buffer."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._output = BoundedOutput(KEPT_BYTES)
        self._printed = asyncio.Event()
        self._ended = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def wait_for_prompt(self) -> None:
        """Waits until the shell has printed its first prompt, but at most `PROMPT_SEC`."""
        await happened(self._printed, PROMPT_SEC)
        await asyncio.sleep(PROMPT_REST_SEC)

    async def type_keys(self, keys: str, seconds: float) -> str:
        """Types `keys`, waits `seconds` or until the terminal ends, and returns the output since the previous call."""
        if keys:
            with suppress(OSError):
                await self._terminal.write(keys.encode(errors="replace"))
        await happened(self._ended, seconds)
        return self._take()

    async def close(self) -> None:
        await cancel_all(self._reading)
        await self._terminal.close()

    async def _read(self) -> None:
        with suppress(OSError):
            while data := await self._terminal.read():
                self._output.add(self._decoder.decode(data).encode())
                self._printed.set()
        self._printed.set()
        self._ended.set()

    def _take(self) -> str:
        output, self._output = self._output, BoundedOutput(KEPT_BYTES)
        return output.text(f"\r\n[{output.elided_bytes} bytes left out]\r\n")
