import io
import os
import random
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ares_exp.containers.docker import capture
from ares_exp.containers.docker.capture import read_tar
from ares_exp.containers.filesystem.delta import Delta, Entry, differences
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.errors import CaptureError
from tests.unit.containers.filesystem.trees import make_awkward, make_unkept

SECRET = "the-secret-value-987654321"


def archive_of(*members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for member in members:
            if isinstance(member, tuple):
                member[0].size = len(member[1])
                archive.addfile(member[0], io.BytesIO(member[1]))
            else:
                archive.addfile(member)
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, **values: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = kind
    for key, value in values.items():
        setattr(made, key, value)
    return made


def entries_of(archive: bytes, objects: ObjectStore, **options: object) -> dict[str, Entry]:
    return read_tar(io.BytesIO(archive), objects, notes=[], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [
    ["--format=posix", "--sparse", "--xattrs", "--xattrs-include=*"],
    ["--format=posix"],
    ["--format=gnu", "--sparse"],
])  # fmt: skip
def test_archives_of_gnu_tar_are_read(tmp_path: Path, objects: ObjectStore, options: list[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make_awkward(source / "n")
    make_unkept(source)
    made = subprocess.run(
        ["tar", "--create", *options, "--numeric-owner", "--directory", source, "."],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    notes: list[str] = []
    found = read_tar(io.BytesIO(made.stdout), objects, notes=notes)
    expected = scan(source, objects, ScanCache(), notes=[])
    if "--format=gnu" in options:
        expected = {path: replace(entry, mtime_ns=entry.mtime_ns // 10**9 * 10**9) for path, entry in expected.items()}
    if "--xattrs" not in options:
        expected = {path: replace(entry, xattrs={}) for path, entry in expected.items()}
    assert differences(Delta("x:1", found), Delta("x:1", expected)) == []
    assert all("'/null' is not captured" in note for note in notes)


@pytest.mark.parametrize("name", ["etc/f", "./etc/f", "/etc//f", "etc/..."])
def test_names_are_relative_to_the_root(objects: ObjectStore, name: str) -> None:
    assert list(entries_of(archive_of(member(name)), objects)) == ["/" + os.path.normpath(name).lstrip("/")]


def test_root_kernel_and_skipped_entries_are_omitted(objects: ObjectStore) -> None:
    names = ["./", "proc/1", "sys", "dev/null", "skipped", "kept"]
    large = (member("skipped-large"), b"x" * 3_000_000)
    archive = archive_of(*(member(name) for name in names[:-1]), large, member("kept"))
    assert list(entries_of(archive, objects, skip=lambda path: path.startswith("/skipped"))) == ["/kept"]
    assert list(objects.digests()) == []


def test_names_of_links_and_fifos_are_separate(objects: ObjectStore) -> None:
    first = [member("l", tarfile.SYMTYPE, linkname="to"), member("p", tarfile.FIFOTYPE, mode=0o600)]
    names = [member("l2", tarfile.LNKTYPE, linkname="l"), member("p2", tarfile.LNKTYPE, linkname="p")]
    found = entries_of(archive_of(*first, *names), objects)
    assert found["/l2"] == found["/l"]
    assert found["/p2"] == found["/p"]
    assert (found["/l"].target, found["/p"].mode, found["/l"].link, found["/p"].link) == ("to", 0o600, None, None)


def test_times_have_nanoseconds(objects: ObjectStore) -> None:
    times = {"-1.5": -1_500_000_000, "1234567890.123456789": 1234567890_123456789, "1e30": 2**40 * 10**9}
    for text, expected in times.items():
        archive = archive_of(member("f", pax_headers={"mtime": text}))
        assert entries_of(archive, objects)["/f"].mtime_ns == expected


def test_only_portable_attributes_are_stored(objects: ObjectStore) -> None:
    names = ["user.a", "security.capability", "trusted.overlay.opaque", "user.overlay.opaque", "security.selinux"]
    archive = archive_of(member("f", pax_headers={f"SCHILY.xattr.{name}": "v" for name in names}))
    assert entries_of(archive, objects)["/f"].xattrs == {"user.a": b"v", "security.capability": b"v"}


HUGE = 2**40


def with_size(block: bytes, size: int) -> bytes:
    changed = block[:124] + (b"\x80" + size.to_bytes(11)) + block[136:]
    total = sum(changed[:148]) + 8 * 32 + sum(changed[156:512])
    return changed[:148] + b"%06o\0 " % total + changed[156:]


FILE = archive_of((member("f"), b"x" * 1000))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "up": (archive_of(member("../f")), "the path '../f', which is outside of the container"),
    "up within": (archive_of(member("a/../../f")), "outside of the container"),
    "nul": (archive_of(member("x", pax_headers={"path": "a\0b"})), "outside of the container"),
    "long name": (archive_of(member("f" * 256)), "too long"),
    "long path": (archive_of(member("f/" * 2500)), "too long"),
    "long attribute": (archive_of(member("f", pax_headers={"SCHILY.xattr.user.x": "x" * 2_000_000})), "header"),
    "twice": (archive_of(member("f"), member("./f")), "it contains '/f' twice"),
    "link to nothing": (archive_of(member("l", tarfile.LNKTYPE, linkname="f")), "'/l' is a hard link to '/f'"),
    "link to itself": (archive_of(member("l", tarfile.LNKTYPE, linkname="l")), "which is not a file in the archive"),
    "link to a directory": (
        archive_of(member("d", tarfile.DIRTYPE), member("l", tarfile.LNKTYPE, linkname="d")), "which is not a file"),
    "link out": (archive_of(member("l", tarfile.LNKTYPE, linkname="../x")), "outside of the container"),
    "link nowhere": (archive_of(member("l", tarfile.SYMTYPE, linkname="")), "an invalid target"),
    "owner": (archive_of(member("f", uid=2**32 - 1)), "the owner of '/f'"),
    "negative owner": (archive_of(member("f", gid=-5), form=tarfile.GNU_FORMAT), "the owner of '/f'"),
    "no time": (archive_of(member("f", pax_headers={"mtime": "NaN"})), "cannot be read"),
    "endless file": (with_size(FILE[:512], HUGE) + FILE[512:], "which is too large"),
    "endless directory": (with_size(archive_of(member("d", b"Z")), HUGE), "cannot be read"),
    "endless header": (with_size(archive_of(member("d", tarfile.XHDTYPE)), HUGE) + bytes(5_000_000), "header"),
    "endless name": (with_size(archive_of(member("d", tarfile.GNUTYPE_LONGNAME)), HUGE) + bytes(5_000_000), "header"),
    "empty": (b"", "empty"),
    "no archive": (b"hello world" * 100, "cannot be read"),
    "no end": (FILE[:1536], "ends early"),
    "cut content": (FILE[:700], "cannot be read"),
    "cut header": (FILE[:1536] + FILE[:100], "ends early, or is damaged"),
    "broken header": (FILE[:1536] + b"x" * 512, "ends early, or is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused(objects: ObjectStore, name: str) -> None:
    archive, message = HOSTILE[name]
    with pytest.raises(CaptureError, match="The archive of the container's files cannot be read: ") as error:
        entries_of(archive, objects)
    assert message in str(error.value)


class Endless:
    """Zeros, or what `start` says, without end; at most 100 MB of them, which nobody should want."""

    def __init__(self, start: bytes, then: Callable[[int], bytes]) -> None:
        self.start, self.then, self.read_bytes = start, then, 0

    def read(self, size: int, /) -> bytes:
        self.read_bytes += size
        assert self.read_bytes < 100_000_000
        data, self.start = self.start[:size], self.start[size:]
        return data or self.then(size)


def test_sparse_file_map_is_bounded(objects: ObjectStore) -> None:
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "f", "GNU.sparse.realsize": "5"}
    start = archive_of(member("f", pax_headers=headers))[: 3 * 512]
    start = start[:1024] + with_size(start[1024:], HUGE) + b"999999999999\n"
    stream = Endless(start, lambda size: b"0\n" * (size // 2))
    with pytest.raises(CaptureError, match="header of a file in it is too long"):
        read_tar(stream, objects, notes=[])
    assert stream.read_bytes < 3_000_000


def test_endless_archive_is_bounded(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    one = archive_of(member("d/f"))[:512]
    stream = Endless(b"", lambda size: one * (size // 512))
    with pytest.raises(CaptureError, match=r"it contains .* twice"):
        read_tar(stream, objects, notes=[])
    stream = Endless(b"", lambda size: archive_of(member("proc/x"))[:512] * (size // 512))
    monkeypatch.setattr(capture, "MAX_BYTES", -(2**29) + 1_000_000)
    with pytest.raises(CaptureError, match="it is too long"):
        read_tar(stream, objects, notes=[])


def test_archive_is_bounded(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = archive_of((member("a"), b"x" * 100), member("b", tarfile.LNKTYPE, linkname="a"))
    monkeypatch.setattr(capture, "MAX_ENTRIES", 2)
    monkeypatch.setattr(capture, "MAX_BYTES", 200)
    assert len(entries_of(archive, objects)) == 2
    for most, message in ((199, r"more than 199 bytes of files \(last read: '/b'\)"), (99, "'/a' has 100 bytes")):
        monkeypatch.setattr(capture, "MAX_BYTES", most)
        with pytest.raises(CaptureError, match=message):
            entries_of(archive, objects)
    monkeypatch.setattr(capture, "MAX_ENTRIES", 1)
    monkeypatch.setattr(capture, "MAX_BYTES", 200)
    with pytest.raises(CaptureError, match=r"more than 1 files \(last read: '/b'\)"):
        entries_of(archive, objects)


@pytest.mark.parametrize("offset", [0, CHUNK_BYTES - 5])
def test_file_with_a_secret_is_refused(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    monkeypatch.setenv("SERVICE_PASSWORD", SECRET)
    archive = archive_of((member("home/notes"), b"x" * offset + SECRET.encode() + b"y" * CHUNK_BYTES))
    with pytest.raises(CaptureError, match="'/home/notes' contains a secret: a protected value") as error:
        entries_of(archive, objects)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_archives_read_soundly_or_raise_snapshot_error(objects: ObjectStore, seed: int) -> None:
    chance = random.Random(seed)
    sound = archive_of(
        member("d", tarfile.DIRTYPE),
        (member("d/f", pax_headers={"SCHILY.xattr.user.a": "b", "mtime": "1.5"}), b"content" * 200),
        member("d/l", tarfile.LNKTYPE, linkname="d/f"),
        member("s", tarfile.SYMTYPE, linkname="é" * 200),
        form=chance.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    )
    sound = sound[: len(sound.rstrip(b"\0")) // 512 * 512 + 3 * 512]
    assert len(entries_of(sound, objects)) == 4
    refused = 0
    for _ in range(250):
        archive = bytearray(sound)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(archive))
            archive[at] = chance.choice(b"0123456789/.=\n\0\x80\xffxgLKSV")
            if chance.random() < 0.8:
                _mend_sum(archive, at // 512 * 512)
        try:
            found = entries_of(bytes(archive), objects)
        except CaptureError:
            refused += 1
        else:
            assert all(path.startswith("/") and "/../" not in f"{path}/" for path in found)
            assert all(len(entry.chunks) == -(-entry.size // CHUNK_BYTES) for entry in found.values())
    assert 0 < refused < 250


def _mend_sum(archive: bytearray, start: int) -> None:
    block = archive[start : start + 512]
    if len(block) == 512 and block[257:262] == b"ustar":
        archive[start + 148 : start + 156] = b"%06o\0 " % (sum(block[:148]) + 256 + sum(block[156:]))


def test_caller_file_remains_open(objects: ObjectStore) -> None:
    source, sink = os.pipe()
    with os.fdopen(source, "rb") as reader:
        with os.fdopen(sink, "wb") as writer:
            writer.write(archive_of(member("f")))
        assert list(read_tar(reader, objects, notes=[])) == ["/f"]
        assert not reader.closed
