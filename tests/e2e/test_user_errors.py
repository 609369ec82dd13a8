"""Every mistake gets one paragraph and exit code 2, and nothing is started."""

import sys
from pathlib import Path
from typing import Any

import pytest

from ares_exp import __version__
from tests.conftest import run_command

# The sandbox's preflight comes before the policy's preflight and before the selection is checked.
pytestmark = [pytest.mark.local, pytest.mark.once]

CHAT = ("policy=openai", "policy.model=m")


REPEATED: list[tuple[list[str], str]] = [
    (["container=dokcer"], "docker"),
    (["env.tsks=3"], "env.tasks"),
    (["+attemps=2"], "attempts"),
    (["+policy.temprature=1"], "temprature"),
    (["seed=1.5"], "seed"),
    (["agent.command_timeout_sec=soon"], "agent.command_timeout_sec"),
    (["limits.steps=-1"], "limits.steps"),
    (["timeouts.agent=-5"], "timeouts.agent"),
    (["timeouts.multiplier=0"], "timeouts.multiplier"),
    (["agent.max_output_chars=-1"], "agent.max_output_chars"),
    (["env.limit=0"], "env.limit"),
    (["env.tasks=[]"], "env.tasks=null"),
    (["env.path=~/no/such/tasks"], "/no/such/tasks"),
    (["env.tasks=99"], "99"),
    (["env.tasks=3:3"], "3:3"),
    (["env.tasks=@5/2"], "@5/2"),
    (["policy=replay", "policy.trajectory=gone"], "gone"),
    (["policy=openai"], "policy.model"),
    (["--attempts", "3"], "`attempts=3`"),
    (["limits=5"], "Set `limits.KEY=…`"),
    (["attempts"], "Did you mean `attempts=…`"),
    (["~collector"], "collector"),
    (["collector.json.compression=gzip"], "collector.json.compression"),
    (["hydra.run.dir=/dev/null/x"], "/dev/null/x"),
]
"""Mistakes of kinds that have an instance in the other list."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["polcy=oracle"], "policy"),
        (["policy=orcale"], "oracle"),
        (["atempts=2"], "attempts"),
        (["policy.temprature=1"], "policy.temprature"),
        (["attempts=many"], "attempts"),
        (["attempts=0"], "attempts"),
        (["agent.templates_dir=gone"], "gone"),
        (["env.path=no/such/folder"], "no/such/folder"),
        (["env.tasks=no-such-task"], "no-such-task"),
        (["env=swebench", "env.dataset=no.jsonl"], "the file of SWE-bench rows cannot be read"),
        (["resume=true"], "resume=<run>"),
        (["-m", "resume=true", "seed=1,2"], "resume=<sweep>"),
        (["env.exclude='*'"], "exclude"),
        (["env.tasks=["], "env.tasks=["),
        (["name=a/b"], "name"),
        (["concurrency='${nothing}'"], "nothing"),
        (["policy=replay"], "policy.trajectory"),
        ([*CHAT], "OPENAI_API_KEY"),
        (["--no-such-flag"], "--no-such-flag"),
        (["policy.model=m"], "`policy=openai` or another option. Choose this option"),
        (["collector=null"], "Options: json, jsonl, memory, none."),
        (["budget=5"], "Set `budget.KEY=…`"),
        (["hydra.run.dir=/proc/none/run"], "hydra.run.dir=…"),
        (["collector=[json,jsonnl]"], "no option `jsonnl` in the group `collector`"),
        (["collector=[json,jsonl]", "collector.output_dir=x"], "collector.json.output_dir"),
        (["--config-dir", "broken", "collector=[json,plain]"], "# @package collector.NAME"),
        (["--config-dir", "broken", "policy=yaml"], "broken/policy/yaml.yaml"),
        (["--config-dir", "broken", "policy=targetless"], "_target_"),
        (
            ["--config-dir", "broken", "experiment=mine"],
            "`# @package _global_` as the first line of experiment/mine.yaml",
        ),
        (["seed=1,2"], "got `1,2`. Add `-m` for a sweep, with one run per value."),
        (["seed=[1, 2]"], "got `[1, 2]`. Use `-m seed=1,2` for a sweep, with one run per value."),
        (["env.tasks=a,b"], "one run per value, or write one list: 'env.tasks=[a,b]'."),
        (["--config-name", "other"], "There is no root config `other`."),
        (["policy=scripted", "policy.replies=hello"], "`policy.replies`: Input should be a valid list or a valid dict"),
        (["--config-dir", "no/such/folder"], "no/such/folder"),
        (["container=null"], "`container=null` does not name an option of the group `container`. Options: daytona,"),
        (["limits.stps=5"], "Did you mean `limits.steps`"),
        (["--config-dir", "broken", "policy=latin"], "broken/policy/latin.yaml"),
        (["snapshot=every_n", "snapshot.every=0"], "snapshot.every"),
        (["snapshot=on_failure", "container=docker", "container.keep_image=false"], "keep_image=true"),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in REPEATED),
    ],
)
def test_mistake_is_explained_in_one_paragraph(cli: Any, tmp_path: Path, arguments: list[str], expected: str) -> None:
    (tmp_path / "broken" / "policy").mkdir(parents=True)
    (tmp_path / "broken" / "policy" / "yaml.yaml").write_text("foo: [\n")
    (tmp_path / "broken" / "policy" / "latin.yaml").write_bytes(b"foo: caf\xe9\n")
    (tmp_path / "broken" / "policy" / "targetless.yaml").write_text("foo: 1\n")
    (tmp_path / "broken" / "collector").mkdir()
    (tmp_path / "broken" / "experiment").mkdir()
    (tmp_path / "broken" / "experiment" / "mine.yaml").write_text("attempts: 2\n")
    plain = "_target_: ares_exp.trajectories.collectors.NullTrajectoryCollector\n"
    (tmp_path / "broken" / "collector" / "plain.yaml").write_text(plain)
    done = cli("tracker=none", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 2000
    assert not list(tmp_path.glob("outputs/*/*/episodes.jsonl"))


def test_missing_requirements_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "openai.py").write_text("raise ImportError\n")
    words = ("tracker=none", "policy=openai", "env.path=gone")  # a fork would have imported it
    done = run_command((sys.executable, "-m", "ares_exp", *words), tmp_path, env={"PYTHONPATH": "."})
    assert done.returncode == 2
    told = ("env.path=<directory>", "`policy.model=…`", "export OPENAI_API_KEY=…", "pip install 'ares-exp[openai]'")
    assert [text in done.stderr for text in told] == [True] * 4, done.stderr


@pytest.mark.parametrize(
    ("option", "extra"), [("hydra/launcher=joblib", "sweep"), ("hydra/sweeper=optuna_maximize", "optuna")]
)
def test_missing_extra_of_hydra_is_named(tmp_path: Path, option: str, extra: str) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "__init__.py").touch()  # hides the packages that are installed
    words = ("tracker=none", "-m", option, "seed=1,2")
    done = run_command((sys.executable, "-m", "ares_exp", *words), tmp_path, env={"PYTHONPATH": "."})
    assert done.returncode == 2
    assert f"pip install 'ares-exp[{extra}]'" in done.stderr


def test_version_option_prints_the_version(cli: Any) -> None:
    assert cli("--version").stdout == f"ares_exp {__version__}\n"


def test_help_on_a_group_and_an_option(cli: Any) -> None:
    assert "  policy.model=null\n      Name of the model" in cli("--help", "policy=openai").stdout
    shown = cli("--help", "policy").stdout
    assert "    scripted " in shown
    assert "    docker " not in shown
    wrong = cli("--help", "policy=gpt")
    assert wrong.returncode == 2
    assert "scripted" in wrong.stderr
