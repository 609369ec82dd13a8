"""Conformance suite for `SnapshottableContainer`, a container whose file changes can be captured for snapshots.

The containers of the backend need `python3`, because the tests run Python programs in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shlex
import shutil
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.container import (
    Container,
    ContainerFactory,
    ContainerSpec,
    SnapshottableContainer,
)
from ares_exp.containers.filesystem.delta import Delta, StoredChanges, differences
from ares_exp.containers.filesystem.delta_encoding import get_delta, put_delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.errors import CaptureError, ContainerDiedError, SnapshotError, SnapshotMismatchError
from ares_exp.records.secrets import protect
from ares_exp.testing.container_contract import ContainerSuite

LARGE_BYTES = 5 * 2**20
SOON_SEC = 60.0
# Changes the files of `make_awkward` in every way, and prints the contents of a file under each of its names.
_SPOIL = """
names = ["/n/h1", "/n/h2", "/n/d/h3"]
with open(names[0], "a") as file:
    file.write("spoiled")
print(json.dumps([open(name).read() for name in names]))
os.link("/n/large", "/n/another-name")
with open("/n/another-name", "ab") as file:
    file.write(b"spoiled")
open("/n/zeros", "w").write("spoiled")
os.chmod("/n/suid", 0o600)
os.setxattr("/n/xa", "user.note", b"spoiled")
os.remove("/n/sparse")
shutil.move("/n/empty", "/n/moved")
shutil.rmtree("/n/old")
os.mkdir("/n/old")
open("/n/sticky/new", "w").write("spoiled")
os.utime("/n/future")
os.remove("/n/link-dir")
os.symlink("spoiled", "/n/link-dir")
"""
_CANCELLED_AFTER_SEC = (0.0, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4, 0.8)


class CountingStore(ObjectStore):
    """An object store that counts the bytes that are passed to it, to check how much data a capture writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.put_bytes = 0

    def put(self, data: bytes) -> str:
        self.put_bytes += len(data)
        return super().put(data)


async def capture(box: Container, objects: ObjectStore) -> Delta:
    """Captures the file changes of a container."""
    assert isinstance(box, SnapshottableContainer)
    return await box.capture_changes(objects)


async def run(box: Container, command: str) -> str:
    """Runs a command as root and returns its output. Fails if the exit code is not 0."""
    result = await box.exec(command, user="root", cwd="/", timeout_sec=SOON_SEC)
    assert result.exit_code == 0, result.output
    return result.output


