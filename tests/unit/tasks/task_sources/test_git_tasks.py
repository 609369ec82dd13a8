"""Tasks out of real repositories, as env=harbor loads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import ConfigError, PreflightError, TaskError, UserError
from ares_exp.tasks.task_contract import TaskOrigin
from tests.unit.tasks.task_sources.conftest import MakeRepository, Repository

Load = Callable[..., HarborEnvironments]


@pytest.fixture
def load(cache_dir: Path) -> Load:
    """Loads with these options; `warnings` is what was reported."""

    def run(*, warnings: list[str] | None = None, **options: Any) -> HarborEnvironments:
        source = HarborEnvironments(cache_dir=cache_dir, **options)
        source.load((warnings if warnings is not None else []).append)
        return source

    return run


def names(source: HarborEnvironments) -> list[str]:
    return [task.name for task in source.tasks]


def kept(cache_dir: Path) -> list[str]:
    """The tasks in the cache; anything else there would be a leftover."""
    assert {path.name for path in cache_dir.glob("*/*")} == {"git", "files"}
    return sorted(path.parent.name for path in cache_dir.glob("*/files/*/*/*/task.toml"))


def registry(tasks: list[dict[str, str]], name: str = "bench") -> str:
    return json.dumps([{"name": name, "version": "1.0", "description": "", "tasks": tasks}])


def test_repository_of_tasks_is_loaded(load: Load, make_repository: MakeRepository, cache_dir: Path) -> None:
    repository = make_repository("tasks/b", "tasks/a", "tasks/group/c", "others/d")
    repository.write({"tasks/README.md": "", "tasks/notes/README.md": ""})
    commit = repository.commit()
    source = load(repo=repository.url)
    assert names(source) == ["a", "b"]
    assert source.origins["a"] == TaskOrigin(repository.url, commit, "tasks/a")
    assert source.tasks[0].describe()["origin"] == {"git_url": repository.url, "git_commit": commit, "path": "tasks/a"}
    assert kept(cache_dir) == ["a", "b"]
    assert sorted(path.name for path in source.tasks[0].path.iterdir()) == [
        *("environment", "instruction.md", "solution", "task.toml", "tests")
    ]


def test_only_selected_tasks_are_fetched(load: Load, make_repository: MakeRepository, cache_dir: Path) -> None:
    repository = make_repository("tasks/a", "tasks/b", "tasks/c")
    repository.write({"tasks/d/task.toml": "wrong = ["})
    repository.commit()
    assert names(load(repo=repository.url, tasks=["[ab]", "2"], exclude="b")) == ["a", "c"]
    assert kept(cache_dir) == ["a", "c"]


def test_branches_tags_and_commits_are_loaded(load: Load, make_repository: MakeRepository) -> None:
    repository = make_repository("tasks/a")
    first = repository.git("rev-parse", "HEAD")
    repository.git("tag", "--annotate", "--message=v1", "v1")
    repository.add_task("tasks/b")
    second = repository.commit()
    for ref, commit in (("v1", first), (first, first), (first.upper(), first), ("main", second), (second, second)):
        source = load(repo=f"{repository.url}@{ref}")
        assert {origin.git_commit for origin in source.origins.values()} == {commit}
        assert names(source) == ["a", "b"][: 1 + (commit == second)]


def test_repository_may_be_one_task(load: Load, make_repository: MakeRepository) -> None:
    repository = make_repository(".", name="my-task.git")
    source = load(git_url=repository.url)
    assert names(source) == ["my-task"]
    assert not (source.tasks[0].path / ".git").exists()


def test_registry_may_list_local_and_git_tasks(
    load: Load, make_repository: MakeRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = make_repository("tasks/a", "tasks/b")
    first = repository.git("rev-parse", "HEAD")
    repository.write({"tasks/b/instruction.md": "Do more.\n"})
    second = repository.commit()
    local = Repository(tmp_path / "here" / "local")
    local.add_task("c")
    entries = [
        {"name": "1", "git_url": repository.url, "git_commit_id": first, "path": "tasks/a"},
        {"name": "2", "path": "local/c"},
        {"name": "3", "git_url": repository.url, "path": "tasks/b"},
    ]
    (tmp_path / "registry.json").write_text(registry(entries))
    monkeypatch.chdir(tmp_path / "here")  # what local paths are relative to
    source = load(registry="../registry.json", dataset="bench@1.0")
    assert names(source) == ["a", "c", "b"]
    assert {name: origin.git_commit for name, origin in source.origins.items()} == {"a": first, "b": second}
    assert source.tasks[1].describe()["origin"] is None
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=r"c: .*local/c: this task directory does not exist\. Paths in"):
        load(registry="registry.json", dataset="bench")
    assert names(load(registry="registry.json", dataset="bench", exclude="c")) == ["a", "b"]


def test_repository_may_contain_a_registry(load: Load, make_repository: MakeRepository) -> None:
    repository, other = make_repository("a", "b"), make_repository("c", name="other")
    first = repository.git("rev-parse", "HEAD")
    entries = [
        {"name": "1", "path": "b"},
        {"name": "2", "path": "a", "git_commit_id": first},
        {"name": "3", "git_url": other.url, "path": "c"},
    ]
    repository.write({"registry.json": registry(entries), "sets/registry.json": registry(entries[:1], "small")})
    second = repository.commit()
    source = load(repo=repository.url, dataset="bench")
    assert {name: origin.git_commit for name, origin in source.origins.items()} == {
        "b": second,
        "a": first,
        "c": other.git("rev-parse", "HEAD"),
    }
    assert names(load(repo=repository.url, dataset="small", registry="sets")) == ["b"]
    with pytest.raises(ConfigError, match=r"registry\.json of file:.* has no data set 'small'"):
        load(repo=repository.url, dataset="small")
    with pytest.raises(ConfigError, match=r"There is no file nowhere\.json of file:"):
        load(repo=repository.url, dataset="small", registry="nowhere.json")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"git_commit": "nothing"}, r"has no branch or tag 'nothing'\. Set a branch, a tag, or all 40"),
        ({"git_commit": "0" * 40}, "'0{40}' of file:.* cannot be fetched: .*all 40 digits"),
        ({"path": "tasks/aa"}, r"aa: .*found no task\.toml in `tasks/aa`\. Did you mean `tasks/a`"),
        ({"path": "tasks/a/task.toml"}, "found no task.toml in `tasks/a/task.toml`"),
        ({"path": "linked/a"}, "found no task.toml in `linked/a`"),
        ({"path": "tasks/absolute"}, r"absolute/tests/data: expected a link to a place inside the task, .* to /etc\."),
        ({"path": "tasks/leaving"}, r"leaving/tests/data: expected a link to a place inside the task"),
        (
            {"path": "tasks"},
            r"found no task\.toml in `tasks`\..* For a folder of tasks, use `env\.repo=<repository> env\.path=tasks`",
        ),
    ],
)
def test_unfetchable_task_is_reported(
    load: Load, make_repository: MakeRepository, options: dict[str, str], complaint: str
) -> None:
    repository = make_repository("tasks/a", "tasks/absolute", "tasks/leaving")
    repository.link("linked", "tasks")
    repository.link("tasks/absolute/tests/data", "/etc")
    repository.link("tasks/leaving/tests/data", "../../a")
    repository.commit()
    with pytest.raises(UserError, match=complaint):
        load(**{"git_url": repository.url, "path": "tasks/a", **options})


def test_all_invalid_tasks_are_reported_together(load: Load, make_repository: MakeRepository) -> None:
    repository = make_repository("tasks/a", "tasks/b", "tasks/c")
    repository.link("tasks/b/tests/data", "/etc")
    (repository.path / "tasks" / "c" / "instruction.md").unlink()
    repository.commit()
    with pytest.raises(TaskError) as caught:
        load(repo=repository.url)
    first, second, remedy = str(caught.value).splitlines()
    assert first.startswith("b: ")
    assert "expected a link to a place inside the task" in first
    assert second.startswith("c: ")
    assert "instruction.md" in second
    assert remedy == "To run the other tasks: env.exclude=[b,c]."
    assert names(load(repo=repository.url, exclude=["b", "c"])) == ["a"]


def test_internal_links_are_preserved(load: Load, make_repository: MakeRepository) -> None:
    repository = make_repository("tasks/a")
    repository.link("tasks/a/tests/again.sh", "test.sh")
    repository.link("tasks/a/solution/data", "../environment")
    repository.commit()
    root = load(repo=repository.url).tasks[0].path
    assert (root / "tests" / "again.sh").readlink() == Path("test.sh")
    assert (root / "solution" / "data" / "Dockerfile").is_file()


def test_task_names_may_contain_git_patterns(load: Load, make_repository: MakeRepository) -> None:
    repository = make_repository("tasks/[a]*?", "tasks/a", "tasks/!b c")
    assert names(load(repo=repository.url)) == ["!b c", "[a]*?", "a"]


def test_line_ends_are_unchanged(
    load: Load, make_repository: MakeRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gitconfig").write_text("[core]\n\tautocrlf = true\n")
    repository = make_repository("tasks/a")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    assert (load(repo=repository.url).tasks[0].path / "tests" / "test.sh").read_bytes().count(b"\r") == 0


def test_submodule_files_are_omitted_with_a_warning(load: Load, make_repository: MakeRepository) -> None:
    repository = make_repository("tasks/a", "tasks/b")
    commit = repository.git("rev-parse", "HEAD")
    repository.git("update-index", "--add", "--cacheinfo", f"160000,{commit},tasks/a/environment/library")
    repository.git("commit", "--quiet", "--message=a submodule")
    warnings: list[str] = []
    assert names(load(repo=repository.url, warnings=warnings)) == ["a", "b"]
    assert warnings == ["a: tasks/a/environment/library is a submodule, whose files are not fetched"]


def test_equal_names_are_refused(load: Load, make_repository: MakeRepository, tmp_path: Path) -> None:
    repository = make_repository("one/a", "two/a")
    entries = [{"name": path, "git_url": repository.url, "path": path} for path in ("one/a", "two/a")]
    (tmp_path / "registry.json").write_text(registry(entries))
    with pytest.raises(TaskError, match="several tasks have the name a"):
        load(registry=str(tmp_path / "registry.json"), dataset="bench")


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("tsks", r"in tsks/, but this folder does not exist\. Did you mean `tasks`\?"),
        ("tasks/a", "in tasks/a/, but found none"),
    ],
)
def test_repository_path_without_tasks_is_refused(
    load: Load, make_repository: MakeRepository, path: str, complaint: str
) -> None:
    with pytest.raises(TaskError, match=complaint):
        load(repo=make_repository("tasks/a").url, path=path)


def test_empty_repository_is_refused(load: Load, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="has no commit on its default branch"):
        load(repo=Repository(tmp_path / "empty").url)


def test_bare_repository_without_partial_clones_is_loaded(
    load: Load, make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository("tasks/a")
    repository.git("config", "uploadpack.allowFilter", "false")
    repository.git("clone", "--quiet", "--bare", ".", str(tmp_path / "bare.git"))
    for url in (repository.url, f"file://{tmp_path}/bare.git"):
        assert names(load(repo=url)) == ["a"]


def test_repository_with_sha256_commits_is_loaded(load: Load, tmp_path: Path) -> None:
    repository = Repository(tmp_path / "first")
    shutil.rmtree(repository.path / ".git")
    repository.git("init", "--quiet", "--initial-branch=main", "--object-format=sha256")
    repository.add_task("tasks/a")
    commit = repository.commit()
    assert len(commit) == 64
    assert load(repo=f"{repository.url}@{commit}").origins["a"].git_commit == commit
    shutil.rmtree(repository.path)
    assert names(load(git_url=repository.url, git_commit=commit, path="tasks/a")) == ["a"]
