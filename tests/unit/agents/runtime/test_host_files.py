from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.agents.runtime import encoding as host_files
from ares_exp.agents.runtime.encoding import HostFiles, digest_of
from ares_exp.errors import SnapshotUnsupportedError


def make_tree(root: Path) -> Path:
    (root / "inner" / "deep").mkdir(parents=True)
    (root / "a").write_bytes(b"\x00\xff")
    (root / "inner" / "deep" / "run.sh").write_text("#!/bin/sh\n")
    (root / "inner" / "deep" / "run.sh").chmod(0o750)
    (root / "link").symlink_to("a")
    (root / "empty").mkdir()
    return root


def test_a_file_and_a_directory_are_made_again(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    HostFiles.read(tree).write(tmp_path / "again")
    assert HostFiles.read(tmp_path / "again") == HostFiles.read(tree)
    assert (tmp_path / "again" / "inner" / "deep" / "run.sh").stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["a", "inner"]
    HostFiles.read(tree / "a").write(tmp_path / "new" / "copy")
    assert (tmp_path / "new" / "copy").read_bytes() == b"\x00\xff"


def test_too_much_is_not_kept_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path / "tree")
    monkeypatch.setattr(host_files, "MAX_BYTES", 5)
    found = HostFiles.read(tree)
    assert found.files is None
    for use in (found.to_keep, lambda: found.write(tmp_path / "again")):
        with pytest.raises(SnapshotUnsupportedError, match="more than 5 bytes"):
            use()
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["../out", "/tmp/ares-exp-out", "inner/../../out", ".."])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SnapshotUnsupportedError, match="leads out"):
        HostFiles(((name, 0o644, b"x"),)).write(tmp_path / "here")
    assert not (tmp_path / "out").exists()


def test_a_link_in_the_way_is_not_followed_out(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path)
    with pytest.raises(SnapshotUnsupportedError, match="leads out"):
        HostFiles((("link/out", 0o644, b"x"),)).write(tmp_path / "here")
    assert not (tmp_path / "out").exists()


def test_a_digest_tells_names_and_contents_apart(tmp_path: Path) -> None:
    one, other = make_tree(tmp_path / "one"), make_tree(tmp_path / "other")
    assert digest_of(one) == digest_of(other)
    (other / "a").write_bytes(b"changed")
    assert digest_of(one) != digest_of(other)
    (one / "a").write_bytes(b"changed")
    (one / "a").rename(one / "b")
    assert digest_of(one) != digest_of(other)
    assert digest_of(one / "b") == digest_of(other / "a")
