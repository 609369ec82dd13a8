"""`ares-exp show` and `ares-exp compare` as processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ares_exp.commands.cli.main import run_word
from tests.unit.trajectories.chats import chat, write


@pytest.mark.parametrize(
    "arguments",
    [
        ("show",),
        ("show", "x", "--steps", "three"),
        ("compare", "--nothing"),
        ("show", "x", "--nothing"),
        ("clean", "all"),
    ],
)
def test_wrong_command_line_is_explained(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_word(arguments, "ares-exp")
    said = capsys.readouterr().err
    assert f"usage: ares-exp {arguments[0]}" in said
    assert ("expected A:B" in said) == ("three" in arguments)


@pytest.mark.slow
def test_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    path = write(tmp_path / "e.json", chat(length=500))
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "ares_exp", "show", str(path)], stdout=writing, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(writing)
        assert os.read(reading, 10) == b"Episode a1"
        os.close(reading)
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 141


def test_pipe_gets_plain_text_in_any_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "e.json", chat(task="Grüße ✓"))
    assert run_word(["show", str(path)], "ares-exp") == 0
    assert "Grüße ✓" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-m", "ares_exp", "show", str(path)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "40", "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "Gr\\xfc\\xdfe \\u2713" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) > 40


def test_impossible_file_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_word(["show", "a" * 300], "ares-exp") == 2
    assert capsys.readouterr().err == f"error: {'a' * 300}: File name too long.\n"


def test_unwritable_output_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "e.json", chat())
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ares_exp", "show", str(path)],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "error: Cannot write the output: No space left on device.\n")
