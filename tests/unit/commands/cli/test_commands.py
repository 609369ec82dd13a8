"""The first word of a command line, in each way of typing it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest

from ares_exp.commands.cli.commands import COMMANDS
from ares_exp.commands.cli.main import main
from ares_exp.commands.cli.run_command import CommandModule, parser_of
from tests.warm_start import warm_command

SHORT = "import sys; sys.argv[0] = 'ares-exp'; from ares_exp.commands.cli.main import main; sys.exit(main())"
PROGRAMS = {"ares-exp": ["-c", SHORT], "python -m ares_exp": ["-m", "ares_exp"]}
IN_PROCESSES_OF_ITS_OWN = "show"
"""One of the commands, which is called as a user calls it; the others are called in this process."""


def process(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "1000", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What is written to stderr about a wrong command line."""
    monkeypatch.setattr(sys, "argv", ["ares-exp", *words])
    assert main() == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err


@pytest.mark.parametrize("entry", COMMANDS.values(), ids=COMMANDS)
def test_every_command_has_texts_and_examples(entry: CommandModule) -> None:
    module = import_module(entry.module)
    parser = parser_of(entry.module, "PROGRAM")
    for one in (parser, *parser.below.values()):
        assert str(one.description).strip().endswith(".")
        assert "Examples:\n" in str(one.epilog)
        assert "\n  %(prog)s" in str(one.epilog)
        act, about = (one.get_default(name) for name in ("act", "about")) if one is not parser else (None, entry.about)
        act = act or vars(module).get("run")
        assert parser.below if act is None else list(inspect.signature(act).parameters) == ["arguments"]
        assert about[0].islower()
        assert not about.endswith(".")


def called(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Calls the program in this process."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in {"COLUMNS": "1000", "NO_COLOR": "1", "PYTHON_COLORS": "0"}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "argv", ["ares_exp/__main__.py" if "-m" in program else program, *words])
        try:
            code: object = main()
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(words, int(str(code or 0)), out.getvalue(), err.getvalue())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_calls_itself_as_it_was_called(command: str) -> None:
    texts = set()
    for program, words in PROGRAMS.items():
        own_process = command == IN_PROCESSES_OF_ITS_OWN
        done = process(*words, command, "--help") if own_process else called(program, command, "--help")
        name = f"{program} {command}"
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"usage: {name} [-h]")
        assert f"\n  {name}" in done.stdout.partition("Examples:")[2]
        texts.add(" ".join(re.sub(rf"{name}\b", "PROGRAM", done.stdout).split()))
    assert len(texts) == 1


def test_the_help_lists_every_command() -> None:
    for program in PROGRAMS:
        done = called(program, "--help")
        assert f"Usage: {program} [" in done.stdout
        assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_help_may_stand_before_the_command() -> None:
    first, second = (called("ares-exp", *words).stdout for words in (("--help", "show"), ("show", "--help")))
    assert first == second
    assert "usage: ares-exp show" in first


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["shwo", "x"], "There is no command `shwo`. Did you mean `show`? A first word without `=` is a command"),
        (["policy", "scripted"], "To set a key, write `ares-exp policy=scripted`."),
        (["resume"], "To set a key, write `ares-exp resume=…`."),
        (["run", "seed=1"], "A run needs no word: `ares-exp seed=1`."),
        (["logs", "run"], "It is `ares-exp show` here."),
        (["resum"], "Did you mean `resume`?"),
        (["--help", "polcy"], "There is no command, group or key `polcy`. Did you mean `policy`?"),
        (["--help", "limits", "env=nope"], "There is no option `nope` in the group `env`. Options: ares, "),
        (["xyzzy"], f"Expected one of {', '.join(COMMANDS)}."),
    ],
)
def test_an_unknown_word_is_answered_with_what_was_meant(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected in said(capsys, monkeypatch, *words)


def test_a_folder_is_no_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = said(capsys, monkeypatch, str(tmp_path))
    assert f"`ares-exp show {tmp_path}`" in text
    assert f"`ares-exp env.path={tmp_path}`" in text


def test_a_group_of_options_with_help_is_none_either(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ares-exp", "policy", "--help"])
    assert main() == 0
    assert "openai_responses" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["+no.such=1"], ["--cfg", "jobb"]])
def test_anything_else_is_a_run(words: list[str]) -> None:
    done = subprocess.run([*warm_command(), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "There is no command" not in done.stderr


def test_a_command_starts_without_hydra() -> None:
    load = (
        "import sys; sys.argv[1:] = ['show', 'gone/for/good']\n"
        "from ares_exp.commands.cli.main import main\n"
        "assert main() == 2\n"
        "print(sorted({'hydra', 'omegaconf', 'gymnasium', 'numpy', 'docker', 'wandb'} & set(sys.modules)))"
    )
    assert process("-c", load).stdout == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["show"], ["compare"], ["compare", "old"], ["merge", "out"],
        ["export", "--to=jsonl"], ["snapshots", "list"], ["snapshots", "show"], ["snapshots", "verify"],
        ["snapshots", "gc"], ["wandb", "sync"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_latest_is_a_run_for_every_command(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "outputs" / "run"
    run.mkdir(parents=True)
    (run / "episodes.jsonl").touch()
    (run / "sessions.jsonl").write_text('{"started": 1.0}\n')
    monkeypatch.setattr(sys, "argv", ["ares-exp", *words, "latest", *(["out.jsonl"] if words[0] == "export" else [])])
    main()
    assert capsys.readouterr().err.startswith("`latest` is outputs/run\n")
