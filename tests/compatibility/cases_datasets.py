"""Section 3: data sets, and which of their tasks are run."""

import json
from typing import Any

from tests.compatibility.case import INVALID, Case, Reading, Selection


def dataset(tasks: list[dict[str, str]], *, name: str = "set", version: str = "1.0") -> dict[str, Any]:
    return {"name": name, "version": version, "description": "d", "tasks": tasks}


LOCAL = [{"name": "x", "path": "folder/a"}, {"name": "y", "path": "folder/b"}]
IN_FOLDER = ("folder/a", "folder/b")
VALID = dataset([{"name": "a", "path": "a"}])


def registry(**changes: Any) -> str:
    return json.dumps([{**VALID, **changes}])


CASES: list[Case] = [
    # 3.1 local folders
    Selection(
        id="3.1 a folder of tasks",
        says="Direct children in byte order, hidden ones included, not deeper ones.",
        folders=("b", "Z", "a", ".hidden", "group/inner"),
        options={"path": "."},
        expected=[".hidden", "Z", "a", "b"],
    ),
    Selection(
        id="3.1 invalid children",
        says="Invalid children are skipped silently.",
        deviation="They are skipped, and reported by name with the reason.",
        folders=("a", "b", "c"),
        broken=("b",),
        options={"path": "."},
        expected=["a", "c"],
        reported=["b: skipped"],
    ),
    Selection(
        id="3.1 files beside the tasks",
        says="A registry.json in the folder is not read when the folder is run.",
        registry=[],
        options={"path": "."},
        expected=["a", "b"],
    ),
    Selection(
        id="3.1 an empty folder",
        says="No task at all is an error.",
        folders=("group/inner",),
        options={"path": "."},
        expected="TaskError",
        reference=[],
    ),
    Selection(
        id="3.1 a missing folder",
        says="A missing folder is an error.",
        options={"path": "./nowhere"},
        expected="TaskError",
        reference="FileNotFoundError",
    ),
    # 3.2 filters
    Selection(
        id="3.2 patterns",
        says="Shell patterns, case-sensitive; patterns that match nothing are fine beside others.",
        folders=("alpha", "alpine", "beta", "Alto"),
        options={"path": ".", "tasks": ["al*", "[b]et?", "nothing"]},
        expected=["alpha", "alpine", "beta"],
    ),
    Selection(
        id="3.2 include, exclude, limit",
        says="Include, then exclude, then limit.",
        folders=("a1", "a2", "a3", "b1"),
        options={"path": ".", "tasks": ["a*"], "exclude": ["a1"], "limit": 1},
        expected=["a2"],
    ),
    Selection(
        id="3.2 nothing included",
        says="An include list that matches nothing is an error.",
        options={"path": ".", "tasks": ["x*"]},
        expected="ConfigError",
        reference="ValueError",
    ),
    Selection(
        id="3.2 everything excluded",
        says="Excluding everything is caught as no tasks.",
        deviation="It is an error of the selection, which says so.",
        options={"path": ".", "exclude": ["*"]},
        expected="ConfigError",
        reference=[],
    ),
    Selection(
        id="3.2 a limit of none",
        says="Limit 0 means no tasks, a negative one cuts from the end.",
        deviation="A limit is at least 1: neither is what somebody means.",
        options={"path": ".", "limit": 0},
        expected="ValidationError",
        reference=[],
    ),
    Selection(
        id="3.2 an empty include list",
        says="An empty list is no filter.",
        deviation="It is refused: a script that chooses no task does not mean all of them. An empty exclude is fine.",
        options={"path": ".", "tasks": [], "exclude": []},
        expected="ConfigError",
        reference=["a", "b"],
    ),
    Selection(
        id="3.7 a single task",
        says="For a path that is itself a task the filters are silently ignored.",
        deviation="They hold as everywhere: what excludes the task says that nothing is left.",
        options={"path": "a", "exclude": ["a"]},
        expected="ConfigError",
    ),
    # 3.3 registry.json
    Reading(
        id="3.3 what a registry.json is",
        says="A list of data sets with name, version, description and tasks; extra keys are ignored.",
        text="registry.json",
        examples={
            "[]": [],
            registry(): ["set@1.0: a"],
            registry(extra=1, metrics=[{"type": "mean"}]): ["set@1.0: a"],
            registry(version=1): INVALID,
            registry(description=None): INVALID,
            registry(metrics=[{"type": "median"}]): INVALID,
            registry(tasks=[{"name": "a"}]): INVALID,
            registry(tasks=[{"path": "a"}]): INVALID,
            json.dumps(VALID): INVALID,
            "[": INVALID,
        },
    ),
    Selection(
        id="3.3 local tasks of a registry",
        says="Paths are relative to the current directory; filters go by the path's base name, not the entry's name.",
        folders=IN_FOLDER,
        registry=[dataset(LOCAL)],
        options={"registry": "registry.json", "dataset": "set@1.0", "exclude": ["y", "a"]},
        expected=["b"],
    ),
    Selection(
        id="3.3 head",
        says="Without a version: head, if there is one.",
        folders=IN_FOLDER,
        registry=[dataset(LOCAL[:1], version="9.0"), dataset(LOCAL[1:], version="head")],
        options={"registry": "registry.json", "dataset": "set"},
        expected=["b"],
    ),
    Selection(
        id="3.3 the highest version",
        says="Else the highest version: 1.10 is higher than 1.9.",
        folders=IN_FOLDER,
        registry=[dataset(LOCAL[:1], version="1.9"), dataset(LOCAL[1:], version="1.10")],
        options={"registry": "registry.json", "dataset": "set"},
        expected=["b"],
    ),
    Selection(
        id="3.3 versions that are none",
        says="Else the last one in alphabetical order.",
        folders=IN_FOLDER,
        registry=[dataset(LOCAL[1:], version="spring"), dataset(LOCAL[:1], version="autumn")],
        options={"registry": "registry.json", "dataset": "set"},
        expected=["b"],
    ),
    Selection(
        id="3.3 an unknown data set",
        says="An unknown data set is an error.",
        folders=IN_FOLDER,
        registry=[dataset(LOCAL)],
        options={"registry": "registry.json", "dataset": "other"},
        expected="ConfigError",
        reference="ValueError",
    ),
    Selection(
        id="3.3 an unknown version",
        says="So is an unknown version.",
        folders=IN_FOLDER,
        registry=[dataset(LOCAL)],
        options={"registry": "registry.json", "dataset": "set@2.0"},
        expected="ConfigError",
        reference="ValueError",
    ),
    Selection(
        id="3.3 a registry that is a folder",
        says="The registry has to be the file itself.",
        registry=[dataset(LOCAL)],
        options={"registry": ".", "dataset": "set"},
        expected="ConfigError",
        reference="IsADirectoryError",
    ),
    Selection(
        id="3.3 an invalid task of a registry",
        says="A listed task that is invalid fails when its trial is made.",
        deviation="It is refused by name before anything starts; the others can be run.",
        folders=IN_FOLDER,
        broken=("folder/a",),
        registry=[dataset(LOCAL)],
        options={"registry": "registry.json", "dataset": "set"},
        expected="TaskError",
        reference=["a", "b"],
    ),
    Selection(
        id="3.3 the hosted registry",
        says="Without a path the hosted registry is asked.",
        deviation="The registry.json in the root of Harbor's repository is read, at the commit of its default branch.",
        folders=IN_FOLDER,
        repository=True,
        harbors_own=True,
        registry=[dataset(LOCAL)],
        options={"dataset": "set@1.0"},
        expected=["a", "b"],
    ),
    # 3.4 git
    Selection(
        id="3.4 one task of a repository",
        says="A repository, a commit, and a path in it.",
        repository=True,
        options={"git_url": "{repo}", "git_commit": "{commit}", "path": "b"},
        expected=["b"],
    ),
    Selection(
        id="3.4 the default branch",
        says="No commit: the head of the default branch.",
        repository=True,
        options={"git_url": "{repo}", "path": "a"},
        expected=["a"],
    ),
    Selection(
        id="3.4 any ref",
        says="Any ref of the repository can be named.",
        repository=True,
        options={"git_url": "{repo}", "git_commit": "main", "path": "a"},
        expected=["a"],
    ),
    Selection(
        id="3.4 a commit that is not there",
        says="A commit that cannot be fetched is an error.",
        repository=True,
        options={"git_url": "{repo}", "git_commit": "0" * 40, "path": "a"},
        expected="GitError",
    ),
    Selection(
        id="3.4 a path out of the repository",
        says="The path must not leave the repository.",
        repository=True,
        options={"git_url": "{repo}", "path": "../a"},
        expected="ConfigError",
    ),
    Selection(
        id="3.4 a repository of tasks",
        says="Without a data set: each child with a task.toml of tasks/, sorted.",
        folders=("tasks/b", "tasks/a", "other/c"),
        repository=True,
        options={"repo": "{repo}"},
        expected=["a", "b"],
    ),
    Selection(
        id="3.4 another folder of a repository",
        says="Another folder of it can be named.",
        folders=("tasks/a", "other/c"),
        repository=True,
        options={"repo": "{repo}", "path": "other"},
        expected=["c"],
    ),
    Selection(
        id="3.4 a data set of a repository",
        says="With a data set: registry.json in the root, whose tasks are in that repository by default.",
        folders=IN_FOLDER,
        repository=True,
        registry=[dataset(LOCAL)],
        options={"repo": "{repo}", "dataset": "set", "tasks": ["b"]},
        expected=["b"],
    ),
    Selection(
        id="3.3 git tasks of a registry",
        says="An entry with git_url is a task of that repository, at git_commit_id.",
        repository=True,
        registry=[dataset([{"name": "x", "path": "b", "git_url": "{repo}", "git_commit_id": "{commit}"}])],
        options={"repo": "{repo}", "dataset": "set"},
        expected=["b"],
    ),
    Selection(
        id="3.4 local repositories by path",
        says="A repository is an address: local paths are rejected.",
        options={"repo": "./repository"},
        expected="ConfigError",
    ),
    # 3.5 packages
    Selection(
        id="3.5 packages",
        says="A name with a slash is a package of the hosted registry.",
        deviation="Packages come from a service on the network that others run: refused by name.",
        options={"dataset": "org/name@latest"},
        expected="ConfigError",
    ),
]