class ChangesContract(ContainerSuite):
    """The suite for containers whose changes can be captured. Override `factory`, `spec`, `other_base` and `left`."""

    impossible: frozenset[str] = frozenset()
    """Names of the `STEPS` (kinds of changes) that programs in the container are not allowed to make."""

    lost: frozenset[str] = frozenset()
    """Names of the `STEPS` whose changes the backend cannot capture. It must report these changes as lost."""

    @pytest.fixture
    def other_base(self) -> str:
        """Returns a valid `Delta.base` that differs from the base of `spec`, such as the id of another image."""
        raise NotImplementedError

    async def left(self) -> list[str]:
        """Lists resources of this process in the backend, such as containers or images, to find leftovers of a test."""
        raise NotImplementedError

    @pytest.fixture
    def objects(self, tmp_path: Path) -> CountingStore:
        return CountingStore(tmp_path / "store")

    @contextlib.asynccontextmanager
    async def leaves_nothing(self) -> AsyncIterator[None]:
        """Checks that the body leaves no new resources. Waits for a backend that is still cleaning up."""
        before = await self.left()
        yield
        async with asyncio.timeout(SOON_SEC):
            while await self.left() != before:  # noqa: ASYNC110 (it happens in the backend)
                await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def started(
        self, factory: ContainerFactory, spec: ContainerSpec, count: int
    ) -> AsyncIterator[list[Container]]:
        """Starts several containers at the same time, stops them at the end, and checks that nothing is left."""
        boxes = [factory(spec) for _ in range(count)]
        async with self.leaves_nothing():
            try:
                await asyncio.gather(*(one.start() for one in boxes))
                yield boxes
            finally:
                await asyncio.gather(*(one.stop() for one in boxes))

    # Captured and restored contents

    async def test_new_container_has_no_changes(self, box: Container, objects: ObjectStore) -> None:
        assert dict((await capture(box, objects)).entries) == {}

    async def test_every_kind_of_change_round_trips(
        self, box: Container, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore
    ) -> None:
        roots, failed = await make_awkward(box, leave_out=self.lost)
        assert set(failed) == self.impossible
        delta = await capture(box, objects)
        assert ["/n/sock" in note for note in delta.notes] == [True]
        read = get_delta(objects, put_delta(delta, objects))
        assert differences(read, delta) == []
        async with factory(replace(spec, changes=StoredChanges(read, objects))) as again:
            assert differences(await capture(again, objects), delta) == []
            assert await listing(again, roots) == await listing(box, roots)
            assert again.image == box.image

    async def test_changes_accumulate_across_captures(
        self, box: Container, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore
    ) -> None:
        await run(box, "mkdir -p /w/d/e /w/gone /w/filled; echo 1 > /w/d/e/f; echo 2 > /w/new; echo 3 > /w/gone/a")
        await run(box, "cd /w; echo 4 > a; ln a b; ln a c; echo 5 > filled/old; echo 6 > file; mkdir dir; touch dir/x")
        await run(box, "rm -rf /usr/share/doc; echo file > /usr/share/doc; echo extra >> /etc/issue; rm /etc/shells")
        first = await capture(box, objects)
        async with factory(replace(spec, changes=StoredChanges(first, objects))) as second:
            await run(
                second, "cd /w; rm new; rm -r gone; echo 7 > d/e/g; rm -r filled; mkdir filled; echo 8 > filled/n"
            )
            await run(second, "cd /w; echo more >> b; rm file; mkdir file; touch file/y; rm -r dir; echo 9 > dir")
            await run(second, "cd /w; ln c e" if "name of a base file" not in self.lost else "echo > /w/e")
            await run(second, "rm /usr/share/doc; mkdir /usr/share/doc; touch /usr/share/doc/only; rm /etc/issue")
            await run(second, "echo again > /etc/shells")
            roots = ["/w", "/usr/share/doc", "/etc/issue", "/etc/shells"]
            delta, want = await capture(second, objects), await listing(second, roots)
        assert "/w/new" not in delta.entries
        assert delta.base == first.base
        assert delta.entries["/etc/issue"].kind == "whiteout"
        assert get_delta(objects, put_delta(delta, objects)) == delta
        async with factory(replace(spec, changes=StoredChanges(delta, objects))) as third:
            assert await listing(third, roots) == want
            assert await run(third, "ls /w; ls /usr/share/doc") == "a\nb\nc\nd\ndir\ne\nfile\nfilled\nonly\n"
            assert differences(await capture(third, objects), delta) == []

    async def test_capture_is_complete_in_any_store(
        self, box: Container, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore, tmp_path: Path
    ) -> None:
        await run(box, "mkdir /w; head -c 300000 /dev/urandom > /w/large")
        want, other = await listing(box, ["/w"]), ObjectStore(tmp_path / "other")
        changes = StoredChanges(await capture(box, objects), objects)
        async with factory(replace(spec, changes=changes)) as second:
            delta = await capture(second, other)
        shutil.rmtree(objects.path)
        async with factory(replace(spec, changes=StoredChanges(delta, other))) as third:
            assert await listing(third, ["/w"]) == want

    async def test_containers_with_same_changes_are_independent(
        self, box: Container, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore
    ) -> None:
        roots, _ = await make_awkward(box, leave_out=self.lost)
        delta, want = await capture(box, objects), await listing(box, roots)
        changes = StoredChanges(delta, objects)
        async with self.started(factory, replace(spec, changes=changes), 3) as boxes:
            for one in boxes:
                assert differences(await capture(one, objects), delta) == []
                assert await python(one, _SPOIL) == ["hard" * 99 + "spoiled"] * 3
            async with factory(replace(spec, changes=changes)) as later:
                assert await listing(later, roots) == want
                assert differences(await capture(later, objects), delta) == []

    async def test_eight_containers_restore_one_capture(
        self, box: Container, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore
    ) -> None:
        await run(box, "mkdir /w; echo shared > /w/file; head -c 3000000 /dev/urandom > /w/large; rm /etc/shells")
        changes = StoredChanges(await capture(box, objects), objects)
        want = await listing(box, ["/w"])
        async with self.started(factory, replace(spec, changes=changes), 8) as boxes:
            await asyncio.gather(*(run(one, f"echo {number} > /w/mine") for number, one in enumerate(boxes)))
            for number, one in enumerate(boxes):
                assert await run(one, "cat /w/mine; test ! -e /etc/shells && rm /w/mine") == f"{number}\n"
                found = await listing(one, ["/w"])
                del found["'/w'"], want["'/w'"]
                assert found == want
                want = await listing(box, ["/w"])

    # Cost of a capture, and its effect on others

    async def test_second_capture_reads_only_changes(self, box: Container, objects: CountingStore) -> None:
        await run(box, f"mkdir /w; head -c {LARGE_BYTES} /dev/urandom > /w/large; echo one > /w/small")
        await asyncio.sleep(2.1)  # captures read recently changed files again, because another change may go unnoticed
        first = await capture(box, objects)
        assert objects.put_bytes > LARGE_BYTES
        objects.put_bytes = 0
        await run(box, "echo two > /w/small")
        second = await capture(box, objects)
        assert objects.put_bytes < 1000
        assert second.entries["/w/large"] == first.entries["/w/large"]
        assert objects.get(str(second.entries["/w/small"].chunks[0])) == b"two\n"

    async def test_change_with_same_size_and_time_is_detected(self, box: Container, objects: ObjectStore) -> None:
        await run(box, "mkdir /w; echo one > /w/file; touch -d @1000000000 /w/file")
        await capture(box, objects)
        await run(box, "echo two > /w/file; touch -d @1000000000 /w/file")
        assert objects.get(str((await capture(box, objects)).entries["/w/file"].chunks[0])) == b"two\n"

    async def test_capture_does_not_disturb_commands(self, box: Container, objects: ObjectStore) -> None:
        await run(
            box, "mkdir /w; (while :; do echo x >> /w/ticks; sleep 0.02; done) > /dev/null 2>&1 & echo $! > /w/pid"
        )
        counting = asyncio.create_task(run(box, "for i in $(seq 60); do echo $i; sleep 0.02; done"))
        while not counting.done():
            await capture(box, objects)
            assert await run(box, "echo between") == "between\n"
        assert await counting == "".join(f"{i}\n" for i in range(1, 61))
        ticks = int(await run(box, "kill -0 $(cat /w/pid) && wc -l < /w/ticks"))
        async with asyncio.timeout(SOON_SEC):
            while int(await run(box, "wc -l < /w/ticks")) <= ticks:
                pass

    async def test_captures_and_commands_run_concurrently(self, box: Container, objects: ObjectStore) -> None:
        users: list[str | int | None] = [None, 0, "root", None, 0]

        async def ask(number: int) -> str:
            return (await box.exec(f"echo {number}", user=users[number % 5], timeout_sec=SOON_SEC)).output

        captured = [asyncio.create_task(capture(box, objects)) for _ in range(4)]
        assert await asyncio.gather(*(ask(number) for number in range(40))) == [f"{n}\n" for n in range(40)]
        assert [differences(await one, await captured[0]) for one in captured] == [[]] * 4

    async def test_capture_during_writes_is_consistent(
        self, box: Container, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore
    ) -> None:
        await run(box, "mkdir /w")
        lines = "i=0; while :; do i=$((i+1)); echo $i >> /w/log; echo $i > /w/$((i%50)); rm -f /w/$(((i+25)%50)); done"
        await run(box, f"({lines}) > /dev/null 2>&1 &")
        async with asyncio.timeout(SOON_SEC):
            while int(await run(box, "cat /w/log 2>/dev/null | wc -l")) < 1000:
                pass
        delta = await capture(box, objects)
        async with factory(replace(spec, changes=StoredChanges(delta, objects))) as again:
            numbers = (await run(again, "cat /w/log")).splitlines()
        assert len(numbers) >= 1000
        assert numbers[:-1] == [str(n) for n in range(1, len(numbers))]

    async def test_cancelled_captures_leave_no_resources(self, box: Container, objects: ObjectStore) -> None:
        await run(box, f"mkdir /w; head -c {LARGE_BYTES} /dev/urandom > /w/large")
        async with self.leaves_nothing():
            for seconds in _CANCELLED_AFTER_SEC:
                task = asyncio.create_task(capture(box, objects))
                await asyncio.wait({task}, timeout=seconds)
                task.cancel()
                await asyncio.wait({task})
                assert await run(box, "echo alive") == "alive\n"
            assert (await capture(box, objects)).entries["/w/large"].size == LARGE_BYTES

    # Errors

    async def test_cancelled_restores_leave_no_resources(
        self, box: Container, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore
    ) -> None:
        await run(box, f"mkdir /w; head -c {LARGE_BYTES} /dev/urandom > /w/large")
        changes = StoredChanges(await capture(box, objects), objects)
        for seconds in _CANCELLED_AFTER_SEC:
            async with self.leaves_nothing():
                again = factory(replace(spec, changes=changes))
                task = asyncio.create_task(again.start())
                await asyncio.wait({task}, timeout=seconds)
                task.cancel()
                await asyncio.wait({task})
                await again.stop()

    async def test_changes_of_another_base_are_refused(
        self, box: Container, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore, other_base: str
    ) -> None:
        await run(box, "echo x > /file")
        delta = await capture(box, objects)
        for base in (other_base, "elsewhere:0123"):
            again = factory(replace(spec, changes=StoredChanges(replace(delta, base=base), objects)))
            async with self.leaves_nothing():
                with pytest.raises(SnapshotMismatchError, match=base):
                    await again.start()

    async def test_damaged_store_is_refused(
        self, box: Container, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore
    ) -> None:
        await run(box, f"mkdir /w; head -c {LARGE_BYTES} /dev/urandom > /w/large")
        delta = await capture(box, objects)
        chunks = [str(chunk) for chunk in delta.entries["/w/large"].chunks]
        objects.file(random.Random(0).choice(chunks)).unlink()
        async with self.leaves_nothing():
            with pytest.raises(SnapshotError, match="missing"):
                await factory(replace(spec, changes=StoredChanges(delta, objects))).start()

    async def test_secret_is_not_captured(self, box: Container, objects: ObjectStore) -> None:
        secret = "not-for-the-disk-4711"
        protect([secret])
        await run(box, "mkdir /w; echo fine > /w/file")
        await box.exec('printf %s "$IT" > /w/key', env={"IT": secret}, user="root")
        with pytest.raises(CaptureError, match="/w/key"):
            await capture(box, objects)
        await run(box, "rm /w/key")
        assert set((await capture(box, objects)).entries) == {"/w", "/w/file"}

    async def test_stopped_container_cannot_be_captured(
        self, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore
    ) -> None:
        box = factory(spec)
        with pytest.raises(ContainerDiedError):
            await capture(box, objects)
        async with box:
            pass
        with pytest.raises(ContainerDiedError):
            await capture(box, objects)

    async def test_stop_during_capture_leaves_no_resources(
        self, factory: ContainerFactory, spec: ContainerSpec, objects: ObjectStore
    ) -> None:
        async with self.leaves_nothing():
            for seconds in _CANCELLED_AFTER_SEC[:6]:
                async with factory(spec) as box:
                    await python(box, "open('/large', 'wb').write(os.urandom(3_000_000)); print(0)")
                    task = asyncio.create_task(capture(box, objects))
                    await asyncio.wait({task}, timeout=seconds)
                with contextlib.suppress(CaptureError, ContainerDiedError):
                    assert (await task).entries["/large"].size == 3_000_000


