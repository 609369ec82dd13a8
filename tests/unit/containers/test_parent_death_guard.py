"""The shell that ends a program with us, with real processes and pipes."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
from pathlib import Path
from typing import IO

import pytest

from ares_exp.containers.parent_death_guard import while_we_live


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


def test_the_exit_code_is_the_programs_own_and_it_reads_nothing() -> None:
    command = while_we_live(["/bin/sh", "-c", 'cat; echo "$@"; exit 7', "sh", "a b", "$c", ""])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.wait(30) == 7
        assert process.stdin is not None
        process.stdin.close()
        assert until_its_end(process.stdout) == b"a b $c \n"


def test_at_the_end_of_stdin_all_that_the_program_started_is_killed(tmp_path: Path) -> None:
    done = tmp_path / "it's done"
    command = while_we_live(["/bin/sh", "-c", "sleep 1000 & echo up; wait"], at_end=f'echo > "{done}"')
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert process.stdin is not None
        process.stdin.close()
        assert until_its_end(process.stdout) == b""
        assert process.wait(30) == -9
    assert done.exists()


@pytest.mark.parametrize("number", [3, 4, 9, None])
def test_with_a_pipe_of_its_own_the_program_reads_stdin(number: int | None) -> None:
    """Whatever number the pipe has: those that the shell uses itself, or one of two digits."""
    reading, held = os.pipe()
    pipe = fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, 42) if number is None else reading
    renumber = "" if number is None else f"exec {number}</dev/fd/{pipe};"
    words = while_we_live(["/bin/sh", "-c", "cat; echo up; sleep 1000 & wait"], pipe=number or pipe)
    try:
        with subprocess.Popen(
            ["/bin/sh", "-c", f'{renumber} exec "$@"', "sh", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(pipe,),
            start_new_session=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"some text\n")
            process.stdin.close()
            assert [process.stdout.readline(), process.stdout.readline()] == [b"some text\n", b"up\n"]
            os.close(held)
            held = -1
            assert until_its_end(process.stdout) == b""
            assert process.wait(30) == -9
    finally:
        for one in {reading, pipe, held} - {-1}:
            os.close(one)
