import argparse
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

from ares_exp.commands.cli.hydra_run import SweepCallback, end_sweep, unchecked_help
from ares_exp.commands.cli.main import candidates, explain_flags, main
from ares_exp.commands.cli.run_command import COMMANDS, parser_of
from ares_exp.records.results import Outcome
from ares_exp.records.run_dir import STOP
from ares_exp.runs.sweeps.jobs import SweepPlan
from tests.conftest import ROOT
from tests.unit.runs.sweeps.recorded_job import record, result
from tests.warm_start import warm_command

PROGRAMS = ("ares-exp", "python -m ares_exp")


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What is written to stderr about a wrong command line."""
    monkeypatch.setattr(sys, "argv", ["ares-exp", *words])
    assert main() == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_texts_and_examples(command: str) -> None:
    module = import_module(f"ares_exp.commands.{command}")
    parser = parser_of(command, "PROGRAM")
    for one in (parser, *parser.below.values()):
        assert str(one.description).strip().endswith(".")
        assert "Examples:\n" in str(one.epilog)
        assert "\n  %(prog)s" in str(one.epilog)
        act, about = one.get_default("act"), one.get_default("about") or COMMANDS[command]
        act = act or vars(module).get("run")
        assert parser.below if act is None else list(inspect.signature(act).parameters) == ["arguments"]
        assert about[0].islower()
        assert not about.endswith(".")


def called(program: str, *words: str) -> subprocess.CompletedProcess[str]:
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
def test_help_shows_the_name_of_the_caller(command: str) -> None:
    texts = set()
    for program in PROGRAMS:
        done = called(program, command, "--help")
        name = f"{program} {command}"
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"usage: {name} [-h]")
        assert f"\n  {name}" in done.stdout.partition("Examples:")[2]
        texts.add(" ".join(re.sub(rf"{name}\b", "PROGRAM", done.stdout).split()))
    assert len(texts) == 1


def test_help_lists_every_command() -> None:
    for program in PROGRAMS:
        done = called(program, "--help")
        assert f"Usage: {program} [" in done.stdout
        assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_help_may_precede_the_command() -> None:
    first, second = (called("ares-exp", *words).stdout for words in (("--help", "show"), ("show", "--help")))
    assert first == second
    assert "usage: ares-exp show" in first


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["shwo", "x"], "There is no command `shwo`. Did you mean `show`? A word without `=` is the name of a command"),
        (["policy", "scripted"], "To set a key, write `ares-exp policy=scripted`."),
        (["resume"], "To set a key, write `ares-exp resume=…`."),
        (["run", "seed=1"], "To start a run, leave out this word: `ares-exp seed=1`."),
        (["logs", "run"], "In ares_exp, use `ares-exp show`."),
        (["resum"], "Did you mean `resume`?"),
        (["--help", "polcy"], "There is no command, group or key `polcy`. Did you mean `policy`?"),
        (["--help", "limits", "env=nope"], "There is no option `nope` in the group `env`. Options: ares, "),
        (["xyzzy"], f"Expected one of {', '.join(COMMANDS)}."),
    ],
)
def test_unknown_word_suggests_a_command(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected in said(capsys, monkeypatch, *words)


def test_directory_suggests_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = said(capsys, monkeypatch, str(tmp_path))
    assert f"`ares-exp show {tmp_path}`" in text
    assert f"`ares-exp env.path={tmp_path}`" in text


def test_option_group_with_help_lists_its_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ares-exp", "policy", "--help"])
    assert main() == 0
    assert "openai_responses" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["+no.such=1"], ["--cfg", "jobb"]])
def test_unknown_options_are_handled_by_hydra(words: list[str]) -> None:
    done = subprocess.run([*warm_command(), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "There is no command" not in done.stderr


def test_commands_start_without_heavy_imports() -> None:
    load = (
        "import ares_exp.commands.compare, ares_exp.commands.snapshots\n"
        "import sys; sys.argv[1:] = ['show', 'gone/for/good']\n"
        "from ares_exp.commands.cli.main import main\n"
        "assert main() == 2\n"
        "heavy = {'hydra', 'omegaconf', 'gymnasium', 'numpy', 'docker', 'wandb', 'rich', 'pyarrow', 'backports.zstd'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["show"], ["compare"], ["compare", "old"], ["merge", "out"],
        ["export", "--to=jsonl"], ["snapshots", "list"], ["snapshots", "show"], ["snapshots", "verify"],
        ["snapshots", "gc"], ["wandb", "sync"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_accepts_latest(
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


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--attempts", "3"], "There is no flag `--attempts`. In ares_exp, use `attempts=3`."),
        (["--attempts=3", "seed=1"], "In ares_exp, use `attempts=3`."),
        (["-n", "4"], "There is no flag `-n`. In ares_exp, use `concurrency=4`."),
        (["--agent-timeout-multiplier=2"], "In ares_exp, use `timeouts.agent_multiplier=2`."),
        (["--verify-on-truncation"], "In ares_exp, use `verify_on_truncation=…`."),
        (["--model", "gpt"], "In ares_exp, use `policy=openai policy.model=gpt`."),
        (["--resume", "run"], "In ares_exp, use `resume=run`."),
        (["--concurency", "3"], "Did you mean `concurrency=3`?"),
        (["--resum", "seed=1"], "Did you mean `resume=…`?"),
        (["--zzz"], "There is no flag `--zzz`. To set a key, write `key=value`"),
    ],
)
def test_unknown_flag_suggests_an_override(argv: list[str], expected: str) -> None:
    said = explain_flags(argv)
    assert said is not None
    assert expected in said


@pytest.mark.parametrize(
    "argv",
    [
        ["-m", "seed=1,2"],
        ["--cfg", "job", "--resolve", "-p", "env"],
        ["--conf=x", "--multirun"],
        ["-cd", "x", "--config-dir=y"],
        ["x=-1", "~tracker"],
        ["-sc", "query=bash"],
    ],
)
def test_flags_of_hydra_are_accepted(argv: list[str]) -> None:
    assert explain_flags(argv) is None


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_stopped_sweep_counts_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cut: bool, is_stopped: bool
) -> None:
    SweepPlan(1, jobs=(("seed=1",),)).write(tmp_path)
    last = result("b", 0, None, Outcome.CANCELLED) if is_cut else result("b", 0, 1.0)
    record(tmp_path / "0", [result("a", 0, 1.0), last], ended=not is_cut)
    if is_stopped:
        (tmp_path / STOP).touch()
    monkeypatch.setattr(SweepCallback, "sweep_dir", tmp_path)
    assert end_sweep(0) == (0 if not is_cut else 130 if is_stopped else 1)


class Lazy:
    def __repr__(self) -> str:
        return "rendered"


def test_unchecked_help_temporarily_accepts_an_object() -> None:
    before = argparse.ArgumentParser.add_argument
    with unchecked_help():
        action = argparse.ArgumentParser().add_argument("--flag", action="store_true", help=Lazy())  # type: ignore[arg-type]
    assert f"{action.help}" == "rendered"
    assert argparse.ArgumentParser.add_argument is before
    with pytest.raises(KeyError), unchecked_help():
        raise KeyError
    assert argparse.ArgumentParser.add_argument is before


@pytest.mark.skipif(sys.version_info[:2] != (3, 14), reason="only argparse of Python 3.14 rejects the parser of Hydra")
def test_hydra_still_needs_unchecked_help() -> None:
    from hydra._internal.utils import get_args_parser

    with pytest.raises(ValueError, match="badly formed help string"):
        get_args_parser()
    with unchecked_help():
        assert get_args_parser().parse_args(["--run", "a=b"]).overrides == ["a=b"]


@pytest.mark.parametrize(
    ("line", "found", "is_hydra_asked"),
    [
        ("ares-exp ", [*COMMANDS], True),
        ("ares-exp sh", ["show"], True),
        ("ares-exp show", ["show"], True),
        ("ares-exp show ", ["runs/", "tasks/"], False),
        ("ares-exp show outputs/po", [], False),
        ("ares-exp ctl outputs", [], False),
        ("ares-exp ctl latest s", ["status", "set", "stop"], False),
        ("ares-exp ctl --reason why latest --now p", ["pause"], False),
        ("ares-exp ctl latest pause --f", ["--for"], False),
        ("ares-exp ctl latest pause --for -", [], False),
        ("ares-exp ctl latest cancel fix", [], False),
        ("ares-exp snapshots s", ["show"], False),
        ("ares-exp snapshots nothing s", [], False),
        ("ares-exp snapshots show --he", ["--help"], False),
        ("ares-exp policy=or", [], True),
        ("ares-exp attempts=2 sh", [], True),
        ("ares-exp --conf", ["--config-path", "--config-name", "--config-dir"], False),
        ("ares-exp attempts=2 --ver", ["--version"], False),
        ("ares-exp compare runs/a runs/", ["runs/a/"], False),
        ("ares-exp show runs/a/f", ["runs/a/fix__0", "runs/a/fix__1"], False),
        ("ares-exp resume=ru", ["resume=runs/"], False),
        ("ares-exp replay=runs/a/fix__1", ["replay=runs/a/fix__1"], False),
        ("ares-exp env.path=t", ["env.path=tasks/"], False),
        ("ares-exp env.path=tasks env.tasks=g", ["env.tasks=greet"], False),
        ("ares-exp env.tasks=[write-greeting,count", ["env.tasks=[write-greeting,count-records"], False),
        ("ares-exp --config-dir t", ["tasks/"], False),
        ("ares-exp task check t", ["tasks/"], False),
    ],
)
def test_commands_flags_paths_and_tasks_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, found: list[str], is_hydra_asked: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks" / "greet").mkdir(parents=True)
    (tmp_path / "tasks" / "greet" / "task.toml").touch()
    (tmp_path / "runs" / "a").mkdir(parents=True)
    rows = [f'{{"episode_id": "fix__{number}__3f2a91bc", "reward": 1}}\n' for number in (0, 1)]
    (tmp_path / "runs" / "a" / "episodes.jsonl").write_text("".join(rows))
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.delenv("COMP_POINT", raising=False)
    assert candidates() == (found, is_hydra_asked)


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_of_every_command_are_completed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COMP_LINE", f"ares-exp {name} --h")
    monkeypatch.delenv("COMP_POINT", raising=False)
    assert "--help" in candidates()[0]


def test_text_after_the_cursor_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "ares-exp sho outputs/first")
    monkeypatch.setenv("COMP_POINT", str(len("ares-exp sho")))
    assert candidates() == (["show"], True)


@pytest.mark.slow
@pytest.mark.once
def test_bash_completes_commands_options_and_files(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ares-exp"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; from ares_exp.commands.cli.main import main; '
                       'sys.argv[0] = \'ares-exp\'; sys.exit(main())" "$@"\n')  # fmt: skip
    program.chmod(0o755)
    script = """
    eval "$(ares-exp -sc install=bash)"
    mkdir outputs
    for line in "ares-exp comp" "ares-exp policy=or" "ares-exp show o" "ares-exp 'no"; do
        COMP_LINE=$line COMP_POINT=${#line}; words=($line); COMP_CWORD=$((${#words[@]} - 1))
        hydra_bash_completion
        printf "%s|\\n" "${COMPREPLY[*]}"
    done
    """
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.split("|\n")[:3] == ["compare ", "policy=oracle ", "outputs/"], done.stderr
    assert done.stdout.count("|") == 4
    assert done.stderr == "", "nothing comes between the user and the prompt"
