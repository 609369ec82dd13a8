"""Where groups are looked for, and what is written to which file.

On a tree of plain files in the place of `/proc` and `/sys/fs/cgroup`: one kernel has one version. What a real one makes
of the files, in the version that it has, is in `test_local_limits`.
"""

from pathlib import Path

import pytest

from ares_exp.containers.local.cgroup import (
    RECORD,
    Limits,
    candidates,
    find_groups,
    groups_of,
    lack_of_memory,
    lack_of_processes,
    oom_kills,
    remove_groups,
)

ALL = "cpu memory pids"


class Tree:
    """A process in `/proc`, and the hierarchies that it sees."""

    def __init__(self, path: Path) -> None:
        self.process = path / "proc"
        self.process.mkdir()
        self.mount = path / "sys"
        (self.process / "cgroup").touch()
        (self.process / "mountinfo").write_text("22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n")

    def hierarchy(self, controllers: str, path: str, *, root: str = "/") -> Path:
        """Mounts version 1 with these controllers, or version 2 with `""`; the process is in the group `path`."""
        mount = self.mount / (controllers or "unified")
        mount.mkdir(parents=True)
        kind = f"cgroup cgroup rw,{controllers}" if controllers else "cgroup2 cgroup2 rw,nsdelegate"
        self._append("cgroup", f"{1 if controllers else 0}:{controllers}:{path}\n")
        self._append("mountinfo", f"30 22 0:26 {root} {mount} rw,nosuid shared:9 - {kind}\n")
        return mount

    def _append(self, name: str, line: str) -> None:
        with (self.process / name).open("a") as file:
            file.write(line)

    def found(self, controller: str) -> list[tuple[Path, bool]]:
        places = candidates(controller, self.process)  # type: ignore[arg-type]
        return [(place.directory, place.unified) for place in places]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def group(path: Path, *, gives: str = "", **limits: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.subtree_control").write_text(gives)
    for name, value in limits.items():
        (path / name.replace("_", ".")).write_text(value)
    return path


def refusing(path: Path) -> Path:
    """A group whose `subtree_control` takes no writes, as one with processes in it."""
    (path / "cgroup.subtree_control").unlink()
    (path / "cgroup.subtree_control").symlink_to("/proc/self/status")  # read-only, and names no controller
    return path


def test_version_1_is_used_below_the_own_group(tree: Tree) -> None:
    mount = tree.hierarchy("cpu,cpuacct", "/jobs/7")
    assert tree.found("cpu") == [(mount / "jobs/7", False)]
    assert tree.found("memory") == []


def test_partially_mounted_hierarchy_is_found(tree: Tree) -> None:
    mount = tree.hierarchy("pids", "/docker/abc/inner", root="/docker/abc")
    assert tree.found("pids") == [(mount / "inner", False)]


def test_invisible_own_group_is_not_used(tree: Tree) -> None:
    tree.hierarchy("pids", "/elsewhere", root="/docker/abc")
    assert tree.found("pids") == []


def test_version_2_uses_sibling_of_own_group(tree: Tree) -> None:
    mount = tree.hierarchy("", "/user.slice/app.slice/run.scope")
    group(mount, gives=ALL)
    slice_ = group(mount / "user.slice", gives=ALL)
    apps = group(slice_ / "app.slice", gives="memory pids")
    refusing(group(apps / "run.scope", cpu_max="max 100000", memory_max="max"))
    assert tree.found("memory")[0] == (apps, True)
    assert tree.found("cpu")[0] == (slice_, True)


def test_version_2_uses_own_group_if_allowed(tree: Tree) -> None:
    own = group(tree.hierarchy("", "/"))
    tree.found("memory")
    assert (own / "cgroup.subtree_control").read_text() == "+memory"  # what a kernel answers with "memory"


@pytest.mark.parametrize("limit", [{"memory_max": "1073741824"}, {"memory_high": "4096"}, {"cpu_max": "50000 100000"}])
def test_inherited_limit_is_not_bypassed(tree: Tree, limit: dict[str, str]) -> None:
    mount = tree.hierarchy("", "/limited")
    group(mount, gives=ALL)
    refusing(group(mount / "limited", **limit))
    assert tree.found("memory") == []


def test_ares_exp_groups_are_found_in_whole_hierarchy(tree: Tree) -> None:
    pids, cpuset, unified = (tree.hierarchy(name, "/jobs/7") for name in ("pids,misc", "cpuset", ""))
    ours = [pids / "ares_exp-box-1", pids / "jobs/8/deep/ares_exp-box-2", unified / "ares_exp-probe-3"]
    for path in (*ours, pids / "jobs/7/container", cpuset / "ares_exp-box-4"):
        path.mkdir(parents=True)
    assert sorted(find_groups(tree.process)) == sorted(ours)
    (tree.process / "cgroup").unlink()
    assert list(find_groups(tree.process)) == []


def test_files_of_version_2() -> None:
    assert Limits(cpus=1.5, memory_mb=64, pids=100).settings(unified=True) == {
        "cpu": {"cpu.max": "150000 100000"},
        "memory": {"memory.max": "67108864", "memory.swap.max": "0"},
        "pids": {"pids.max": "100"},
    }


def test_files_of_version_1() -> None:
    assert Limits(cpus=0.001, memory_mb=64, pids=100).settings(unified=False) == {
        "cpu": {"cpu.cfs_quota_us": "1000", "cpu.cfs_period_us": "100000"},
        "memory": {"memory.limit_in_bytes": "67108864", "memory.memsw.limit_in_bytes": "67108864"},
        "pids": {"pids.max": "100"},
    }


def test_unlimited_container_needs_no_groups() -> None:
    assert Limits().settings(unified=True) == Limits().settings(unified=False) == {}


def test_recorded_groups_are_counted_and_removed(tmp_path: Path) -> None:
    directory, container = tmp_path / "box-1", tmp_path / "sys" / "box-1"
    directory.mkdir()
    container.mkdir(parents=True)
    (directory / RECORD).write_text(f"{container}\n")
    (container / "memory.events").write_text("low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(directory) == 2
    killed = "was used up, and the kernel killed 2 of its processes"
    assert lack_of_memory(directory, holds_files=True) == f"its memory, which also contains its files, {killed}"
    assert lack_of_memory(directory, holds_files=False) == f"its memory {killed}"
    assert lack_of_processes(directory) == ""
    (container / "memory.events").unlink()
    assert lack_of_memory(directory, holds_files=True) == ""
    assert remove_groups(directory)
    assert not container.exists()
    assert remove_groups(directory)


@pytest.mark.parametrize(
    ("count", "limit", "refused", "lacking"),
    [
        ("64", "64", 1, True),
        ("60", "64", 9, True),
        ("63", "64", 0, False),  # no try has failed
        ("3", "64", 9, False),  # there is room again
        ("64", "max", 0, False),
    ],
)
def test_process_limit_is_diagnosed(tmp_path: Path, count: str, limit: str, refused: int, lacking: bool) -> None:
    container = tmp_path / "box-1"
    container.mkdir()
    (container / RECORD).write_text(f"{container}\n")
    (container / "pids.current").write_text(f"{count}\n")
    (container / "pids.max").write_text(f"{limit}\n")
    (container / "pids.events").write_text(f"max {refused}\n")
    assert ("limit of 64 processes" in lack_of_processes(container)) == lacking


def test_groups_of_another_name_are_kept(tmp_path: Path) -> None:
    other = tmp_path / "sys" / "not-of-the-box"
    other.mkdir(parents=True)
    directory = tmp_path / "box-1"
    directory.mkdir()
    (directory / RECORD).write_text(f"{other}\n")
    assert groups_of(directory) == []
    assert remove_groups(directory)
    assert other.exists()
