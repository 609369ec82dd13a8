"""Storage of containers on hosts of several kinds: where their files are, and that they are captured or say why not."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from ares_exp.containers.local.isolation import filesystem_type
from tests.conftest import run_command
from tests.unit.containers.local_containers import ROOT, needs_local


def memory_has_attributes() -> bool:
    """Whether files in memory have the extended attributes that overlays need: since Linux 6.6."""
    try:
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            os.setxattr(file.name, "user.ares_exp", b"y")
    except OSError:
        return False
    return True


pytestmark = [pytest.mark.once, needs_local, pytest.mark.root]
in_memory = pytest.mark.skipif(not memory_has_attributes(), reason="files in memory have no attributes on this kernel")

ROUND_TRIP = """
import asyncio, os, sys, tempfile
from pathlib import Path
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.container_directory import folders
from ares_exp.containers.local.container_directory import find_storage
from ares_exp.errors import SnapshotUnsupportedError
from ares_exp.containers.filesystem.delta import Delta, StoredChanges, differences
from ares_exp.containers.filesystem.stored_objects import ObjectStore

change, look = sys.argv[1:]

def container(changes=None):
    return LocalContainerFactory()(ContainerSpec(name="x", changes=changes))

async def main(store):
    storage = find_storage()
    print(storage.folder, "memory" if storage.in_memory else "disk", storage.is_readable)
    print(*LocalContainerFactory().check(ContainerSpec(name="x", storage_mb=1)))
    objects, delta = ObjectStore(Path(store)), Delta("host:x", {})
    async with container() as first:
        made = await first.exec(change)
        assert made.exit_code == 0, made.output
        try:
            delta = await first.capture_changes(objects)
        except SnapshotUnsupportedError as error:
            print(error)
    try:
        async with container(StoredChanges(delta, objects)) as second:
            assert differences(await second.capture_changes(objects), delta) == []
            print((await second.exec(look)).output, end="")
    except SnapshotUnsupportedError as error:
        print(error)
    print([path.name for folder in folders() for path in folder.glob(f"*-box-{os.getpid()}-*")])

with tempfile.TemporaryDirectory() as store:
    asyncio.run(main(store))
"""

AS_ORDINARY_USER = """
import sys
from tests.unit.containers.local_containers import as_ordinary_user
run = as_ordinary_user("-c", *sys.argv[1:])
sys.stdout.write(run.stdout)
sys.stderr.write(run.stderr)
sys.exit(run.returncode)
"""

CHANGE = "echo changed >/x; echo more >>/etc/issue; rm -r /usr/games"
LOOK = "cat /x; tail -n 1 /etc/issue; ls -d /usr/games 2>/dev/null"
LARGE = "mount -t tmpfs -o size=2g shm /dev/shm"
SMALL = "mount -t tmpfs -o size=64m shm /dev/shm"
NOT_EXECUTABLE = "mount -t tmpfs -o size=2g,noexec shm /dev/shm"


def round_trip(host: str, change: str, look: str, temporary: Path, *program: str) -> list[str]:
    """A container on a host to which `host` was done, and another one with what it changed."""
    python = [sys.executable, "-B", "-c", *program, ROUND_TRIP, change, look]
    command = ("unshare", "--mount", "sh", "-ec", f'{host}\nexec "$@"', "sh", *python)
    run = run_command(command, ROOT, {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)})
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


@in_memory
def test_storage_in_memory_is_captured_where_possible(tmp_path: Path) -> None:
    warning = "storage_mb=1: not enforced by container=local (the container's files are in memory, not bounded)"
    assert round_trip(LARGE, CHANGE, LOOK, tmp_path) == ["/dev/shm memory True", warning, "changed", "more", "[]"]


@pytest.mark.parametrize("host", [SMALL, pytest.param(NOT_EXECUTABLE, marks=pytest.mark.nightly)])
def test_storage_on_disk_is_captured(host: str, tmp_path: Path) -> None:
    if filesystem_type(tmp_path) not in ("ext4", "xfs", "btrfs"):
        pytest.skip(f"{tmp_path} cannot hold the upper layer of an overlay")
    warning = f"storage_mb=1: not enforced by container=local (the container's files are in {tmp_path}, not bounded)"
    assert round_trip(host, CHANGE, LOOK, tmp_path) == [f"{tmp_path} disk True", warning, "changed", "more", "[]"]


def test_unreadable_storage_explains_the_refusal(tmp_path: Path) -> None:
    host = f"{SMALL}; mount -t tmpfs -o size=64m x {tmp_path}"
    storage, warning, no_capture, no_restore, left = round_trip(host, CHANGE, LOOK, tmp_path)
    assert storage == f"{tmp_path} memory False"
    assert "the container's files are in memory" in warning
    for refusal in (no_capture, no_restore):
        assert "Set TMPDIR to such a folder, or use container=docker." in refusal
    assert left == "[]"


@in_memory
def test_host_mounts_in_a_changed_directory_are_captured(tmp_path: Path) -> None:
    mount = "mount -t tmpfs x /usr/share/doc; mkdir -m 755 /usr/share/doc/a; echo inner >/usr/share/doc/a/b"
    change = "cd /usr/share; echo changed >>doc/a/b; echo new >doc/c; mkdir mine; echo beside >mine/d"
    lines = round_trip(f"{LARGE}; {mount}", change, "cd /usr/share; cat doc/a/b doc/c mine/d", tmp_path)
    assert lines[2:] == ["inner", "changed", "new", "beside", "[]"]


@in_memory
def test_mounted_python_is_not_captured(tmp_path: Path) -> None:
    if sys.base_prefix == "/usr":
        pytest.skip("the interpreter that runs the tests is the host's own")
    mask = 'for d in /usr/local/sbin /usr/local/bin /usr/sbin /usr/bin; do [ ! -e "$d/python3" ] || '
    mask += 'mount --bind /dev/null "$d/python3"; done'
    change = 'python3 -c \'open("/x", "w").write("by python\\n")\''
    lines = round_trip(f"{LARGE}; {mask}", change, "python3 -c 'print(open(\"/x\").read().strip())'", tmp_path)
    assert lines[2:] == ["by python", "[]"]


@in_memory
def test_box_of_many_mounts_works_for_ordinary_user(tmp_path: Path) -> None:
    """An engine mounts files in `/etc` of its containers, say; his overlays cannot lie over other mounts."""
    host = f"{LARGE}; mount --bind /etc/issue /etc/issue"
    change = "echo new >/etc/new; rm -r /opt; echo x >>/etc/issue || echo mounted >/seen"
    lines = round_trip(host, change, "cat /etc/new /seen; ls -d /opt 2>/dev/null", tmp_path, AS_ORDINARY_USER)
    assert lines[2:] == ["new", "mounted", "[]"]
