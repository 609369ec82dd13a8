import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp.containers.filesystem import delta_encoding
from ares_exp.containers.filesystem.delta import Delta, Entry, differences, sorted_by_path
from ares_exp.containers.filesystem.delta_encoding import decode, encode, get_delta, put_delta
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.errors import CaptureError, SnapshotMetadataError, SnapshotVersionError, UnsafeSnapshotError
from tests.examples import examples

BASE = "sha256:" + "b" * 64
DIGEST = "a" * 64
HEADER = {"version": 1, "base": BASE, "notes": []}
D = {"path": "/d", "kind": "directory"}

names = (
    st.binary(min_size=1, max_size=12)
    .filter(lambda name: name not in (b".", b"..") and not set(name) & {0, ord("/")})
    .map(os.fsdecode)
)
ids = st.integers(0, 2**32 - 2)
times = st.integers(-(10**21), 10**21)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
attributes = st.dictionaries(names.map(lambda name: f"user.{name}"), st.binary(max_size=30), max_size=2).filter(
    lambda found: not any(name.startswith("user.overlay.") for name in found)
)
sizes = st.one_of(st.just(0), st.integers(1, 5 * CHUNK_BYTES), st.just(400 * CHUNK_BYTES))
modes = st.integers(0, 0o7777)


@st.composite
def leaves(draw: st.DrawFn) -> Entry:
    kind = draw(st.sampled_from(["file", "symlink", "fifo", "whiteout"]))
    if kind == "whiteout":
        return Entry("whiteout")
    entry = Entry(kind, uid=draw(ids), gid=draw(ids), mtime_ns=draw(times))
    if kind == "symlink":
        return replace(entry, target=draw(names))
    entry = replace(entry, mode=draw(modes))
    if kind == "fifo":
        return entry
    size = draw(sizes)
    few = draw(st.lists(st.none() | digests, min_size=1, max_size=7))
    chunks = [few[number % len(few)] for number in range(-(-size // CHUNK_BYTES))]
    return replace(entry, size=size, chunks=tuple(chunks), xattrs=draw(attributes))


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    entries: dict[str, Entry] = {}
    directories = [""]
    for name in draw(st.lists(names, max_size=12)):
        path = f"{draw(st.sampled_from(directories))}/{name}"
        if path in entries or path in ("/dev", "/proc", "/sys"):
            continue
        if draw(st.booleans()):
            directories.append(path)
            metadata = {"mode": draw(modes), "uid": draw(ids), "mtime_ns": draw(times), "xattrs": draw(attributes)}
            entries[path] = Entry("directory", opaque=draw(st.booleans()), **metadata)
        else:
            entries[path] = draw(leaves())
    files = [path for path, entry in entries.items() if entry.kind == "file"]
    if len(files) > 1 and draw(st.booleans()):
        entries.update(dict.fromkeys(files[:2], replace(entries[files[0]], link=draw(st.integers(0, 9)))))
    notes = draw(st.lists(st.text(max_size=50), max_size=3))
    return Delta(BASE, sorted_by_path(entries), tuple(notes))


def lines_of(*values: Any, header: Any = HEADER) -> list[bytes]:
    return [json.dumps(value).encode() for value in (header, *values)]


@given(deltas())
@examples(33)
def test_delta_round_trips(delta: Delta) -> None:
    lines = list(encode(delta))
    found = decode(lines)
    assert differences(delta, found) == []
    assert found.notes == delta.notes
    assert list(found.entries) == list(delta.entries)
    assert list(encode(found)) == lines, "one state has one encoding, whatever its links were numbered"


@given(delta=deltas(), seed=st.integers(0, 2**32))
@examples(50, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_lines_decode_soundly_or_raise_snapshot_error(delta: Delta, seed: int) -> None:
    chance = random.Random(seed)
    lines = [bytearray(line) for line in encode(delta)]
    for _ in range(chance.randint(1, 4)):
        line = chance.choice(lines)
        match chance.randrange(6):
            case 0:
                line[chance.randrange(len(line))] = chance.randrange(256)
            case 1:
                at = chance.randrange(len(line))
                line[at:at] = chance.choice(
                    [b"-", b"9" * 25, b"null", b"[", b"{", b'"', b"/..", b"\\u0000", b"\\ud800", b"1e999"]
                )
            case 2:
                lines.insert(chance.randrange(len(lines) + 1), bytearray(chance.choice(lines)))
            case 3:
                chance.shuffle(lines)
            case 4:
                value = json.loads(lines[-1]) if lines[-1:] and lines[-1][:1] == b"{" and _is_json(lines[-1]) else {}
                key = chance.choice(
                    ["path", "kind", "mode", "chunks", "size", "xattrs", "link", "target", "opaque", "x"]
                )
                value[key] = chance.choice(
                    [None, -1, 2**70, "", "x", [], {}, [[]], True, 1.5, "/a/../b", "block", [2**60]]
                )
                lines[-1] = bytearray(json.dumps(value).encode())
            case 5:
                del line[chance.randrange(len(line)) :]
                line += b" "
    mutated = [bytes(line) for line in lines]
    try:
        found = decode(mutated)
    except SnapshotMetadataError:
        with pytest.raises(SnapshotMetadataError) as error:
            decode(mutated)
        assert len(str(error.value)) < 2000
        assert str(error.value).isprintable()
    else:
        assert decode(encode(found)).entries == dict(found.entries)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


F = {"path": "/f", "kind": "file"}
UNSAFE = [
    ([{**F, "path": "f"}], "absolute path"),
    ([{**F, "path": "/"}], "absolute path"),
    ([D, {**F, "path": "/d/"}], "absolute path"),
    ([D, {**F, "path": "/d//f"}], "absolute path"),
    ([D, {**F, "path": "/d/../f"}], "absolute path"),
    ([{**F, "path": "/.."}], "absolute path"),
    ([{**F, "path": "/f\0"}], "absolute path"),
    ([{**F, "path": "/" + "f" * 256}], "that file systems allow"),
    ([D, {**F, "path": "/d" + "/f" * 2100}], "that file systems allow"),
    ([{**D, "path": "/dev"}], "/dev, /proc or /sys"),
    ([{**D, "path": "/proc"}, {**F, "path": "/proc/x"}], "/dev, /proc or /sys"),
    ([{"path": "/sys", "kind": "whiteout"}], "/dev, /proc or /sys"),
    ([{**D, "path": "/sys/kernel"}], "/dev, /proc or /sys"),
    ([F, F], "one entry per path"),
    ([{**F, "path": "/a/f"}], "earlier entry for the parent directory"),
    ([{**F, "path": "/d/f"}, D], "earlier entry for the parent directory"),
    ([{**D, "kind": "symlink", "target": "/etc"}, {**F, "path": "/d/f"}], "parent of this path is not a directory"),
    ([{**D, "kind": "whiteout"}, {**F, "path": "/d/f"}], "parent of this path is not a directory"),
    ([{**D, "kind": "file"}, {**F, "path": "/d/f"}], "parent of this path is not a directory"),
    ([{**F, "mode": 0o10000}], "mode to be from 0 to 4095"),
    ([{**F, "mode": -1}], "mode to be from"),
    ([{**F, "uid": 2**32 - 1}], "uid to be from"),
    ([{**F, "gid": -1}], "gid to be from"),
    ([{**F, "mtime_ns": 10**30}], "mtime_ns to be from"),
    ([{**F, "size": -1}], "size to be from"),
    ([{**F, "size": 2**34 + 1}], "size to be from"),
    ([{**F, "size": 1}], "1 chunks for 1 bytes, found 0"),
    ([{**F, "size": CHUNK_BYTES + 1, "chunks": [DIGEST]}], "2 chunks for 131073 bytes, found 1"),
    ([{**F, "size": 1, "chunks": [DIGEST, DIGEST]}], "more chunks than its size allows"),
    ([{**F, "chunks": [DIGEST]}], "more chunks than its size allows"),
    ([{**F, "size": 1, "chunks": [2]}], "chunks of zeros"),
    ([{**F, "size": 1, "chunks": [2**60]}], "chunks of zeros"),
    ([{**F, "size": 1, "chunks": [0]}], "chunks of zeros"),
    ([{**F, "size": 1, "chunks": [1]}, [1]], "chunks of zeros"),
    ([{**F, "xattrs": {"trusted.overlay.opaque": ""}}], "only the attributes user"),
    ([{**F, "xattrs": {"user.overlay.opaque": "79"}}], "only the attributes user"),
    ([{**F, "xattrs": {"security.selinux": ""}}], "only the attributes user"),
    ([{**F, "xattrs": {"system.posix_acl_access": ""}}], "only the attributes user"),
    ([{**F, "xattrs": {"user.a": "00" * 70_000}}], "bytes of attributes"),
    ([{**F, "kind": "block"}], "devices and sockets are not supported"),
    ([{**F, "kind": "socket"}], "devices and sockets are not supported"),
    ([{**F, "kind": "symlink", "target": ""}], "that file systems allow"),
    ([{**F, "kind": "symlink", "target": "a\0b"}], "that file systems allow"),
    ([{**F, "link": 1}, {**F, "path": "/g", "link": 1, "mode": 0o4755}], "same entry for all hard links"),
]  # fmt: skip
MALFORMED = [
    ([5], "expected an entry, found: '5'"),
    ([None], "expected an entry, found: 'None'"),
    ([[DIGEST]], "an entry before its list of chunks, found"),
    ([D, [DIGEST]], "an entry before its list of chunks, found"),
    ([{"kind": "file"}], "expected a path, found: 'None'"),
    ([{**F, "kind": "hologram"}], "kind to be one of directory, fifo, file, symlink, whiteout, found: 'hologram'"),
    ([{"path": "/f"}], "expected kind to be one of .*, found: 'None'"),
    ([{**F, "device": [1, 3]}], "a file has no such field: 'device'"),
    ([{**D, "kind": "whiteout", "mode": 1}], "a whiteout has no such field: 'mode'"),
    ([{**D, "link": 1}], "a directory has no such field: 'link'"),
    ([{**F, "mode": True}], "mode to be a whole number"),
    ([{**F, "size": 1.0}], "size to be a whole number"),
    ([{**D, "opaque": 1}], "opaque to be true or false"),
    ([{**F, "path": "/\udcc3\udca9"}], "a non-canonical encoding"),
    ([{**F, "path": "/\ud800"}], "found invalid text"),
    ([{**F, "kind": "symlink"}], "the target of a link"),
    ([{**F, "size": 1, "chunks": ["x"]}], "sha256 of a chunk"),
    ([{**F, "size": 1, "chunks": [None]}], "whole number"),
    ([{**F, "size": 1, "chunks": "x"}], "a list of chunks"),
    ([{**F, "xattrs": ["user.a"]}], "an object of attributes"),
    ([{**F, "xattrs": {"user.a": "zz"}}], "hexadecimal"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), UNSAFE)
def test_entry_outside_the_capture_format_is_unsafe(values: list[Any], message: str) -> None:
    with pytest.raises(UnsafeSnapshotError, match=message):
        decode(lines_of(*values))


@pytest.mark.parametrize(("values", "message"), MALFORMED)
def test_invalid_entry_is_malformed(values: list[Any], message: str) -> None:
    with pytest.raises(SnapshotMetadataError, match=message) as error:
        decode(lines_of(*values))
    assert not isinstance(error.value, UnsafeSnapshotError)


def test_errors_name_the_line() -> None:
    with pytest.raises(
        UnsafeSnapshotError, match=r"The list of changed files cannot be used \(line 3\): expected mode"
    ):
        decode(lines_of(D, {**F, "mode": 99999}))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "a first line with a version"),
        ({}, "a first line with a version"),
        ({**HEADER, "base": None}, "a base such as"),
        ({**HEADER, "base": "no colon"}, "a base such as"),
        ({**HEADER, "base": "sha256:\n"}, "a base such as"),
        ({**HEADER, "notes": "x"}, "at most 1000 notes"),
        ({**HEADER, "notes": [1]}, "at most 1000 notes"),
        ({**HEADER, "notes": ["x"] * 1001}, "at most 1000 notes"),
    ],
)
def test_first_line_is_checked(header: Any, message: str) -> None:
    with pytest.raises(SnapshotMetadataError, match=message):
        decode(lines_of(header=header))


def test_newer_version_is_reported() -> None:
    with pytest.raises(SnapshotVersionError, match="expected version 1, found 2"):
        decode(lines_of(header={**HEADER, "version": 2, "future": 1}))


@pytest.mark.parametrize("line", [b"", b"{", b"[" * 100_000, b"\xff", b"1" * 10_000, b'{"a":NaN', b"{}{}"])
def test_invalid_json_is_malformed(line: bytes) -> None:
    with pytest.raises(SnapshotMetadataError, match=r"line 2\): expected JSON"):
        decode([*lines_of(), line])


def test_empty_delta_is_rejected() -> None:
    with pytest.raises(SnapshotMetadataError, match="found none"):
        decode([])


def test_delta_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = {**F, "size": 600, "chunks": [DIGEST]}
    lines = lines_of(file, {**file, "path": "/g"})
    monkeypatch.setattr(delta_encoding, "MAX_ENTRIES", 2)
    monkeypatch.setattr(delta_encoding, "MAX_BYTES", 1200)
    assert len(decode(lines).entries) == 2
    monkeypatch.setattr(delta_encoding, "MAX_ENTRIES", 1)
    with pytest.raises(UnsafeSnapshotError, match="more than 1 entries"):
        decode(lines)
    monkeypatch.setattr(delta_encoding, "MAX_BYTES", 1199)
    with pytest.raises(UnsafeSnapshotError, match=r"line 3\): expected size to be from 0 to 599"):
        decode(lines)


def test_decoding_preserves_privileges() -> None:
    file = {**F, "mode": 0o6755, "xattrs": {"security.capability": "0100", "user.x": ""}}
    entry = decode(lines_of(file)).entries["/f"]
    assert entry.mode == 0o6755
    assert entry.xattrs == {"security.capability": b"\x01\x00", "user.x": b""}


def test_small_change_changes_few_objects(tmp_path: Path) -> None:
    objects = ObjectStore(tmp_path)
    big = 2**30 // CHUNK_BYTES
    entries = {"/d": Entry("directory")} | {f"/d/{n:05}": Entry("file", mtime_ns=n) for n in range(20_000)}
    entries["/d/big"] = Entry("file", size=2**30, chunks=tuple(f"{n:064x}" for n in range(big)))
    delta = Delta(BASE, entries)
    before = put_delta(delta, objects)
    chunks = list(entries["/d/big"].chunks)
    chunks[big // 2] = "f" * 64
    changed = {
        **entries,
        "/d/05000": Entry("file", mtime_ns=1),
        "/d/new": Entry("fifo"),
        "/d/big": replace(entries["/d/big"], chunks=tuple(chunks)),
    }
    del changed["/d/10000"]
    after = put_delta(replace(delta, entries=changed), objects)
    new = set(after) - set(before)
    assert len(before) > 100
    assert len(new) <= 4
    assert sum(map(objects.size, new)) < 100_000
    assert get_delta(objects, after).entries == changed


def test_name_with_a_secret_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "sécret-secret-1")
    with pytest.raises(CaptureError):
        put_delta(Delta(BASE, {"/sécret-secret-1": Entry("file")}), ObjectStore(tmp_path))
    assert not any(b"secret" in ObjectStore(tmp_path).get(digest) for digest in ObjectStore(tmp_path).digests())


def test_differences_are_listed_by_path() -> None:
    one = Delta("x:1", {"/a": Entry("file", mode=1), "/b": Entry("fifo"), "/l": Entry("file", link=1)})
    assert differences(one, one) == []
    other = Delta("x:2", {"/a": Entry("file", mode=2), "/c": Entry("fifo"), "/l": Entry("file")})
    assert differences(one, other) == [
        "base: x:1 != x:2",
        "'/a': mode: 1 != 2",
        "'/b': only in the first",
        "'/c': only in the second",
        "'/l': link: ('/l',) != None",
    ]
