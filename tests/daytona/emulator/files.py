"""Files in and out of a box, as the daemon in a real sandbox moves them."""

import shlex
import tempfile

from aiohttp import BodyPartReader, web

from ares_exp.errors import ContainerError
from tests.daytona.emulator.boxes import Box, Lines, run, shell
from tests.daytona.emulator.wire import HALF, Cut, Refusal

BOUNDARY = "DAYTONA-FILE-BOUNDARY"
DAEMON = "DAYTONA_DAEMON"
_CHUNK_BYTES = 256 * 1024
_SPOOL_BYTES = 8 * 1024 * 1024
_RECEIVE = (
    't={target}; cd {workdir} && mkdir -p -- "$(dirname -- "$t")" 2>&1 && [ ! -d "$t" ] && {{ : >"$t"; }} 2>&1'
    ' || {{ echo failed; exit; }}; echo ready; head -c {size} >"$t" && chmod 644 "$t" && echo done; exit\n'
)
_SEND = (
    't={path}; cd {workdir}; if [ -f "$t" ]; then exec <"$t"; stat -L -c %s /proc/self/fd/0; exec cat; fi;'
    " echo FILE_NOT_FOUND; exit\n"
)


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


async def send_all(box: Box, paths: list[str], request: web.Request) -> web.StreamResponse:
    """Answers with the contents of files, or why they cannot be read, as parts of a form.

    Where the request's fault is `half`, it ends in the middle of the first file.
    """
    response = web.StreamResponse(headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"})
    await response.prepare(request)
    for path in paths:
        async with shell(box) as stream:
            script = _SEND.format(path=shlex.quote(path), workdir=shlex.quote(box.workdir))
            await stream.write(script.encode("utf-8", "surrogateescape"))
            lines = Lines(stream)
            said = (await lines.line()).decode(errors="replace")
            if said == "FILE_NOT_FOUND":
                body = Refusal(404, f"file not found: {path}", said, DAEMON).response(request).body
                assert isinstance(body, bytes)
                await response.write(_header("error", path, "application/json; charset=utf-8", len(body)) + body)
            else:
                await response.write(_header("file", path, "application/octet-stream", int(said or 0)))
                left = int(said or 0) // (2 if HALF in request else 1)
                async for data in lines.rest():
                    await response.write(data[:left])
                    left -= min(left, len(data))
                if left:
                    raise ContainerError("The file became shorter while it was read.")
                if HALF in request:
                    raise Cut
        await response.write(b"\r\n")
    await response.write(f"--{BOUNDARY}--\r\n".encode())
    await response.write_eof()
    return response


def _header(name: str, path: str, kind: str, size: int) -> bytes:
    disposition = f'form-data; name="{name}"; filename="{path}"'
    return (
        f"--{BOUNDARY}\r\nContent-Disposition: {disposition}\r\nContent-Length: {size}\r\nContent-Type: {kind}\r\n\r\n"
    ).encode()


async def delete(box: Box, path: str) -> None:
    exit_code, output = await run(box, f"[ -e {shlex.quote(path)} ] || exit 4; rm -- {shlex.quote(path)}")
    if exit_code == 4:
        raise Refusal(404, f"stat {path}: no such file or directory", "NOT_FOUND", DAEMON)
    if exit_code != 0:
        raise Refusal(400, output.strip(), "BAD_REQUEST", DAEMON)
