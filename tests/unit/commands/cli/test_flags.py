"""Flags of the command line, its completion, and the end of a sweep."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ares_exp.commands.cli.commands import COMMANDS
from ares_exp.commands.cli.completion import candidates
from ares_exp.commands.cli.flags import explain_flags, unchecked_help
from ares_exp.commands.cli.hydra_callback import SweepCallback, end_sweep
from ares_exp.records.results import Outcome
from ares_exp.records.run_dir import STOP
from ares_exp.runs.sweeps.plan import SweepPlan
from tests.conftest import ROOT
from tests.unit.runs.sweeps.recorded_job import record, result


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--attempts", "3"], "There is no flag `--attempts`. It is `attempts=3` here."),
        (["--attempts=3", "seed=1"], "It is `attempts=3` here."),
        (["-n", "4"], "There is no flag `-n`. It is `concurrency=4` here."),
        (["--agent-timeout-multiplier=2"], "It is `timeouts.agent_multiplier=2` here."),
        (["--verify-on-truncation"], "It is `verify_on_truncation=…` here."),
        (["--model", "gpt"], "It is `policy=openai policy.model=gpt` here."),
        (["--resume", "run"], "It is `resume=run` here."),
        (["--concurency", "3"], "Did you mean `concurrency=3`?"),
        (["--resum", "seed=1"], "Did you mean `resume=…`?"),
        (["--zzz"], "There is no flag `--zzz`. To set a key, write `key=value`"),
    ],
)
def test_a_flag_that_is_none_is_answered_with_the_override(argv: list[str], expected: str) -> None:
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
def test_hydras_own_flags_are_left_to_it(argv: list[str]) -> None:
    assert explain_flags(argv) is None


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_sweep_that_was_stopped_was_interrupted_whichever_process_run_its_jobs(
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


def test_unchecked_help_accepts_an_object_for_a_while() -> None:
    before = argparse.ArgumentParser.add_argument
    with unchecked_help():
        action = argparse.ArgumentParser().add_argument("--flag", action="store_true", help=Lazy())  # type: ignore[arg-type]
    assert f"{action.help}" == "rendered"
    assert argparse.ArgumentParser.add_argument is before


def test_unchecked_help_is_restored_after_an_error() -> None:
    before = argparse.ArgumentParser.add_argument
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
        ("ares-exp", [*COMMANDS], True),
        ("ares-exp show r", ["runs/"], False),
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
def test_commands_flags_paths_and_tasks(
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
def test_every_command_has_its_flags_completed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COMP_LINE", f"ares-exp {name} --h")
    monkeypatch.delenv("COMP_POINT", raising=False)
    assert "--help" in candidates()[0]


def test_what_stands_behind_the_cursor_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
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
