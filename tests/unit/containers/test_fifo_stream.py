"""Streams on FIFOs and the guard that ends a program with its parent, with real processes."""

import asyncio
import fcntl
import os
import select
import subprocess
from pathlib import Path
from typing import IO

import pytest

from ares_exp.containers.child_process import while_we_live
from ares_exp.containers.local.fifo_stream import FifoStream, fifo_pair


async def attach(directory: Path, command: str) -> tuple[FifoStream, subprocess.Popen[bytes]]:
    """A stream to a shell command that reads `x.in` and writes `x.out`."""
    with fifo_pair(directory, "x") as stream:
        process = subprocess.Popen(  # noqa: ASYNC220 (for milliseconds)
            ["sh", "-c", f"exec <{directory}/x.in >{directory}/x.out; echo; {command}"]
        )
        assert await asyncio.wait_for(stream.read(), 10) == b"\n"
    return stream, process


async def test_stream_carries_more_than_a_pipe_holds(tmp_path: Path) -> None:
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


async def test_stream_reports_eof_and_a_closed_reader(tmp_path: Path) -> None:
    stream, process = await attach(tmp_path, "read go; printf bye")
    await stream.write(b"go\n")
    process.wait(10)
    assert await stream.read() == b"bye"
    assert await stream.read() == b""
    with pytest.raises(BrokenPipeError):
        await stream.write(b"x")
    stream.close()


async def test_close_wakes_waiting_readers(tmp_path: Path) -> None:
    stream, process = await attach(tmp_path, "sleep 60 & exec sleep 60")
    reading, writing = asyncio.create_task(stream.read()), asyncio.create_task(stream.write(bytes(1_000_000)))
    await asyncio.sleep(0.05)
    stream.close()
    for task in (reading, writing):
        with pytest.raises(OSError, match="closed"):
            await asyncio.wait_for(task, 30)
    process.kill()
    process.wait(10)


async def test_cancelled_read_loses_no_data(tmp_path: Path) -> None:
    stream, process = await attach(tmp_path, "read go; sleep 0.1; printf data")
    await stream.write(b"go\n")
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0.01)
    reading.cancel()
    assert await asyncio.wait_for(stream.read(), 30) == b"data"
    stream.close()
    process.wait(10)


async def test_fifo_pair_is_removed_after_use(tmp_path: Path) -> None:
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


def until_its_end(stream: IO[bytes] | None) -> bytes:
    """The rest of what a process group prints: until none of it holds the stream any more."""
    assert stream is not None
    found = b""
    while True:
        assert select.select([stream], [], [], 30)[0], "it lives"
        data = os.read(stream.fileno(), 4096)
        if not data:
            return found
        found += data


def test_exit_code_passes_through_and_stdin_is_unread() -> None:
    command = while_we_live(["/bin/sh", "-c", 'cat; echo "$@"; exit 7', "sh", "a b", "$c", ""])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.wait(30) == 7
        process.stdin.close()
        assert until_its_end(process.stdout) == b"a b $c \n"


def test_end_of_stdin_kills_all_started_processes() -> None:
    command = while_we_live(["/bin/sh", "-c", "sleep 1000 & echo up; wait"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"up\n"
        process.stdin.close()
        assert until_its_end(process.stdout) == b""
        assert process.wait(30) == -9


@pytest.mark.parametrize("number", [3, 4, 9, None])
def test_program_reads_the_given_stdin(number: int | None, tmp_path: Path) -> None:
    """Whatever number the file has: those that the shell uses itself, or one of two digits."""
    (tmp_path / "stdin").write_text("some text\n")
    with (tmp_path / "stdin").open() as file:
        given = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 42)
    renumber = "" if number is None else f"exec {number}</dev/fd/{given};"
    words = while_we_live(["/bin/sh", "-c", "cat; echo up; sleep 1000 & wait"], stdin=f"/dev/fd/{number or given}")
    with subprocess.Popen(
        ["/bin/sh", "-c", f'{renumber} exec "$@"', "sh", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(given,),
        start_new_session=True,
    ) as process:
        os.close(given)
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == [b"some text\n", b"up\n"]
        process.stdin.close()
        assert until_its_end(process.stdout) == b""
        assert process.wait(30) == -9
