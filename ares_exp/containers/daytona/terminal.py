"""A terminal of a sandbox: a pseudo-terminal of the service's, whose shell makes way for one of the user's."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ares_exp.cancellation import finish
from ares_exp.containers.container import User
from ares_exp.containers.daytona.relay_script import become
from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.containers.terminal import FIND_SHELL
from ares_exp.errors import ContainerError

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox
    from daytona.handle.async_pty_handle import AsyncPtyHandle

START_SEC = 30.0
"""Bound on the start of a shell."""

_END_SEC = 10.0
_MAX_BEFORE_BYTES = 64 * 1024  # what the service's own shell may print
_MAX_QUEUED = 64  # pieces of output that nobody has read: the service then waits


def terminal_script(
    mark: str, *, user: User | None, workdir: str | None, env: Mapping[str, str], keep_in: str
) -> tuple[str, str]:
    """Returns a script that puts another shell in the place of the terminal's, and the line to type that runs it.

    The service's shell is typed into, and echoes that, so what is typed has neither variables nor the mark.

    Args:
        mark: Printed in a line of its own when the shell starts.
        user: Whose shell it is; `None`: root.
        workdir: Where it starts; `None`: where the service starts.
        env: Its variables.
        keep_in: The file in the sandbox that holds the script until it is run.
    """
    shell = f'unset _then; printf "\\n%s\\n" {mark}; {FIND_SHELL}; exec "$SHELL" -l'
    lines = [
        'rm -f -- "$0"',
        *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
        *([] if workdir is None else [f"cd -- {shlex.quote(workdir)} || cd /"]),
        f"export _then={shlex.quote(shell)}",
        *([] if user is None else [f'chown -- {shlex.quote(str(user))} "$(tty)" 2>/dev/null']),
        'exec sh -c "$_then"' if user is None else become(user, 'sh -c "$_then"'),
    ]
    return "\n".join(lines) + "\n", f" exec sh {keep_in}\r"


class DaytonaTerminal:
    """A `Terminal` over a connection to the service."""

    def __init__(self, service: DaytonaService, sandbox: AsyncSandbox) -> None:
        """Opens nothing.

        Args:
            service: The sandbox's service.
            sandbox: The sandbox.
        """
        self._service = service
        self._sandbox = sandbox
        self._what = f"A terminal of sandbox {sandbox.name}"
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue(_MAX_QUEUED)
        self._handle: AsyncPtyHandle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ahead = b""
        self._has_ended = False

    async def open(self, *, columns: int, lines: int) -> None:
        """Has the service open a pseudo-terminal of that size, with its own shell.

        Raises:
            ContainerServiceError: The service refused, or did not answer.
            ContainerDiedError: The sandbox is gone.
        """
        from daytona.common.pty import PtySize

        async def request(_: AsyncDaytona) -> AsyncPtyHandle:
            # A session whose answer got lost stays unused until the sandbox ends.
            name = f"ares-exp-{secrets.token_hex(6)}"
            size = PtySize(cols=columns, rows=lines)
            return await self._sandbox.process.create_pty_session(name, self._arrived.put, pty_size=size)

        self._handle = await self._service.call(self._what, request)
        self._watching = asyncio.create_task(self._watch(self._handle))

    async def start(self, typed: str, mark: str) -> None:
        """Types what makes the shell another one, and waits for the line with the mark.

        Raises:
            ContainerError: The shell does not start; with what was printed instead.
        """
        printed = bytearray()
        line = re.compile(rb"[\r\n]%s\r*\n" % mark.encode())
        try:
            async with asyncio.timeout(START_SEC):
                await self.write(typed.encode())
                while (found := line.search(printed)) is None:
                    data = await self.read()
                    if not data or len(printed) > _MAX_BEFORE_BYTES:
                        raise OSError("it ended" if not data else "it prints without end")
                    printed += data
        except OSError as error:  # TimeoutError is one
            shown = bytes(printed[-300:]).decode(errors="replace")
            raise ContainerError(
                f"{self._what} could not be opened: its shell does not start ({str(error) or f'{START_SEC:g} s'}). "
                f"It printed: {shown!r}."
            ) from None
        self._ahead = bytes(printed[found.end() :])

    async def read(self) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        if self._has_ended:
            return b""
        data = await self._arrived.get()
        self._has_ended = not data
        return data

    async def write(self, data: bytes) -> None:
        from daytona import DaytonaError

        if self._handle is None:
            raise OSError("The terminal is closed.")
        try:
            await self._handle.send_input(data)
        except DaytonaError as error:
            raise OSError(str(error)) from None

    async def close(self) -> None:
        await finish(self._close())

    async def _close(self) -> None:
        handle, self._handle = self._handle, None
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        if handle is None:
            return
        try:
            if handle.is_connected():
                with contextlib.suppress(ContainerError):  # it ends with the sandbox
                    await self._service.call(
                        self._what,
                        lambda _: self._sandbox.process.kill_pty_session(str(handle.session_id)),
                        timeout_sec=_END_SEC,
                    )
        finally:
            await handle.disconnect()

    async def _watch(self, handle: AsyncPtyHandle) -> None:
        await handle.wait()
        await self._arrived.put(b"")
