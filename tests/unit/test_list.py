"""`python -m ares_exp.list`: every option is there, and what is not known is no error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ares_exp.conf_dir import conf_dir
from ares_exp.list.choices import GROUP_OF
from ares_exp.list.command_line import main
from ares_exp.plugins import OPTION_GROUPS
from tests.installed_package import Site


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command prints as JSON."""

    def listed(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return listed


def test_everything_that_can_be_chosen_is_listed(listed: Any) -> None:
    assert {*GROUP_OF.values()} == {*OPTION_GROUPS}
    sections = listed()
    for section, group in GROUP_OF.items():
        rows = {row["name"]: row for row in sections[section] if row["from"] == "built in"}
        assert {*rows} == {path.stem for path in (conf_dir() / group).glob("*.yaml")}, section
        assert all(row["description"] for row in rows.values())
    tasks = {row["name"]: row["tasks"] for row in sections["envs"]}
    assert tasks["harbor_samples"] == 6
    assert listed("env") == {"envs": sections["envs"]}, "the name of the group will do"


def test_tasks_are_listed_with_what_is_known_of_them(listed: Any) -> None:
    [row] = listed("tasks", "env=harbor_samples", "env.tasks=fix-*")["tasks"]
    assert (row["index"], row["name"], row["image"]) == (0, "fix-moving-average", "Dockerfile")
    assert row["stages"] == [{"name": "", "agent_timeout_sec": 600.0, "verifier_timeout_sec": 60.0}]


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "env.limit=1"]) == 0
    assert " ".join(capsys.readouterr().out.split()).endswith("0 access-log-report 1 300 s 60 s Dockerfile ? ?")
    assert main(["containers"]) == 0
    assert "a bubblewrap box" in capsys.readouterr().out
    assert main(["plugins"]) == 0
    assert capsys.readouterr().out == "plugins\n  none\n\n"


def test_a_count_that_cannot_be_had_is_unknown(site: Site, listed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    harbor = "_target_: ares_exp.environments.harbor.HarborEnvironments\n"
    options = {"gone": f"{harbor}path: /nowhere\n", "needs": f"{harbor}path: ???\n", "odd": "_target_: os.getcwd\n"}
    options |= {"torn": "a: [\n", "missing": "_target_: wanting.missing.Class\n"}
    options["exits"] = "_target_: sys.exit\n"
    site.install("wanting", {"wanting": "wanting.conf"}, {f"wanting/conf/env/{k}.yaml": v for k, v in options.items()})
    rows = {row["name"]: row for row in listed("envs")["envs"]}
    assert {name: rows[name]["tasks"] for name in options} == dict.fromkeys(options)
    assert rows["gone"]["from"] == "plugin wanting"
    assert main(["envs"]) == 0
    assert " ? " in capsys.readouterr().out


def test_options_of_a_folder_of_ones_own(tmp_path: Path, listed: Any) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "two.yaml").write_text("# Two of them\ndefaults: [harbor]\nlimit: 2\n")
    [row] = [row for row in listed("envs", "--config-dir", str(tmp_path))["envs"] if row["name"] == "two"]
    assert (row["tasks"], row["description"], row["from"]) == (2, "Two of them", str(tmp_path))
    assert len(listed("tasks", "env=two", f"--config-dir={tmp_path}")["tasks"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["polices"], "Did you mean `policies`"),
        (["env=harbor"], "Overrides go with `tasks`"),
        (["envs", "env=harbor"], "Only `tasks` takes overrides"),
        (["tasks", "env=harbr"], "Did you mean `harbor`"),
        (["tasks", "env.path=/nowhere"], "/nowhere"),
        (["tasks", "env.pth=x"], "env.path"),
        (["tasks", "agent"], "agent"),
        (["envs", "--config-dir", "/nowhere"], "/nowhere"),
    ],
)
def test_a_mistake_is_one_paragraph(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.once
def test_a_pipe_that_is_closed_early_is_no_traceback() -> None:
    command = [sys.executable, "-m", "ares_exp.list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 141