# Finds directories and files of the base image that can be changed, because the container itself does not use them.
_PICK = """
directories, files = [], []
for name in sorted(os.listdir("/usr/share")):
    path = "/usr/share/" + name
    if os.path.islink(path) or not os.path.isdir(path) or name in ("zoneinfo", "terminfo", "locale"):
        continue
    below = [os.path.join(at, one) for at, _, found in os.walk(path) for one in sorted(found)]
    plain = [one for one in below if os.path.isfile(one) and not os.path.islink(one)]
    if len(below) > 300 or not plain:
        continue
    if len(directories) < 4:
        directories.append(path)
    else:
        files += [one for one in plain if os.lstat(one).st_nlink == 1 and os.path.getsize(one) < 2 ** 20][:2]
print(json.dumps({"directories": directories, "files": files[:8]}))
"""

STEPS = {
    "append": "open(files[0], 'a').write('more')",
    "mode": "os.chmod(files[1], 0o600)",
    "mtime": "os.utime(files[2], ns=(1234567890_123456789, 1234567890_123456789))",
    "owner": "os.chown(files[3], 1000, 1234567)",
    "delete a file": "os.remove(files[4])",
    "file to directory": "os.remove(files[5]); os.mkdir(files[5]); write(files[5] + '/inner')",
    "file to link": "os.remove(files[6]); os.symlink('/etc', files[6])",
    "name of a base file": "os.link(files[7], '/n/name-of-base')",
    "delete a directory": "shutil.rmtree(directories[0])",
    "refill a directory": "shutil.rmtree(directories[1]); os.mkdir(directories[1]); write(directories[1] + '/only')",
    "directory to file": "shutil.rmtree(directories[2]); write(directories[2])",
    "directory to link": "shutil.rmtree(directories[3]); os.symlink('nowhere', directories[3])",
    "mode of a base directory": "os.chmod('/opt', 0o711)",
    "links": "for name, to in {'rel': 'plain', 'abs': '/etc/passwd', 'out': '../../../../etc/shadow', 'dangling':"
    " 'nowhere', 'dir': '/tmp', 'odd': '\\udcff\\n', 'owned': 'x'}.items(): os.symlink(to, '/n/link-' + name)",
    "owner of a link": "os.lchown('/n/link-owned', 5, 6)",
    "names": "write('/n/h1', b'hard' * 99); os.mkdir('/n/d'); os.link('/n/h1', '/n/h2'); os.link('/n/h1', '/n/d/h3')",
    "attributes": "write('/n/xa'); os.setxattr('/n/xa', 'user.note', b'\\0\\1bin\\xff'); os.mkdir('/n/xd');"
    " os.setxattr('/n/xd', 'user.of', b'directory')",
    "capability": "write('/n/cap'); os.setxattr('/n/cap', 'security.capability',"
    " bytes.fromhex('0100000200040000000000000000000000000000'))",
    "setuid": "write('/n/suid'); os.chmod('/n/suid', 0o4755); write('/n/sgid'); os.chmod('/n/sgid', 0o2750)",
    "directories": "os.mkdir('/n/sticky'); os.chmod('/n/sticky', 0o1777); os.mkdir('/n/ro'); write('/n/ro/in');"
    " os.chmod('/n/ro', 0o555); os.makedirs('/n/empty/deep/er')",
    "mtime of a directory": "os.mkdir('/n/old'); write('/n/old/in'); os.utime('/n/old', ns=(10**18 + 7, 10**18 + 7))",
    "future": "write('/n/future'); os.utime('/n/future', (4102444800, 4102444800))",
    "fifo": "os.mkfifo('/n/fifo', 0o640)",
    "socket": "socket.socket(socket.AF_UNIX).bind('/n/sock')",
    "sparse": "f = open('/n/sparse', 'wb'); f.write(b'start'); f.seek(9 << 20); f.write(b'end'); f.close()",
    "zeros": "write('/n/zeros', bytes(300_000)); write('/n/nothing', b'')",
    "large": "write('/n/large', bytes(range(256)) * 4000)",
    "odd names": "for name in ('new\\nline', '-rf', ' sp ace ', 'q\\'uo\"te`$(x)', 'back\\\\slash\\\\n', '*glob?[a]',"
    " 'ünïcödé-文件', 'tab\\t', '#', '~', 'a:b=c', '%41'): write('/n/' + name, name.encode())",
    "names that are no UTF-8": "write(b'/n/bad\\xff\\xfeutf8'); os.mkdir(b'/n/dir\\xff'); write(b'/n/dir\\xff/in')",
    "names of whiteouts": "write('/n/.wh.file', b'literal'); os.mkdir('/n/.wh.dir'); write('/n/.wh.dir/in')",
    "long path": "path = '/n/' + 'd' * 255 + '/' + 'e' * 255 + '/' + 'f' * 255; os.makedirs(path);"
    " write(path + '/' + 'g' * 255)",
    "large ids": "write('/n/ids'); os.chown('/n/ids', 3000000000, 3000000001)",
}

