"""cgroups of containers that have lost the directory which names them."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp.containers.local.cgroup import find_groups, groups_of, usable_cgroup_paths
from ares_exp.containers.local.container_directory import ContainerDirectory, folders, remove_stale
from ares_exp.errors import ContainerStartError
from tests.leaks import clean, wait_until
from tests.unit.containers.local_containers import local_container, needs_local

pytestmark = [
    needs_local,
    pytest.mark.root,
    pytest.mark.skipif(sys.platform != "linux" or not usable_cgroup_paths(), reason="root cannot create cgroups here"),
]

RUNNER = """
import asyncio, json, sys
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.cgroup import groups_of

async def main():
    async with LocalContainerFactory()(ContainerSpec("runner")) as container:
        directory = container._directory.path
        print(json.dumps([str(directory), *map(str, groups_of(directory))]), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print((await container.exec("echo on")).output, end="", flush=True)

asyncio.run(main())
"""


MAKE_ORPHAN = """
import os
from ares_exp.containers.local.cgroup import usable_cgroup_paths
from ares_exp.containers.ownership import owner_mark
group = next(iter(usable_cgroup_paths().values())).directory / f"ares_exp-box-{owner_mark()}-orphan-1"
group.mkdir()
print(os.getpid(), group, sep="\\n")
"""
IN_PID_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


class Runner:
    """Another process with a container, and an empty group beside its own, named like those of another container."""

    def __init__(self, temporary: Path, *before: str) -> None:
        self.env = {**os.environ, "TMPDIR": str(temporary), "DOCKER_HOST": "unix:///no/such.sock"}
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", RUNNER],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        directory, *groups = map(Path, json.loads(self.process.stdout.readline()))
        self.directory = directory
        self.groups = groups
        self.orphan = groups[0].with_name(f"{groups[0].name}-orphan")
        self.orphan.mkdir()

    def says(self) -> str:
        """What its container answers."""
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def left(self) -> list[Path]:
        return [group for group in (self.orphan, *self.groups) if group.exists()]


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.kill()
    assert wait_until(lambda: not runner.directory.exists())
    assert wait_until(lambda: removed(runner.left()))


def test_groups_of_a_running_run_are_kept(runner: Runner) -> None:
    assert runner.orphan in find_groups()
    remove_stale()  # with another directory for temporary files, where the container has none
    clean(runner.env)
    assert runner.left() == [runner.orphan, *runner.groups]
    assert runner.says() == "on\n"


def test_next_run_removes_groups_of_dead_run(runner: Runner) -> None:
    runner.kill()
    remove_stale()
    assert not runner.orphan.exists()


def test_clean_lists_removed_groups() -> None:
    """In a pid namespace, for another run on this machine may remove it before `clean` does."""
    script = '"$0" -c "$1" && exec "$0" -m ares_exp clean'
    env = {**os.environ, "DOCKER_HOST": "unix:///no/such.sock"}
    words = [*IN_PID_NAMESPACE, "sh", "-c", script, sys.executable, MAKE_ORPHAN]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True)
    pid, orphan, *said = done.stdout.splitlines()
    assert f"cgroup         {orphan}  of process {pid}" in said
    assert not Path(orphan).exists()


def test_groups_without_directory_are_removed(runner: Runner) -> None:
    shutil.rmtree(runner.directory)
    clean(runner.env)
    assert runner.left() == [runner.orphan, *runner.groups]
    assert runner.process.poll() is None
    runner.kill()
    assert wait_until(lambda: clean(runner.env) and not runner.left())  # its container ends a moment later


def test_groups_of_another_pid_namespace_are_kept(tmp_path: Path) -> None:
    """Not even when it is dead: that cannot be known."""
    runner = Runner(tmp_path, *IN_PID_NAMESPACE)
    try:
        assert runner.orphan.name.startswith("ares_exp-box-1-")
        assert runner.says() == "on\n"
        runner.kill()
        remove_stale()
        assert runner.orphan.exists()
    finally:
        runner.kill()
        runner.orphan.rmdir()
        assert wait_until(lambda: removed(runner.groups))
        shutil.rmtree(runner.directory, ignore_errors=True)


def removed(groups: list[Path]) -> bool:
    """Removes them, once the last process has left them: the heir in the namespace died with it."""
    for group in groups:
        with contextlib.suppress(OSError):
            group.rmdir()
    return not any(group.exists() for group in groups)


async def test_stop_during_start_leaves_no_groups() -> None:
    for tenths in range(
        0, 300, 23
    ):  # of milliseconds: before the groups are made, meanwhile, and when the container runs
        container = local_container()
        start = asyncio.create_task(container.start())
        await asyncio.sleep(tenths / 10_000)
        while container._directory is None and not start.done():  # noqa: ASYNC110 (the container tells nobody)
            await asyncio.sleep(0)
        expected = contextlib.nullcontext() if start.done() else pytest.raises(ContainerStartError)
        await container.stop()
        with expected:
            await start
        name = container._directory.path.name
        assert not container._directory.path.exists()
        assert [group for group in find_groups() if group.name == name] == []
        assert container._process is None or not container._process.is_running


def test_removed_directory_accepts_no_groups() -> None:
    directory = ContainerDirectory(folders()[0])
    assert directory.prepare(groups_of) == []
    directory.remove()
    with pytest.raises(FileNotFoundError, match="has been removed"):
        directory.prepare(groups_of)
