"""Every command and every example of the README, as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ares_exp.tasks.task_set import SAMPLES

pytestmark = pytest.mark.once
ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SETUP = [text for kind, text in BLOCKS if kind == "bash" and "venv" in text]
COMMANDS = [text.strip() for kind, text in BLOCKS if kind == "bash" and "venv" not in text]
FILES = [text for _, text in BLOCKS if text.startswith("# file: ")]
SCRIPTS = [text for kind, text in BLOCKS if kind == "python" and text not in FILES]


def marks(command: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.docker if "container=docker" in command else pytest.mark.local]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with what the README takes for granted: two tasks, and the files that it shows."""
    for name in ("write-greeting", "count-records"):
        shutil.copytree(SAMPLES / name, tmp_path / "tasks" / name)
    for text in FILES:
        path = tmp_path / text.splitlines()[0].removeprefix("# file: ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.split("\n", 1)[1])
    return tmp_path


def run(command: str, here: Path, **env: str) -> subprocess.CompletedProcess[str]:
    shims = here / "shims"
    shims.mkdir(exist_ok=True)
    for name in ("python", "python3"):
        if not (shims / name).exists():
            (shims / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            (shims / name).chmod(0o755)
    environment = {**os.environ, **env, "PATH": f"{shims}:{os.environ['PATH']}", "WANDB_MODE": "offline"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_the_readme_opens_with_the_two_commands() -> None:
    assert [kind for kind, _ in BLOCKS[:2]] == ["bash", "bash"]
    assert len(SETUP) == 2
    assert "-m ares_exp" in SETUP[0]
    assert "-m pytest" in SETUP[1]
    assert len(COMMANDS) >= 6
    assert len(SCRIPTS) >= 3
    assert len(FILES) == 2


def test_every_link_leads_somewhere() -> None:
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose) if not link.startswith("https://")]
    assert len(links) > 20
    assert [link for link in links if link not in anchors and not (ROOT / link).exists()] == []


def test_the_map_of_conf_has_every_option() -> None:
    section = TEXT.partition("## The map of `conf/`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE)
    groups = sorted(path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "hydra")
    assert sorted(group for group, _ in rows) == groups
    for group, options in rows:
        files = (ROOT / "conf" / group).glob("*.yaml")
        assert sorted(re.findall(r"`(\w+)`", options)) == sorted(path.stem for path in files)


@pytest.mark.parametrize("command", [pytest.param(command, marks=marks(command)) for command in COMMANDS])
def test_a_command(command: str, here: Path, endpoint: Any) -> None:
    done = run(command.replace("http://127.0.0.1:8000/v1", endpoint.url), here, OPENAI_API_KEY="sk-test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.local
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example(script: str, here: Path) -> None:
    if "outputs/first" in script:
        assert run("python -m ares_exp tracker=none hydra.run.dir=outputs/first", here).returncode == 0
    (here / "example.py").write_text(script)
    done = run("python -W error example.py", here)
    assert done.returncode == 0, done.stderr
    assert done.stdout
