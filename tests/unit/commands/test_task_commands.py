import shutil
from pathlib import Path
from typing import Any

import pytest

from ares_exp.commands.task import FILES, IMAGE, make_task
from ares_exp.commands.task_check import (
    NOTHING,
    SOLUTION,
    Candidate,
    CheckedRun,
    Fault,
    TaskVerdict,
    _printed,
    _rewards,
    find_candidates,
    judge,
)
from ares_exp.errors import ConfigError
from ares_exp.records.results import EpisodeResult, ErrorInfo, Outcome
from ares_exp.runs.components import composed_parts
from ares_exp.tasks.harbor_task import load_task


def candidates(paths: list[Path]) -> list[Candidate]:
    return find_candidates(paths, composed_parts(["container=local"], [])[1])


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        make_task(tmp_path / "tasks" / name)
    (tmp_path / "tasks" / "notes").mkdir()
    return tmp_path / "tasks"


def test_task_or_directory_of_tasks_is_found(tasks: Path) -> None:
    assert [one.name for one in candidates([tasks / "b"])] == ["b"]
    assert [one.name for one in candidates([tasks])] == ["a", "b"]
    assert [one.name for one in candidates([tasks, tasks / "a"])] == ["a", "b"]
    assert [one.problem for one in candidates([tasks])] == [None, None]


def test_broken_task_is_listed_with_its_problem(tasks: Path) -> None:
    (tasks / "a" / "tests" / "test.sh").unlink()
    (tasks / "b" / "task.toml").unlink()
    make_task(tasks / "c")
    (tasks / "c" / "instruction.md").write_text("\n")
    broken = {one.name: one.problem or "" for one in candidates([tasks])}
    assert "tests/test.sh: the script that scores the task is missing" in broken["a"]
    assert "task.toml" in broken["b"]
    assert "instruction.md is empty. Describe in it" in broken["c"]
    [alone] = candidates([tasks / "b"])
    assert alone.name == "b"
    assert alone.problem is not None


def test_problems_of_container_agent_and_oracle_are_listed(tasks: Path) -> None:
    make_task(tasks / "c")
    make_task(tasks / "d")
    shutil.rmtree(tasks / "a" / "solution")
    (tasks / "b" / "environment" / "docker-compose.yaml").write_text("services: {main: {image: x}}\n")
    (tasks / "c" / "task.toml").write_text('[[environment.mcp_servers]]\nname = "s"\nurl = "http://s"\n')
    found = {one.name: one.problem or "" for one in candidates([tasks])}
    assert "the task's solution is missing. Add it" in found["a"]
    assert "container=docker" in found["b"]
    assert "this agent does not support" in found["c"]
    assert found["d"] == ""


def test_paths_without_tasks_are_refused(tasks: Path) -> None:
    with pytest.raises(ConfigError, match="There is no folder"):
        candidates([tasks / "nothing"])
    with pytest.raises(ConfigError, match=r"has a task\.toml"):
        candidates([tasks / "notes"])
    shutil.copytree(tasks / "a", tasks / "notes" / "a")
    with pytest.raises(ConfigError, match="several are named a"):
        candidates([tasks, tasks / "notes"])


def test_tasks_may_share_files_inside_the_only_directory(tasks: Path) -> None:
    (tasks / "a" / "environment").rename(tasks / "notes" / "environment")
    (tasks / "a" / "environment").symlink_to("../notes/environment")
    assert [one.problem for one in candidates([tasks])] == [None, None]
    for paths in ([tasks / "a"], [tasks, tasks / "b"]):
        assert "found a link to" in (candidates(paths)[0].problem or "")


def test_template_is_a_valid_task_without_warnings(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "my-task", image="python:3.12-slim")
    root = tmp_path / "tasks" / "my-task"
    task = load_task(root)
    task.check_runnable(needs_solution=True)
    assert task.name == "my-task"
    assert task.warnings == ()
    assert task.stages[0].instruction.startswith("The file `/app/numbers.txt`")
    dockerfile = (root / "environment" / "Dockerfile").read_text()
    assert "\nFROM python:3.12-slim\n" in dockerfile
    assert IMAGE not in dockerfile
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} == set(FILES)
    assert (root / "tests" / "test.sh").stat().st_mode & 0o111


def test_template_fills_only_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_task(tmp_path / "empty")
    assert load_task(tmp_path / "empty").name == "empty"
    (tmp_path / "empty" / "instruction.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"empty is not empty\. Choose another folder"):
        make_task(tmp_path / "empty")
    assert (tmp_path / "empty" / "instruction.md").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file"):
        make_task(tmp_path / "file")


@pytest.mark.parametrize("name", ["a b", "..", "-x", "fix-*", "ä"])
def test_invalid_task_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a valid task name"):
        make_task(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_invalid_image_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name of an image, got 'debian\\\\nRUN x'"):
        make_task(tmp_path / "task", image="debian\nRUN x")


ERROR = ErrorInfo("AgentError", "ShellAgent failed: JSONDecodeError: Expecting value")


def ran(path: Path, *rewards: float | None, **fields: Any) -> CheckedRun:
    fields = {"outcome": Outcome.COMPLETED, **fields}
    return CheckedRun(
        path, {"t": [EpisodeResult(f"e{n}", "t", n, 0, reward=one, **fields) for n, one in enumerate(rewards)]}
    )


def verdict(solution: CheckedRun, nothing: CheckedRun) -> TaskVerdict:
    return judge(Candidate(Path("t")), {SOLUTION: solution, NOTHING: nothing}, threshold=1.0)


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [([], "-"), ([1.0, None], "1.00, -"), ([1.0] * 6, "1.00 x6"), ([1, 1, 0, 1], "1.00 x2, 0.00, 1.00")],
)
def test_equal_rewards_are_written_together(rewards: list[float | None], shown: str) -> None:
    assert _rewards(rewards) == shown


@pytest.mark.parametrize("reward", [0.0, None])
def test_partially_passing_solution_is_flaky(tmp_path: Path, reward: float | None) -> None:
    [problem] = verdict(ran(tmp_path, reward, reward, 1.0, reward), ran(tmp_path, 0.0)).problems
    assert problem.fault is Fault.FLAKY
    assert problem.message.startswith("the solution passes in 1 of 4 attempts; another attempt has ")
    assert problem.episode == tmp_path / "e0"


def test_agent_error_is_not_a_test_failure(tmp_path: Path) -> None:
    failed = ran(tmp_path, None, outcome=Outcome.AGENT_ERROR, error=ERROR)
    [problem] = verdict(failed, failed).problems
    assert problem.fault is Fault.AGENT_FAILS
    assert "the agent failed, so the tests did not run" in problem.message
    assert problem.message.endswith("AgentError: ShellAgent failed: JSONDecodeError: Expecting value")
    other = ran(tmp_path, None, outcome=Outcome.VERIFIER_ERROR, error=ERROR)
    assert [one.fault for one in verdict(other, other).problems] == [Fault.SOLUTION_FAILS, Fault.TESTS_FAIL]


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("<exit_code>0</exit_code>\n<output>\n\n</output>", ("it printed nothing (exit code 0)", "")),
        ("<exit_code>3</exit_code>\n<output>\na\nb\n\n</output>\n", ("it printed (exit code 3)", "a\nb")),
        ("another agent's words", ("it printed", "another agent's words")),
        ("", ("it printed nothing", "")),
    ],
)
def test_solution_output_is_shown_without_its_frame(shown: str, said: tuple[str, str]) -> None:
    assert _printed("it", shown) == said
