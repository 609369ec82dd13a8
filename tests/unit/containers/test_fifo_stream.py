"""A pair of FIFOs as a stream, with real processes at the other end."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from ares_exp.containers.local.fifo_stream import FifoStream, fifo_pair


async def attach(directory: Path, command: str) -> tuple[FifoStream, subprocess.Popen[bytes]]:
    """A stream to a shell command that reads `x.in` and writes `x.out`."""
    with fifo_pair(directory, "x") as stream:
        process = subprocess.Popen(  # noqa: ASYNC220 (for milliseconds)
            ["sh", "-c", f"exec <{directory}/x.in >{directory}/x.out; echo; {command}"]
        )
        assert await asyncio.wait_for(stream.read(), 10) == b"\n"
    return stream, process


async def test_both_directions_far_beyond_what_a_pipe_holds(tmp_path: Path) -> None:
    stream, process = await attach(tmp_path, "exec cat")
    data = os.urandom(3_000_000)
    writing = asyncio.create_task(stream.write(data))
    back = b""
    while len(back) < len(data):
        back += await asyncio.wait_for(stream.read(), 10)
    await writing
    assert back == data
    stream.close()
    stream.close()
    assert process.wait(10) == 0


async def test_the_end_and_a_reader_that_is_gone(tmp_path: Path) -> None:
    stream, process = await attach(tmp_path, "read go; printf bye")
    await stream.write(b"go\n")
    process.wait(10)
    assert await stream.read() == b"bye"
    assert await stream.read() == b""
    with pytest.raises(BrokenPipeError):
        await stream.write(b"x")
    stream.close()


async def test_closing_wakes_who_waits(tmp_path: Path) -> None:
    stream, process = await attach(tmp_path, "sleep 60 & exec sleep 60")
    reading, writing = asyncio.create_task(stream.read()), asyncio.create_task(stream.write(bytes(1_000_000)))
    await asyncio.sleep(0.05)
    stream.close()
    for task in (reading, writing):
        with pytest.raises(OSError, match="closed"):
            await asyncio.wait_for(task, 30)
    process.kill()
    process.wait(10)


async def test_cancelling_a_read_loses_nothing(tmp_path: Path) -> None:
    stream, process = await attach(tmp_path, "read go; sleep 0.1; printf data")
    await stream.write(b"go\n")
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0.01)
    reading.cancel()
    assert await asyncio.wait_for(stream.read(), 30) == b"data"
    stream.close()
    process.wait(10)


async def test_nothing_is_left_of_a_pair(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with fifo_pair(tmp_path, "x") as stream:
        assert {path.name for path in tmp_path.iterdir()} == {"x.in", "x.out"}
    stream.close()
    with pytest.raises(RuntimeError, match="of the body"), fifo_pair(tmp_path, "x"):
        raise RuntimeError("of the body")
    (tmp_path / "x.out").write_text("in the way")
    with pytest.raises(FileExistsError), fifo_pair(tmp_path, "x"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["x.out"]
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
