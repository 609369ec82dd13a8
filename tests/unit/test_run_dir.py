import json
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.run_dir import RunDir, append_line, write_atomically


def test_a_directory_is_claimed_once(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a" / "b")
    run_dir.claim()
    assert run_dir.episodes.read_text() == ""
    with pytest.raises(ConfigError, match="holds another run"):
        RunDir(tmp_path / "a" / "b").claim()


def test_a_place_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run directory"):
        RunDir(tmp_path / "file" / "run").claim()


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["x.json"]


def test_lines_are_appended(tmp_path: Path) -> None:
    for number in range(3):
        append_line(tmp_path / "x.jsonl", {"n": number, "text": "ä\n"})
    assert [json.loads(line)["n"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_discarding_touches_only_what_a_refused_run_wrote(tmp_path: Path) -> None:
    refused = tmp_path / "outputs" / "default" / "now"
    (refused / ".hydra").mkdir(parents=True)
    (refused / ".hydra" / "config.yaml").write_text("")
    RunDir(refused).discard()
    assert not (tmp_path / "outputs").exists()
    (refused / ".hydra").mkdir(parents=True)
    (refused / "mine.txt").write_text("")
    RunDir(refused).discard()
    assert (refused / "mine.txt").exists()
    started = RunDir(tmp_path / "started")
    started.claim()
    started.discard()
    assert started.episodes.exists()
