"""Files with one record: whatever is in them, an error tells it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_json_object, read_record, read_yaml

LAUGHS = "- &n0 [x, x]\n" + "".join(f"- &n{n + 1} [*n{n}, *n{n}]\n" for n in range(40))


def test_what_is_in_them(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text('{"a": [1]}')
    assert read_record(path, max_bytes=10) == b'{"a": [1]}'
    assert read_json_object(path, max_bytes=10) == read_yaml(path) == {"a": [1]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b" " * 150_000 + b"{}", "at most 150,001 bytes", id="too long"),
        pytest.param(b"[]", "an object, got a list", id="list"),
        pytest.param(b"null", "an object, got a NoneType", id="null"),
        pytest.param(b"", "expected JSON", id="empty"),
        pytest.param(b'{"a"', "expected JSON", id="torn"),
        pytest.param(b"\xff", "expected JSON", id="no text"),
        pytest.param(b"[" * 100_000, "expected JSON", id="deep"),
        pytest.param(b"9" * 100_000, "expected JSON", id="endless number"),
    ],
)
def test_what_is_no_json_object(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "record").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"record is broken: .*{expected}") as caught:
        read_json_object(tmp_path / "record", max_bytes=150_001)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[", id="torn"),
        pytest.param("- !!python/object/apply:os.system ['exit 3']\n", id="object"),
        pytest.param("x" * (4 * 2**20 + 1), id="huge"),
        pytest.param(LAUGHS, id="laughs"),
        pytest.param("[" * 5000, id="deep"),
        pytest.param("\0", id="nul"),
    ],
)
def test_what_is_no_yaml(tmp_path: Path, text: str) -> None:
    (tmp_path / "record").write_text(text)
    with pytest.raises(ConfigError, match="record is broken") as caught:
        read_yaml(tmp_path / "record")
    assert len(str(caught.value)) < 600


def test_where_a_file_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "record").write_text("a: 1\nb: [\nc: 2\n")
    with pytest.raises(ConfigError, match=r"^.*line 2, column 4.*$"):
        read_yaml(tmp_path / "record")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_record, read_json_object, read_yaml):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "missing")
        with pytest.raises(OSError, match="regular file"):
            read(tmp_path / "pipe")
