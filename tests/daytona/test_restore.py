"""Captured files are given to a new sandbox, or it is refused; what they are relative to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ares_exp.containers.daytona.file_listing import DIRECTORY
from ares_exp.containers.daytona.listed_changes import Changes, Listed
from ares_exp.containers.daytona.restore import verify
from ares_exp.containers.daytona.sandbox_base import require_base, sandbox_base
from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges, sorted_by_path
from ares_exp.containers.filesystem.delta_encoding import get_delta, put_delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.images.image_plan import ImagePlan
from ares_exp.errors import RestoreError, SnapshotMismatchError, UnsafeSnapshotError
from ares_exp.testing.changes_contract import run
from tests.daytona.files_container import BASE
from tests.daytona.test_capture import new_box

DIRECTORY_ENTRY = Entry("directory", 0o755, mtime_ns=10**18)
FAILING_TAR = r"""
printf '#!/bin/sh\nif [ "$1" = --version ]; then echo GNU; else echo no room >&2; exit 2; fi\n' >/usr/local/sbin/tar
chmod 755 /usr/local/sbin/tar
"""


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "store")


def stored(objects: ObjectStore, **entries: Entry) -> StoredChanges:
    """Changes whose paths have `_` for `/`."""
    by_path = sorted_by_path({path.replace("_", "/"): entry for path, entry in entries.items()})
    return StoredChanges(get_delta(objects, put_delta(Delta(BASE, by_path), objects)), objects)


@pytest.mark.docker
@pytest.mark.once
@pytest.mark.nightly  # by day, the contract
class TestInABox:
    async def test_what_hides_the_base(self, objects: ObjectStore) -> None:
        content = Entry("file", 0o644, mtime_ns=10**18, size=1, chunks=(objects.put(b"x"),))
        changes = stored(
            objects,
            _usr=DIRECTORY_ENTRY,
            _usr_share=DIRECTORY_ENTRY,
            _usr_share_doc=replace(DIRECTORY_ENTRY, opaque=True),
            _usr_share_doc_only=content,
            _usr_share_perl5=content,
            _etc=DIRECTORY_ENTRY,
            _etc_shells=Entry("whiteout"),
            _etc_issue=DIRECTORY_ENTRY,
            _etc_issue_in=Entry("symlink", target="/nowhere"),
        )
        async with new_box(changes) as box:
            said = await run(box, "ls /usr/share/doc /etc/issue; cat /usr/share/perl5; test ! -e /etc/shells")
            assert said == "/etc/issue:\nin\n\n/usr/share/doc:\nonly\nx"

    async def test_holes_stay_holes(self, objects: ObjectStore) -> None:
        async with new_box() as box:
            await run(box, "mkdir /w; cd /w; truncate -s 200M holes; printf x | dd of=some bs=1 seek=70000000; ")
            await run(box, "cd /w; truncate -s 90000001 some; truncate -s 300000 small; printf end >>small; : >none")
            delta = await box.capture_changes(objects)
            want = await run(box, "cd /w; sha256sum * && stat -c '%n %s' *")
        async with new_box(StoredChanges(delta, objects)) as again:
            assert await run(again, "cd /w; sha256sum * && stat -c '%n %s' *") == want
            assert int((await run(again, "du -sk /w")).split()[0]) < 2000

    @pytest.mark.parametrize(
        "garble",
        [
            lambda data: data[: len(data) // 2],
            pytest.param(lambda data: data[:-9] + bytes(9), marks=pytest.mark.nightly),
            pytest.param(lambda data: b"", marks=pytest.mark.nightly),
        ],
    )
    async def test_an_upload_that_arrives_as_something_else(
        self, objects: ObjectStore, garble: Callable[[bytes], bytes]
    ) -> None:
        box = new_box(stored(objects, _new=DIRECTORY_ENTRY))
        box.garble = lambda path, data: garble(data) if path.endswith("upload") else data
        with pytest.raises(RestoreError, match="it arrived as something else"):
            await box.start()

    async def test_a_tar_that_fails(self, objects: ObjectStore) -> None:
        box = new_box(stored(objects, _new=DIRECTORY_ENTRY), prepare=FAILING_TAR)
        with pytest.raises(RestoreError, match=r"tar says: no room\.$"):
            await box.start()

    @pytest.mark.parametrize(
        "path",
        [
            f"{DIRECTORY}/first",
            "/relay/fifo",
            pytest.param("/etc/hosts", marks=pytest.mark.nightly),
            pytest.param("/usr/local/bin/daytona/x", marks=pytest.mark.nightly),
        ],
    )
    async def test_what_is_not_the_agents(self, objects: ObjectStore, path: str) -> None:
        entries = dict.fromkeys(map(str, list(Path(path).parents)[-2::-1]), DIRECTORY_ENTRY)
        delta = Delta(BASE, {**entries, path: Entry("fifo", 0o600)})
        with pytest.raises(UnsafeSnapshotError, match="not the sandbox's own"):
            await new_box(StoredChanges(delta, objects)).start()


def listed(kind: str, **changes: object) -> Listed:
    found = Listed(b"", kind, 0o644, 1, 2, 5, 10**9 + 1, 0, None)
    return replace(found, **changes)  # type: ignore[arg-type]


FILE = Entry("file", 0o644, 1, 2, 10**9 + 1, size=5, chunks=(None,))


@pytest.mark.parametrize(
    ("entry", "found", "reason"),
    [
        (FILE, listed("f"), ""),
        (FILE, None, "not as it was written"),
        (FILE, listed("d"), "kind"),
        (FILE, listed("f", mode=0o4644), "mode"),
        (FILE, listed("f", uid=0), "owner"),
        (FILE, listed("f", gid=0), "owner"),
        (FILE, listed("f", size=4), "size"),
        (FILE, listed("f", mtime_ns=10**9), "time"),
        (FILE, listed("f", file=b"1 1"), "other names"),
        (Entry("symlink", 0, 1, 2, 10**9 + 1, target="/a/ü"), listed("l", mode=0o777, size=5), ""),
        (Entry("symlink", 0, 1, 2, 10**9 + 1, target="/a/u"), listed("l", mode=0o777, size=5), "size"),
        (Entry("whiteout"), listed("f"), "still there"),
        (Entry("whiteout"), None, ""),
    ],
)
def test_what_is_there_is_compared(entry: Entry, found: Listed | None, reason: str) -> None:
    changes = Changes({"/x": found} if found is not None else {})
    if not reason:
        verify({"/x": entry}, changes, has_gnu_tar=True)
        return
    with pytest.raises(RestoreError, match=f"'/x'.*{reason}"):
        verify({"/x": entry}, changes, has_gnu_tar=True)


def test_names_of_files_are_compared() -> None:
    linked = {"/a": replace(FILE, link=1), "/b": replace(FILE, link=1), "/c": FILE}
    one, other = listed("f", file=b"1 1"), listed("f", file=b"1 2")
    verify(linked, Changes({"/a": one, "/b": one, "/c": listed("f")}), has_gnu_tar=True)
    for found in ({"/a": one, "/b": other}, {"/a": listed("f"), "/b": listed("f")}, {"/a": one, "/b": one, "/c": one}):
        with pytest.raises(RestoreError, match="other names"):
            verify(linked, Changes({"/c": listed("f")} | found), has_gnu_tar=True)


def test_other_tars_keep_whole_seconds() -> None:
    link = Entry("symlink", 0, 1, 2, 10**9, target="/a/ü")
    found = Changes({"/f": listed("f", mtime_ns=10**9), "/l": listed("l", uid=0, mtime_ns=7)})
    verify({"/f": FILE, "/l": link}, found, has_gnu_tar=False)
    with pytest.raises(RestoreError, match="time"):
        verify({"/f": FILE}, Changes({"/f": listed("f", mtime_ns=10**9 - 1)}), has_gnu_tar=False)


def test_many_differences_are_counted() -> None:
    entries = {f"/{number}": FILE for number in range(10)}
    with pytest.raises(RestoreError, match=r"'/0'.*'/1'.*'/2'.* and 7 more\.$"):
        verify(entries, Changes(), has_gnu_tar=True)


def test_what_a_sandbox_was_made_from(tmp_path: Path, objects: ObjectStore) -> None:
    plain = ImagePlan(dockerfile="FROM a\n")
    for name in ("one", "other"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_text("x")
    with_files = replace(plain, context=tmp_path / "one")
    bases = [
        sandbox_base(plan)
        for plan in (
            ImagePlan(snapshot="a"),
            ImagePlan(image="a"),
            ImagePlan(image="a:1 ü"),
            ImagePlan(image="a" * 900),
            plain,
            ImagePlan(dockerfile="FROM b\n"),
            with_files,
        )
    ]
    assert len(set(bases)) == len(bases)
    assert bases[:3] == ["daytona:snapshot=a", "daytona:image=a", "daytona:image=a:1%20%C3%BC"]
    for base in bases:
        assert get_delta(objects, put_delta(Delta(base, {}), objects)).base == base
        require_base(base, base)
    assert sandbox_base(replace(plain, context=tmp_path / "other")) == bases[-1]
    (tmp_path / "other" / "deep" / "file").chmod(0o755)
    executable = sandbox_base(replace(plain, context=tmp_path / "other"))
    (tmp_path / "other" / "deep" / "file").write_text("y")
    assert len({bases[-1], executable, sandbox_base(replace(plain, context=tmp_path / "other"))}) == 3
    with pytest.raises(SnapshotMismatchError, match=r"the image a:1 ü .*the snapshot a .*container\.\* options"):
        require_base(bases[2], bases[0])
