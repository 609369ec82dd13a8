"""What a local container changed is captured, and given to another one. Runs as root and as an ordinary user."""

import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ares_exp.containers.container import Container, ContainerFactory, ContainerSpec
from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges, differences
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.container_directory import find_storage, folders
from ares_exp.containers.local.isolation import CHANNELS, is_privileged
from ares_exp.errors import CaptureError, RestoreError, SnapshotMismatchError, UnsafeSnapshotError
from ares_exp.records.secrets import protect
from ares_exp.testing.changes_contract import ChangesContract, python
from tests.unit.containers.local_containers import local_container, needs_local

pytestmark = [
    pytest.mark.once,
    needs_local,
    pytest.mark.skipif(not find_storage().is_readable, reason="no folder here can hold the upper layer of an overlay"),
]

_TO_NOBODY = frozenset({"capability", "name of a base file"})  # and the host's directories are mounts of their own
_TO_ROOT_ALONE = frozenset(
    {"append", "mode", "mtime", "owner", "delete a file", "file to directory", "file to link", "delete a directory"}
    | {"refill a directory", "directory to file", "directory to link", "owner of a link", "large ids"}
)


def directories() -> list[str]:
    return [str(path) for folder in folders() for path in folder.glob(f"*ares_exp-box-{os.getpid()}-*")]


class TestLocalChanges(ChangesContract):
    impossible = _TO_NOBODY if is_privileged() else _TO_NOBODY | _TO_ROOT_ALONE

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return LocalContainerFactory()

    @pytest.fixture
    def other_base(self) -> str:
        return "host:machine=other"

    async def left(self) -> list[str]:
        return directories()

    @pytest.mark.root  # it deletes what only root may
    async def test_changes_accumulate_across_captures(
        self, box: Container, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore
    ) -> None:
        await super().test_changes_accumulate_across_captures(box, factory, spec, objects)


async def after(command: str, objects: ObjectStore) -> Delta:
    """What a container changed by a command."""
    async with local_container() as container:
        result = await container.exec(command)
        assert result.exit_code == 0, result.output
        return await container.capture_changes(objects)


async def seen(delta: Delta, objects: ObjectStore, command: str) -> str:
    """What a command prints in a container with these changes."""
    async with local_container(changes=StoredChanges(delta, objects)) as container:
        assert differences(await container.capture_changes(objects), delta) == []
        return (await container.exec(command)).output


async def test_standard_directories_can_be_deleted_and_replaced(objects: ObjectStore) -> None:
    delta = await after("rm -r /home /opt /var/cache /var/run && mkdir /var/cache && echo file >/opt", objects)
    kinds = {path: entry.kind for path, entry in delta.entries.items()}
    assert kinds == {
        "/home": "whiteout",
        "/opt": "file",
        "/var": "directory",
        "/var/cache": "directory",
        "/var/cache/apt": "whiteout",
        "/var/run": "whiteout",
    }
    command = "ls -d /home /var/run 2>/dev/null; cat /opt; ls -A /var/cache; ls -d /srv /var/lock"
    assert await seen(delta, objects, command) == "file\n/srv\n/var/lock\n"


async def test_restored_directory_can_be_renamed(objects: ObjectStore) -> None:
    """By the system call: programs that do not copy what cannot be renamed work, too."""
    delta = await after("mkdir -p /work/dir/inner", objects)
    rename = "python3 -c \"import os; os.rename('/work/dir', '/work/moved')\" && find /work/*"
    assert await seen(delta, objects, rename) == "/work/moved\n/work/moved/inner\n"


async def test_mounts_are_not_captured(objects: ObjectStore) -> None:
    async with local_container() as container:
        for n in range(3):
            await container.exec(f"touch /dev/shm/{n} /{n}; (setsid sleep 60 &)")
        delta = await container.capture_changes(objects)
        assert (await container.exec(f"ls {CHANNELS}")).output
    assert list(delta.entries) == ["/0", "/1", "/2"]


async def test_overlay_marks_made_in_the_box_are_ignored(objects: ObjectStore) -> None:
    async with local_container() as container:
        mark = "os.setxattr('/d', 'user.overlay.opaque', b'y'); os.mknod('/w', 0o020000, 0); print(0)"
        await python(container, f"os.mkdir('/d'); {mark}")
        delta = await container.capture_changes(objects)
    assert list(delta.entries) == ["/d"]
    assert not delta.entries["/d"].opaque


async def test_moved_mount_is_detected(objects: ObjectStore) -> None:
    async with local_container() as container:
        await container.exec("mv /run /elsewhere && mkdir -p /run/ares_exp")
        with pytest.raises(CaptureError, match=f"above the mount point {CHANNELS} in"):
            await container.capture_changes(objects)
        await container.exec("rm -r /run; mv /elsewhere /run")
        await container.capture_changes(objects)


