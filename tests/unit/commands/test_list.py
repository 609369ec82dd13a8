import importlib
import json
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ares_exp.commands import list as listing
from ares_exp.commands.cli.run_command import run_command
from ares_exp.commands.list import GROUP_OF
from ares_exp.config.options import OPTION_GROUPS, conf_dir, find_options
from tests.installed_package import Site

main = partial(run_command, "list", program="ares-exp list")


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Any:
    def listed(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return listed


def test_everything_selectable_is_listed(listed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert {*GROUP_OF.values()} == {*OPTION_GROUPS}
    assert main(["--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "", "an environment that is built in and cannot be counted is no news"
    sections = json.loads(out)
    for section, group in GROUP_OF.items():
        rows = {row["name"]: row for row in sections[section] if row["from"] == "built in"}
        assert {*rows} == {path.stem for path in (conf_dir() / group).glob("*.yaml")}, section
        assert all(row["description"] for row in rows.values())
    tasks = {row["name"]: row["tasks"] for row in sections["envs"]}
    assert tasks["harbor"] == 6
    assert listed("wrapper") == {"wrappers": sections["wrappers"]}, "the name of the group will do"


def test_tasks_are_listed_with_their_metadata(listed: Any) -> None:
    [row] = listed("tasks", "env=harbor", "env.tasks=fix-*")["tasks"]
    assert (row["index"], row["name"], row["image"]) == (2, "fix-moving-average", "Dockerfile")
    assert [one["index"] for one in listed("tasks", "env=twenty_questions", "env.tasks=5")["tasks"]] == [5]
    assert row["stages"] == [{"name": "", "agent_timeout_sec": 600.0, "verifier_timeout_sec": 60.0}]


def test_tables_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "env.limit=1"]) == 0
    assert " ".join(capsys.readouterr().out.split()).endswith("0 access-log-report 1 300 s 60 s Dockerfile ? ?")
    assert main(["containers"]) == 0
    assert "a bubblewrap sandbox" in capsys.readouterr().out
    assert main(["plugins"]) == 0
    assert capsys.readouterr().out == "plugins\n  none\n\n"


def test_options_of_a_custom_directory_are_listed(tmp_path: Path, listed: Any) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "two.yaml").write_text("# Two of them\ndefaults: [harbor]\nlimit: 2\n")
    [row] = [row for row in listed("envs", "--config-dir", str(tmp_path))["envs"] if row["name"] == "two"]
    assert (row["tasks"], row["description"], row["from"]) == (2, "Two of them", str(tmp_path))
    assert len(listed("tasks", "env=two", f"--config-dir={tmp_path}")["tasks"]) == 2


def test_unusable_options_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_mine.py").write_text("class Careful: ...\n")
    (tmp_path / "breaks.py").write_text("import no_such_module_of_yours\n")
    folder = tmp_path / "agent"
    folder.mkdir()
    files = {
        "good": "_target_: of_mine.Careful\n",
        "derived": "defaults: [shell]\n",
        "unclosed": "a: [\n",
        "listed": "- a\n",
        "targetless": "a: 1\n",
        "elsewhere": "_target_: nowhere_at_all.Careful\n",
        "misspelt": "_target_: of_mine.Carful\n",
        "breaks": "_target_: breaks.Careful\n",
    }
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    assert main(["agents", "--config-dir", str(tmp_path)]) == 0
    told = {line.split("`")[1]: line for line in capsys.readouterr().err.splitlines()}
    assert {*told} == {f"agent={name}" for name in files} - {"agent=good", "agent=derived"}
    assert f"({tmp_path}) cannot be used: {folder / 'unclosed.yaml'}: while parsing" in told["agent=unclosed"]
    assert "expected `key: value` lines, got list" in told["agent=listed"]
    assert "has no `_target_`" in told["agent=targetless"]
    assert f"no module `nowhere_at_all` for `nowhere_at_all.Careful` in {Path.cwd()}" in told["agent=elsewhere"]
    assert "has no `Carful`. Did you mean `Careful`?" in told["agent=misspelt"]
    assert "`breaks` cannot be imported: No module named 'no_such_module_of_yours'" in told["agent=breaks"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["polices"], "Did you mean `policies`"),
        (["env=harbor"], "use `ares-exp list tasks env=…`"),
        (["envs", "env=harbor"], "Expected overrides only after `tasks`, got env=harbor after `envs`."),
        (["tasks", "env=harbr"], "Did you mean `harbor`"),
        (["tasks", "env.path=/nowhere"], "/nowhere"),
        (["tasks", "env.pth=x"], "env.path"),
        (["tasks", "agent"], "agent"),
        (["envs", "--config-dir", "/nowhere"], "/nowhere"),
    ],
)
def test_mistake_is_one_paragraph(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


NOISY = """
import threading

print("imported")
release = threading.Event()

class Source:
    path, loads_offline = None, True

    def load(self, report):
        print("loading")
        return self.names()

    def names(self):
        return ["a", "b"]

    def check(self, parts, *, report): pass
    def make(self, task_name, parts): pass

class Stuck(Source):
    def names(self):
        release.wait()

class Leaving(Source):
    def names(self):
        raise SystemExit(3)
"""


@pytest.fixture
def noisy(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin whose environments print, raise, hang and are not there."""
    classes = {"noisy": "Source", "stuck": "Stuck", "leaving": "Leaving", "missing": "Missing"}
    options = {f"noisy/conf/env/{name}.yaml": f"_target_: noisy.{made}\n" for name, made in classes.items()}
    site.install("noisy", {"noisy": "noisy.conf"}, {"noisy/__init__.py": NOISY, **options})
    monkeypatch.delitem(sys.modules, "noisy", raising=False)


@pytest.mark.usefixtures("noisy")
def test_noisy_and_failing_plugins_are_tolerated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site" / "noisy" / "conf" / "env" / "stuck.yaml").unlink()
    monkeypatch.setattr(listing, "COUNT_TIMEOUT_SEC", 100.0)
    assert main(["envs", "--json"]) == 0
    out, err = capsys.readouterr()
    tasks = {row["name"]: row["tasks"] for row in json.loads(out)["envs"]}
    assert (tasks["leaving"], tasks["missing"], tasks["noisy"]) == (None, None, 2)
    assert {"imported", "loading"} <= {*err.splitlines()}
    leaving, missing = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert leaving == "warning: The tasks of `env=leaving` (plugin noisy) cannot be counted: SystemExit: 3"
    assert missing.startswith("warning: `env=missing` (plugin noisy) cannot be used: ")
    assert "has no `Missing`" in missing


@pytest.mark.usefixtures("noisy")
def test_hanging_plugin_times_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(listing, "COUNT_TIMEOUT_SEC", 0.05)
    [stuck] = [option for option in find_options("env") if option.name == "stuck"]
    try:
        assert listing._count_tasks(stuck, []) is None
    finally:
        importlib.import_module("noisy").release.set()
        for thread in [one for one in threading.enumerate() if one.name == "count stuck"]:
            thread.join(60)
    said = "The tasks of `env=stuck` (plugin noisy) cannot be counted: TimeoutError: counting takes longer than 0.05 s"
    assert capsys.readouterr().err == f"warning: {said}\n"
