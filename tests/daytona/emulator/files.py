"""Files in and out of a box, as the daemon in a real sandbox moves them."""

from __future__ import annotations

import mimetypes
import re
import shlex
import tempfile
import urllib.parse

from aiohttp import BodyPartReader, web

from ares_exp.errors import ContainerError
from tests.daytona.emulator.boxes import Box, Lines
from tests.daytona.emulator.commands import run, shell
from tests.daytona.emulator.wire import HALF, Refusal

BOUNDARY = "DAYTONA-FILE-BOUNDARY"
DAEMON = "DAYTONA_DAEMON"
_CHUNK_BYTES = 256 * 1024
_SPOOL_BYTES = 8 * 1024 * 1024

# The file is written beside its target and takes its place when it is whole; a link's target is replaced, not the link.
_RECEIVE = (
    't={target}; d=$(dirname -- "$t"); PATH=$PATH:/usr/bin:/bin; export PATH;'
    ' cd {workdir} && mkdir -p -- "$d" 2>&1 && f=$(mktemp "$d/.daytona-upload-XXXXXXXX" 2>&1)'
    ' || {{ echo "$f failed"; exit; }};'
    ' echo ready; head -c {size} >"$f" && chmod 644 "$f" && {{ [ ! -L "$t" ] || t=$(readlink -f -- "$t"); }}'
    ' && if [ -d "$t" ]; then echo "rename $f $t: file exists"; rm -f -- "$f"; exit; fi'
    ' && mv -f -- "$f" "$t" 2>&1 && echo done || rm -f -- "$f"; exit\n'
)
_SEND = (
    "t={path}; PATH=$PATH:/usr/bin:/bin; export PATH; cd {workdir};"
    ' if [ ! -e "$t" ]; then echo FILE_NOT_FOUND; elif [ -d "$t" ]; then echo INVALID_FILE_PATH;'
    ' elif [ ! -r "$t" ]; then echo FILE_ACCESS_DENIED;'
    ' else exec <"$t"; stat -L -c %s /proc/self/fd/0; exec cat; fi; exit\n'
)
_REASONS = {
    "FILE_NOT_FOUND": (404, "file not found: {}"),
    "INVALID_FILE_PATH": (400, "invalid file path: path points to a directory: {}"),
    "FILE_ACCESS_DENIED": (403, "permission denied: {}"),
}


async def receive(box: Box, part: BodyPartReader, target: str) -> str | None:
    """Writes the body of an upload's part to a file; returns what went wrong."""
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
        while data := await part.read_chunk(_CHUNK_BYTES):
            spool.write(data)
        size = spool.tell()
        spool.seek(0)
        async with shell(box) as stream:
            lines = Lines(stream)
            script = _RECEIVE.format(target=shlex.quote(target), workdir=shlex.quote(box.workdir), size=size)
            await stream.write(script.encode("utf-8", "surrogateescape"))
            said = await lines.line()
            if said != b"ready":
                return said.decode(errors="replace") or "the sandbox ended"
            while data := spool.read(_CHUNK_BYTES):
                await stream.write(data)
            said = await lines.line()
    return None if said == b"done" else said.decode(errors="replace") or "no space left on device"


class _Missing(Exception):
    """A file cannot be read; `code` is one of `_REASONS`."""

    def __init__(self, code: str, path: str) -> None:
        self.code = code
        self.status, message = _REASONS[code]
        super().__init__(message.format(path))


class _File:
    """A file of a box that is being read."""

    def __init__(self, lines: Lines, size: int) -> None:
        self._lines, self.size = lines, size

    async def copy(self, response: web.StreamResponse, *, at_most: int) -> None:
        left = min(self.size, at_most)
        async for data in self._lines.rest():
            await response.write(data[:left])
            left -= len(data)
            if left <= 0:
                return
        if left > 0:
            raise ContainerError("The file became shorter while it was read.")


async def _open(lines: Lines, path: str) -> _File:
    said = (await lines.line()).decode(errors="replace")
    if said in _REASONS:
        raise _Missing(said, path)
    if not said.isdecimal():
        raise ContainerError(f"The box said {said!r}.")
    return _File(lines, int(said))


def _script(box: Box, path: str) -> bytes:
    return _SEND.format(path=shlex.quote(path), workdir=shlex.quote(box.workdir)).encode("utf-8", "surrogateescape")


async def send_all(box: Box, paths: list[str], request: web.Request) -> web.StreamResponse:
    """Answers with the contents of files, or why they cannot be read, as parts of a form.

    Where the request's fault is `half`, it ends in the middle of the first file, or part.
    """
    response = web.StreamResponse(headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"})
    is_half = HALF in request
    await response.prepare(request)
    for path in paths:
        async with shell(box) as stream:
            await stream.write(_script(box, path))
            try:
                file = await _open(Lines(stream), path)
            except _Missing as error:
                body = Refusal(error.status, str(error), error.code, DAEMON).response(request).body
                assert isinstance(body, bytes)
                await response.write(_header("error", path, "application/json; charset=utf-8", len(body)) + body)
                if is_half:
                    break
            else:
                kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
                await response.write(_header("file", path, kind, file.size))
                await file.copy(response, at_most=file.size // 2 if is_half else file.size)
                if is_half:
                    break
        await response.write(b"\r\n")
    if is_half:
        raise HalfSent
    await response.write(f"--{BOUNDARY}--\r\n".encode())
    await response.write_eof()
    return response


class HalfSent(Exception):
    """The connection is to be cut now."""


def _header(name: str, path: str, kind: str, size: int) -> bytes:
    plain = re.sub(r'["\\\r\n]', "_", path).encode("latin-1", "replace").decode("latin-1")
    disposition = f'form-data; name="{name}"; filename="{plain}"; filename*=utf-8\'\'{urllib.parse.quote(path)}'
    return (
        f"--{BOUNDARY}\r\nContent-Disposition: {disposition}\r\nContent-Length: {size}\r\nContent-Type: {kind}\r\n\r\n"
    ).encode("latin-1")


async def delete(box: Box, path: str) -> None:
    """Deletes a file."""
    outcome = await run(box, f"[ -e {shlex.quote(path)} ] || exit 4; rm -- {shlex.quote(path)}")
    if outcome.exit_code == 4:
        raise Refusal(404, f"stat {path}: no such file or directory", "NOT_FOUND", DAEMON)
    if outcome.exit_code != 0:
        raise Refusal(400, outcome.output.strip(), "BAD_REQUEST", DAEMON)