async def test_dockerfile_changes_are_captured_and_not_repeated(objects: ObjectStore, tmp_path: Path) -> None:
    context = tmp_path / "environment"
    context.mkdir()
    dockerfile = context / "Dockerfile"
    dockerfile.write_text("FROM x\nENV A=1\nWORKDIR /work\nRUN echo built >>log; [ ! -e /never ]\n")
    async with local_container(context) as container:
        await container.exec("echo agent >>log; touch /never")
        delta = await container.capture_changes(objects)
    async with local_container(context, changes=StoredChanges(delta, objects)) as container:
        result = await container.exec("pwd; echo $A; cat log")
    assert result.output == "/work\n1\nbuilt\nagent\n"


async def test_other_host_users_cannot_reach_container_files() -> None:
    async with local_container() as container:
        await container.exec("cp /bin/sh /shell; chmod 4755 /shell")
        shell = container._directory.path / "files" / "shell"
        assert stat.S_IMODE(shell.stat().st_mode) == 0o4755
        assert stat.S_IMODE(container._directory.path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "made",
    [
        "mkdir -p /d/e; touch /d/e/f; chmod 0 /d/e",
        "mkdir -p /d/e; touch /d/e/f; chmod 555 /d/e /d",
        'python3 -c \'import os; [(os.mkdir("d"), os.chdir("d")) for _ in range(3000)]\'',
    ],
)
async def test_closed_and_deep_directories_are_deleted(made: str) -> None:
    before = directories()
    async with local_container() as container:
        assert (await container.exec(made)).exit_code == 0
    assert directories() == before


FILE = Entry("file", 0o644)
DIRECTORY = Entry("directory", 0o755)
LINK = Entry("symlink", target="/oldroot/tmp")


@pytest.mark.parametrize(
    "entries",
    [
        {"/proc": DIRECTORY, "/proc/x": FILE},
        {"/dev": LINK},
        {"/run": LINK},
        {"/run": Entry("whiteout")},
        {CHANNELS: DIRECTORY},
        {CHANNELS: LINK},
        {CHANNELS: DIRECTORY, f"{CHANNELS}/serve": FILE},
        {"/usr": LINK},
        {"/usr": Entry("whiteout")},
        {"/var": LINK},
    ],
)
async def test_changes_that_would_move_a_mount_are_refused(objects: ObjectStore, entries: Mapping[str, Entry]) -> None:
    """bubblewrap makes what it mounts on: a link there would have it made on the host."""
    delta, before = await after("true", objects), directories()
    with pytest.raises(UnsafeSnapshotError, match=next(iter(entries))):
        await local_container(changes=StoredChanges(replace(delta, entries=entries), objects)).start()
    assert directories() == before


async def test_mismatch_after_restore_is_refused(objects: ObjectStore) -> None:
    """Here one file is to have a name in a directory of the host, which is an overlay, and one outside of it."""
    delta, before = await after("mkdir /n; echo x >/n/a; ln /n/a /n/b", objects), directories()
    entries = {**delta.entries, "/usr": DIRECTORY, "/usr/c": delta.entries["/n/a"]}
    with pytest.raises(RestoreError, match=r"differ after they were written .*'/n/a'"):
        await local_container(changes=StoredChanges(replace(delta, entries=entries), objects)).start()
    assert directories() == before


@pytest.mark.skipif(is_privileged(), reason="root's container has all users")
async def test_owners_forbidden_to_ordinary_users_are_refused(objects: ObjectStore) -> None:
    delta = await after("true", objects)
    entries = {"/x": replace(FILE, uid=12)}
    with pytest.raises(RestoreError, match="The owner of '/x' cannot be set to user 12"):
        await local_container(changes=StoredChanges(replace(delta, entries=entries), objects)).start()


async def test_mismatch_of_hosts_names_the_difference(objects: ObjectStore) -> None:
    delta = await after("true", objects)
    fields = dict(field.split("=") for field in delta.base.removeprefix("host:").split(";"))
    base = delta.base.replace(fields["system"], "plan-9")
    with pytest.raises(SnapshotMismatchError) as caught:
        await local_container(changes=StoredChanges(replace(delta, base=base), objects)).start()
    assert f"Differences: the operating system (plan-9 in the snapshot, {fields['system']} here). Restore" in str(
        caught.value
    )
    image = f"sha256:{'0' * 64}"
    with pytest.raises(SnapshotMismatchError, match=rf"changes to the files of {image}.*container=docker"):
        await local_container(changes=StoredChanges(replace(delta, base=image), objects)).start()


async def test_snapshot_containing_a_new_secret_is_refused(objects: ObjectStore) -> None:
    delta, before = await after("echo secret-since-then-0815 >/key", objects), directories()
    protect(["secret-since-then-0815"])
    with pytest.raises(RestoreError, match=r"cannot be read back: '/key' contains a secret: a protected value"):
        await local_container(changes=StoredChanges(delta, objects)).start()
    assert directories() == before
