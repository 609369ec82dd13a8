"""Changed files as a sandbox of the service is asked for them, in boxes of ours."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.daytona.file_listing import CHANGES, DIRECTORY
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.filesystem.delta import Delta, DeltaLimits, Entry, StoredChanges, differences
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.errors import (
    CaptureError,
    ContainerDiedError,
    RestoreError,
    SnapshotMismatchError,
    SnapshotUnsupportedError,
)
from ares_exp.testing.awkward_tree import listing, make_awkward
from ares_exp.testing.changes_contract import CountingStore, run
from tests.daytona.files_container import FilesBox

pytestmark = [pytest.mark.docker, pytest.mark.once]

# As busybox: `find` that prints no formats, `tar` that is not GNU's.
_PLAIN_PROGRAMS = r"""
cd /usr/local/sbin
printf '#!/bin/sh\ncase " $* " in *" -printf "*) exit 1;; esac\nexec /usr/bin/find "$@"\n' >find
printf '#!/bin/sh\nif [ "$1" = --version ]; then echo plain; else exec /usr/bin/tar "$@"; fi\n' >tar
chmod 755 find tar
"""


def new_box(changes: StoredChanges | None = None, **options: str) -> FilesBox:
    spec = ContainerSpec("files", docker_image="python:3.12-slim", changes=changes)
    return FilesBox(spec, DockerContainerFactory()(replace(spec, changes=None)), **options)


@pytest.fixture
async def box() -> AsyncIterator[FilesBox]:
    async with new_box() as box:
        yield box


@pytest.fixture
def objects(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "store")


@pytest.mark.nightly
async def test_every_kind_of_change_comes_back(box: FilesBox, objects: CountingStore) -> None:
    await run(box, "mkdir -p /al/one; cd /al/one; echo x >file; ln -s file link; cp -al /al/one /al/copy")
    roots, failed = await make_awkward(box)
    assert failed == []
    delta = await box.capture_changes(objects)
    assert delta.notes == ("'/n/sock' is not kept: it is a socket.",)
    objects.put_bytes = 0
    async with new_box(StoredChanges(delta, objects)) as again:
        assert await listing(again, [*roots, "/al"]) == await listing(box, [*roots, "/al"])
        assert differences(await again.capture_changes(objects), delta) == []
        assert objects.put_bytes == 0  # what was given to it need not be read from it


@pytest.mark.nightly
async def test_without_gnu_programs(objects: CountingStore) -> None:
    def in_seconds(delta: Delta) -> Delta:
        entries = {path: replace(one, mtime_ns=one.mtime_ns // 10**9) for path, one in delta.entries.items()}
        return Delta(delta.base, entries)

    lost = {"attributes", "capability", "odd names"}
    async with new_box(prepare=_PLAIN_PROGRAMS) as box:
        roots, failed = await make_awkward(box, leave_out=lost)
        assert failed == []
        await run(
            box, "cd /n; touch 'line\nbreak' 'two  spaces' -- -rf; for i in $(seq 300); do echo $i >file-$i; done"
        )
        delta = await box.capture_changes(objects)
        assert [note[:20] for note in delta.notes] == [
            "1 names with line br",
            "'/n/sock' is not kep",
            "There is no GNU tar ",
        ]
        objects.put_bytes = 0
        assert differences(await box.capture_changes(objects), delta) == []
        async with new_box(StoredChanges(delta, objects), prepare=_PLAIN_PROGRAMS) as again:
            assert differences(in_seconds(await again.capture_changes(objects)), in_seconds(delta)) == []
            found, want = await listing(again, roots), await listing(box, roots)
        assert set(want) - set(found) == {r"'/n/line\nbreak'"}
        marked = replace(delta.entries["/n/plain"], xattrs={"user.x": b"y"})
        entries = {"/n": delta.entries["/n"], "/n/plain": marked}
        with pytest.raises(RestoreError, match=r"'/n/plain' has the attribute 'user\.x'"):
            await new_box(StoredChanges(replace(delta, entries=entries), objects), prepare=_PLAIN_PROGRAMS).start()


@pytest.mark.nightly
async def test_names_of_one_file_are_read_once(box: FilesBox, objects: CountingStore) -> None:
    await run(box, "mkdir /w; head -c 300000 /dev/urandom >/w/a; ln /w/a /w/b; sleep 2.1")
    first = await box.capture_changes(objects)
    assert first.entries["/w/a"] == first.entries["/w/b"]
    objects.put_bytes = 0
    await run(box, "echo x >/w/other")
    second = await box.capture_changes(objects)
    assert objects.put_bytes < 1000
    assert second.entries["/w/a"] == second.entries["/w/b"] == first.entries["/w/a"]
    await run(box, "ln /w/a /w/c; rm /w/b")
    third = await box.capture_changes(objects)
    assert third.entries["/w/a"] == third.entries["/w/c"]
    assert "/w/b" not in third.entries


async def test_what_is_not_the_agents_is_left_out(box: FilesBox, objects: CountingStore) -> None:
    await run(box, "mkdir -p /relay /root/.daytona; touch /relay/x /root/.daytona/log /tmp/daytona-daemon.log /mine")
    await run(box, "echo 127.0.0.1 x >>/etc/hosts; touch /dev/shm/x")
    entries = (await box.capture_changes(objects)).entries
    assert set(entries) == {"/mine", "/root", "/tmp"}


@pytest.mark.parametrize("what", [f"rm -r {DIRECTORY}", f"echo x >>{DIRECTORY}/first", f"rm {DIRECTORY}/first"])
async def test_a_first_listing_that_is_another(box: FilesBox, objects: CountingStore, what: str) -> None:
    await run(box, what)
    with pytest.raises(CaptureError, match=rf"{DIRECTORY} was removed or written to"):
        await box.capture_changes(objects)


_LINE = b"f 644 0 0 1 1.0000000000 1.0000000000 1 1 1 /etc/passwd\n"


HOSTILE: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: data[: len(data) // 2], "ended|ends early"),
    (lambda data: b"\x1f\x8b" + data, "."),
    (lambda data: b"x" * 9000, "too long"),
    (lambda data: gzip.compress(b"f what /x\n.\n.\n.\n"), "no line of it"),
    (lambda data: gzip.compress(_LINE.replace(b"/etc", b"/../etc") + b".\n.\n.\n"), "no path"),
    (lambda data: gzip.compress(_LINE.replace(b"/etc", b"etc") + b".\n.\n.\n"), "no line of it"),
    (lambda data: gzip.compress(_LINE * 20 + b".\n.\n.\n"), "more than 20 lines"),
    (lambda data: gzip.compress(b".\n.\n"), "ends early"),
]


async def test_what_a_hostile_sandbox_says_of_its_files(box: FilesBox, objects: CountingStore) -> None:
    limits = box.files._limits
    for garble, reason in HOSTILE:
        box.garble = lambda path, data, garble=garble: garble(data) if path == CHANGES else data
        box.files._limits = DeltaLimits(max_entries=10)
        with pytest.raises(CaptureError, match=reason):
            await box.capture_changes(objects)
        box.garble, box.files._limits = (lambda path, data: data), limits
        assert (await box.capture_changes(objects)).entries == {}


@pytest.mark.nightly
async def test_half_of_an_archive(box: FilesBox, objects: CountingStore) -> None:
    await run(box, "head -c 300000 /dev/urandom >/large")
    box.garble = lambda path, data: data if path == CHANGES else data[: len(data) // 2]
    with pytest.raises(CaptureError, match="archive"):
        await box.capture_changes(objects)
    box.garble = lambda path, data: data
    assert set((await box.capture_changes(objects)).entries) == {"/large"}


@pytest.mark.nightly
async def test_too_much_is_not_packed(box: FilesBox, objects: CountingStore) -> None:
    await run(box, "truncate -s 1G /large")
    box.files._limits = DeltaLimits(max_bytes=2**29)
    with pytest.raises(CaptureError, match=r"at most .* bytes together, found 1, 1073741824 bytes"):
        await box.capture_changes(objects)
    box.files._limits = DeltaLimits()
    box.fetched_bytes = 0
    assert (await box.capture_changes(objects)).entries["/large"].size == 2**30
    assert box.fetched_bytes < 10_000


async def test_an_image_without_the_programs(objects: CountingStore) -> None:
    async with new_box(prepare="rm /usr/bin/uniq") as box:
        await run(box, "echo still works")
        with pytest.raises(SnapshotUnsupportedError, match="no `uniq` in it"):
            await box.capture_changes(objects)
    changes = StoredChanges(Delta("daytona:image=test", {"/x": Entry("directory", 0o755)}), objects)
    with pytest.raises(RestoreError, match="no `uniq` in it"):
        await new_box(changes, prepare="rm /usr/bin/uniq").start()


async def test_before_the_start(objects: CountingStore) -> None:
    with pytest.raises(ContainerDiedError):
        await new_box().files.capture(objects)


@pytest.mark.nightly
async def test_another_base(objects: ObjectStore) -> None:
    for base in ("daytona:image=other", "daytona:dockerfile=12", "sha256:12", "host:x"):
        with pytest.raises(SnapshotMismatchError, match=base):
            await new_box(StoredChanges(Delta(base, {}), objects)).start()
