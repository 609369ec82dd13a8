"""What a shell is told at a press of Tab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ares_exp.commands.cli.commands import COMMANDS
from ares_exp.commands.cli.completion import candidates
from tests.conftest import ROOT


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
