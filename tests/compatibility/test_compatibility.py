"""Runs the table of cases, each of which shows a sentence of the specification of the Harbor task format."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import pytest

from ares_exp.environments.episode_limits import TimeLimits
from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import TaskError, UserError
from ares_exp.tasks.harbor_task import HarborTask, load_task
from ares_exp.tasks.task_set import load_task_set
from ares_exp.tasks.task_sources.task_lists import HARBOR_REPOSITORY
from tests.compatibility.case import Case, Containers, Directory, Episode, Limits, Reading, Selection, write_task
from tests.compatibility.outcome import as_json, matches
from tests.compatibility.readings import read
from tests.compatibility.running import execute
from tests.compatibility.sources import make_sources, mirror
from tests.compatibility.table import CASES, TITLES

K = TypeVar("K", bound=Case)


def of_kind(kind: type[K]) -> Callable[..., Any]:
    return pytest.mark.parametrize("case", [_param(case) for case in CASES if type(case) is kind])


def _param(case: Case) -> Any:
    marks = [pytest.mark.once, getattr(pytest.mark, case.container)] if isinstance(case, Episode) else []
    if isinstance(case, Episode) and case.needs_root:
        marks.append(pytest.mark.root)
    return pytest.param(case, id=case.id.replace(" ", "-"), marks=marks)


def test_table_is_complete() -> None:
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids)) >= 60
    assert {case.section for case in CASES} == set(TITLES)


@of_kind(Reading)
def test_reading_follows_the_specification(case: Reading) -> None:
    found = {example: as_json(read(case, example)) for example in case.examples}
    assert found == {example: as_json(expected) for example, expected in case.examples.items()}


@of_kind(Directory)
def test_directory_follows_the_specification(case: Directory, tmp_path: Path) -> None:
    root = write_task(tmp_path / "set" / "a-task", case.files, case.links)
    tasks, skipped = load_task_set(root.parent)
    assert [task.name for task in tasks] == ["a-task"] * case.scan
    assert {name: str(root) in reason for name, reason in skipped.items()} == ({} if case.scan else {"a-task": True})
    if case.loads:
        load_task(root)
    else:
        with pytest.raises(TaskError, match=str(root)):
            load_task(root)


@of_kind(Containers)
def test_containers_follow_the_specification(case: Containers, tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "a-task", case.files))
    assert {name: _asked_for(task, name) for name in case.expected} == case.expected


def _asked_for(task: HarborTask, name: str) -> Any:
    if name == "verifier":
        return [stage.verifier_spec is not None for stage in task.stages]
    if name == "networks":
        return [
            [
                [policy.mode, sorted(policy.allowed_hosts)]
                for policy in (task.container_spec.network, stage.agent_network, stage.verifier_network)
            ]
            for stage in task.stages
        ]
    whose, _, field = name.partition(".")
    value = getattr(task.container_spec if whose == "agent" else task.stages[0].verifier_spec, field)
    if isinstance(value, Path):
        return value.name if field == "compose_file" else value.relative_to(task.path).as_posix()
    return sorted(map(str, value)) if isinstance(value, frozenset) else value


@of_kind(Limits)
def test_limits_follow_the_specification(case: Limits, tmp_path: Path) -> None:
    files = {"task.toml": case.toml, "steps/a/instruction.md": "x"}
    task, limits = load_task(write_task(tmp_path / "a-task", files)), TimeLimits(**case.limits)
    found = {
        "agent": limits.agent(task.stages[0]),
        "verifier": limits.verifier(task.stages[0]),
        "start": limits.start(task),
    }
    assert {phase: found[phase] for phase in case.expected} == case.expected


@of_kind(Episode)
async def test_episode_follows_the_specification(
    case: Episode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in case.host.items():
        monkeypatch.setenv(name, value)
    outcome = await execute(case, tmp_path)
    assert matches(case.expected, outcome) == case.expected, json.dumps(outcome, indent=1)
    assert outcome["error"] is None or "error" in case.expected, outcome


@pytest.fixture
def cwd(tmp_path: Path) -> Iterator[Path]:
    """An empty current directory."""
    before = Path.cwd()
    (tmp_path / "here").mkdir()
    os.chdir(tmp_path / "here")
    yield tmp_path / "here"
    os.chdir(before)


@of_kind(Selection)
def test_selection_follows_the_specification(case: Selection, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, reported = make_sources(case, cwd), list[str]()
    if case.harbors_own:
        for name, value in mirror(HARBOR_REPOSITORY, f"file://{cwd.parent / 'repository'}").items():
            monkeypatch.setenv(name, value)
    found: Sequence[str] | str
    try:
        found = HarborEnvironments(cache_dir=cwd.parent / "cache", **options).load(reported.append)
    except (UserError, pydantic.ValidationError) as error:
        found = type(error).__name__
    assert found == case.expected, reported
    assert all(any(text in line for line in reported) for text in case.reported), reported