_MAKE = """
files, directories, failed = picked["files"], picked["directories"], []
def write(path, data=b"x"):
    with open(path, "wb") as file:
        file.write(data)
os.mkdir("/n")
write("/n/plain", b"plain")
for name, source in steps.items():
    try:
        exec(source)
    except OSError as error:
        failed.append(name)
print(json.dumps(failed))
"""

# Prints all attributes of the files at or below these paths, and of the directories that contain the paths.
_LIST = """
found, names = {}, {}
def add(path):
    try:
        s = os.lstat(path)
    except FileNotFoundError:
        return
    kind = stat.S_IFMT(s.st_mode)
    if stat.S_ISSOCK(kind):
        return
    seen = [kind, stat.S_IMODE(s.st_mode), s.st_uid, s.st_gid, s.st_mtime_ns]
    if stat.S_ISREG(kind):
        with open(path, "rb") as file:
            seen += [s.st_size, hashlib.sha256(file.read()).hexdigest()]
        if s.st_nlink > 1:
            names.setdefault(s.st_ino, []).append(repr(path))
    elif stat.S_ISLNK(kind):
        seen.append(repr(os.readlink(path)))
    if not stat.S_ISLNK(kind):
        for name in sorted(os.listxattr(path)):
            if name.startswith(("user.", "security.capability")):
                seen.append([name, os.getxattr(path, name).hex()])
    found[repr(path)] = seen
for root in roots:
    parent = os.path.dirname(root)
    if parent != "/":
        add(parent)
    add(root)
    for at, directories, files in () if os.path.islink(root) else os.walk(root):
        for name in directories + files:
            add(os.path.join(at, name))
for group in names.values():
    if len(group) > 1:
        for path in group:
            found[path].append(sorted(group))
print(json.dumps(found))
"""


