"""Sessions: shells that stay, and run one command after the other.

What a command prints and its exit code are kept in files of the box, as the daemon in a real sandbox keeps them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
from dataclasses import dataclass, field
from typing import Any

from ares_exp.containers.shell_channel import ChannelStream
from tests.daytona.emulator.boxes import Box, Lines
from tests.daytona.emulator.commands import kill_group, run
from tests.daytona.emulator.wire import Refusal

_FOLDER = "/tmp/.daytona/sessions"
_START = "{setsid} /bin/sh -c {shell} | cat; exit\n"


@dataclass
class Session:
    """One session.

    Attributes:
        box: Where.
        stream, lines: What its shell reads and says.
        pid: Its process group.
        folder: Where the results of its commands are, in the box.
        commands: By id, as sent.
        turn: Held by who waits for the end of a command.
    """

    box: Box
    stream: ChannelStream
    lines: Lines
    pid: str
    folder: str
    commands: dict[str, str] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def open(cls, box: Box, name: str) -> Session:
        """Starts its shell."""
        stream = await box.open_shell()
        try:
            folder = f"{_FOLDER}/{name}"
            shell = f"mkdir -p {shlex.quote(folder)}; cd {shlex.quote(box.workdir)}; echo $$; exec {box.shell}"
            await stream.write(_START.format(setsid=box.setsid, shell=shlex.quote(shell)).encode())
            lines = Lines(stream)
            return cls(box, stream, lines, (await lines.line()).decode(), folder)
        except BaseException:
            stream.close()
            raise

    async def execute(self, command: str, *, is_async: bool) -> dict[str, Any]:
        """Runs a command, and waits for it unless it `is_async`."""
        name = secrets.token_hex(8)
        path = shlex.quote(f"{self.folder}/{name}")
        self.commands[name] = command
        text = f"{{\n{command}\n}} >{path}.out 2>{path}.err </dev/null; echo $? >{path}.new; mv {path}.new {path}.exit"
        await self.stream.write(f"{text}; echo done\n".encode("utf-8", "replace"))
        if is_async:
            return {"cmdId": name}
        async with self.turn:
            while await self.exit_code(name) is None:
                if not await self.lines.line():
                    raise Refusal(410, "session shell has exited", "GONE", "DAYTONA_DAEMON")
        return {"cmdId": name, "exitCode": await self.exit_code(name), **await self.logs(name)}

    async def exit_code(self, name: str) -> int | None:
        """Of a command; `None` while it runs."""
        said = await self._read(f"{name}.exit")
        return int(said) if said else None

    async def logs(self, name: str) -> dict[str, str]:
        """What a command has printed so far."""
        stdout, stderr = await self._read(f"{name}.out"), await self._read(f"{name}.err")
        return {"output": stdout + stderr, "stdout": stdout, "stderr": stderr}

    async def described(self, name: str) -> dict[str, Any]:
        """A command as the daemon describes it."""
        code = await self.exit_code(name)
        about = {"id": name, "command": self.commands[name]}
        return about if code is None else {**about, "exitCode": code}

    async def close(self) -> None:
        """Kills what runs in it."""
        with contextlib.suppress(OSError):
            await kill_group(self.box, self.pid)
        self.stream.close()

    async def _read(self, name: str) -> str:
        return (await run(self.box, f"cat -- {shlex.quote(f'{self.folder}/{name}')} 2>/dev/null")).output
