import contextlib
import io
import tarfile
from pathlib import Path

import pytest

from ares_exp.containers.archive import pack, unpack_directory, unpack_file
from ares_exp.errors import TransferError


def tar(*members: tuple[str, str | bytes, bytes]) -> io.BytesIO:
    """An archive of (name, content or link target, type)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if isinstance(content, bytes):
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            else:
                member.linkname = content
                archive.addfile(member)
    stream.seek(0)
    return stream


def file(name: str, content: bytes = b"x") -> tuple[str, bytes, bytes]:
    return name, content, tarfile.REGTYPE


def link(name: str, to: str) -> tuple[str, str, bytes]:
    return name, to, tarfile.SYMTYPE


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "outer" / "target"


def test_round_trip_of_a_directory(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run").write_bytes(b"#!\0")
    (source / "sub" / "run").chmod(0o755)
    (source / "up").symlink_to("sub/run")
    with pack(source, "unused") as packed:
        with tarfile.open(fileobj=packed) as archive:
            members = archive.getmembers()
        assert {(m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, "root", "root")}
        packed.seek(0)
        unpack_directory(packed, target)
    assert names(target) == ["sub", "sub/run", "up"]
    assert (target / "up").read_bytes() == b"#!\0"
    assert (target / "sub" / "run").stat().st_mode & 0o777 == 0o755


def test_round_trip_of_a_file_through_a_link(tmp_path: Path, target: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    with pack(tmp_path / "link", "renamed") as packed:
        with tarfile.open(fileobj=packed) as archive:
            assert archive.getnames() == ["renamed"]
        packed.seek(0)
        unpack_file(packed, target)
    assert target.read_text() == "text"


def test_root_of_the_names_can_be_removed(target: Path) -> None:
    archive = tar(("logs", "", tarfile.DIRTYPE), file("logs/a/b"), ("logs/hard", "logs/a/b", tarfile.LNKTYPE))
    unpack_directory(archive, target, strip_root=True)
    assert names(target) == ["a", "a/b", "hard"]


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/absolute", "a/.."])
def test_name_outside_the_target_is_refused(target: Path, name: str) -> None:
    with pytest.raises(TransferError, match="outside of the target directory"):
        unpack_directory(tar(file("fine"), file(name)), target)
    assert names(target.parent) == []


@pytest.mark.parametrize(
    "members",
    [
        [link("l", "/etc/passwd")],
        [link("l", "//etc/passwd")],
        [link("l", "../secret")],
        [link("d/l", "../../secret")],
        [link("l", "x/../../secret")],
        [link("self", "."), link("l", "self/../../secret")],
        [link("self", "."), link("self/l", "../secret")],
        [link("a", "d"), ("d", "", tarfile.DIRTYPE), link("a/../l", "x")],
        [("l", "", tarfile.FIFOTYPE)],
        [("l", "", tarfile.CHRTYPE)],
        [("l", "../secret", tarfile.LNKTYPE)],
        [link("l", "../secret"), ("hard", "l", tarfile.LNKTYPE)],
    ],
)
def test_unpacked_files_are_inside_the_target(target: Path, members: list[tuple[str, str | bytes, bytes]]) -> None:
    target.parent.mkdir(parents=True)
    (target.parent / "secret").write_text("host")
    with contextlib.suppress(TransferError):
        unpack_directory(tar(*members, file("after")), target)
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target), path
        assert path.is_file() or path.is_dir() or path.is_symlink(), path
        assert path.is_dir() or not path.exists() or path.read_text() != "host"


def test_one_warning_lists_all_omitted_entries(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipes: list[tuple[str, str | bytes, bytes]] = [(f"pipe{number}", "", tarfile.FIFOTYPE) for number in range(9)]
    unpack_directory(tar(*pipes, link("out", "/etc"), file("kept")), target)
    assert names(target) == ["kept"]
    [record] = caplog.records
    assert "special file or link 'pipe0'; special" in record.getMessage()
    assert record.getMessage().endswith("'pipe4'; and 5 more.")


def test_internal_links_are_preserved(target: Path) -> None:
    unpack_directory(
        tar(file("a/b/file"), link("a/b/up", "../../a/b/file"), link("here", "./a"), link("self", ".")), target
    )
    assert (target / "a" / "b" / "up").read_bytes() == b"x"
    assert (target / "here" / "b" / "file").read_bytes() == b"x"
    assert (target / "self").readlink() == Path()


def test_existing_files_are_replaced(tmp_path: Path, target: Path) -> None:
    (tmp_path / "host").write_text("untouched")
    target.mkdir(parents=True)
    (target / "a").symlink_to(tmp_path / "host")
    (target / "b").mkdir()
    (target / "b" / "old").write_text("old")
    (target / "c").write_text("stays")
    unpack_directory(tar(file("a", b"new"), file("b", b"new"), link("d", "c")), target)
    assert (tmp_path / "host").read_text() == "untouched"
    assert ((target / "a").read_text(), (target / "b").read_text(), (target / "d").read_text()) == (
        "new",
        "new",
        "stays",
    )


def test_modes_and_times_are_preserved(target: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, mode, time in (("run", 0o6777, 1_000_000_000.5), ("text", 0o022, 1e30)):
            member = tarfile.TarInfo(name)
            member.mode, member.mtime = mode, time  # type: ignore[assignment]  # PAX has fractions
            archive.addfile(member)
    stream.seek(0)
    unpack_directory(stream, target)
    assert (target / "run").stat().st_mtime == 1_000_000_000.5
    assert [(target / name).stat().st_mode & 0o7777 for name in ("run", "text")] == [0o755, 0o600]


def test_bounds_are_enforced(target: Path) -> None:
    with pytest.raises(TransferError, match="the limit of 10 bytes"):
        unpack_directory(tar(file("a", b"12345"), file("b", b"123456")), target, max_bytes=10)
    with pytest.raises(TransferError, match="the limit of 2 files"):
        unpack_directory(tar(file("a"), file("b"), file("c")), target, max_members=2)
    with pytest.raises(TransferError, match="11 bytes exceed the limit 10"):
        unpack_file(tar(file("a", b"12345678901")), target / "x", max_bytes=10)
    assert not (target / "x").exists()


@pytest.mark.parametrize("archive", [b"", b"no archive at all" * 100, tar(file("a", b"y" * 5000)).getvalue()[:2000]])
def test_broken_archives_are_refused(target: Path, archive: bytes) -> None:
    with pytest.raises(TransferError):
        unpack_file(io.BytesIO(archive), target)
    assert not target.exists()
    assert names(target.parent) == []


def test_truncated_archive_leaves_target_unchanged(target: Path) -> None:
    target.mkdir(parents=True)
    (target / "a").write_text("old")
    whole = tar(file("a", b"new"), file("b", b"y" * 5000)).getvalue()
    with pytest.raises(TransferError):
        unpack_directory(io.BytesIO(whole[:4000]), target)
    assert names(target) == ["a"]
    assert (target / "a").read_text() == "old"
    unpack_directory(io.BytesIO(whole), target)
    assert names(target) == ["a", "b"]
    assert (target / "a").read_text() == "new"


def test_directories_are_merged_and_links_replaced(tmp_path: Path, target: Path) -> None:
    (target / "real").mkdir(parents=True)
    (target / "real" / "stays").touch()
    (tmp_path / "host").mkdir()
    (target / "linked").symlink_to(tmp_path / "host")
    unpack_directory(tar(file("real/new"), file("linked/new"), link("sub/up", "../real")), target)
    assert names(tmp_path / "host") == []
    assert names(target) == ["linked", "linked/new", "real", "real/new", "real/stays", "sub", "sub/up"]


def test_archive_without_regular_file_is_refused(target: Path) -> None:
    with pytest.raises(TransferError, match="expected a regular file"):
        unpack_file(tar(link("a", "/etc/passwd")), target)