async def python(box: Container, source: str, **given: object) -> Any:
    """Runs a Python program as root, with `given` as variables, and returns the parsed JSON that it prints."""
    imports = "import hashlib, json, os, shutil, socket, stat"
    values = "\n".join(f"{name} = json.loads({json.dumps(value)!r})" for name, value in given.items())
    command = "python3 -c " + shlex.quote("\n".join((imports, values, source)))
    result = await box.exec(command, user="root", cwd="/", timeout_sec=SOON_SEC, max_output_bytes=16 * 2**20)
    assert result.exit_code == 0, result.output[-2000:]
    assert not result.elided_bytes
    return json.loads(result.output)


async def make_awkward(box: Container, *, leave_out: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Makes many kinds of unusual changes to the files of a container: all `STEPS` except the steps in `leave_out`.

    Returns:
        The paths that contain all changes (`roots` of `listing`), and the names of the failed `STEPS`.
    """
    picked = await python(box, _PICK)
    assert (len(picked["directories"]), len(picked["files"])) == (4, 8)
    steps = {name: source for name, source in STEPS.items() if name not in leave_out}
    failed = await python(box, _MAKE, picked=picked, steps=steps)
    return ["/n", "/opt", *picked["directories"], *picked["files"]], failed


async def listing(box: Container, roots: list[str]) -> dict[str, list[Any]]:
    """Lists the attributes and contents of the files at and below the paths in `roots`."""
    found: dict[str, list[Any]] = await python(box, _LIST, roots=roots)
    return found
