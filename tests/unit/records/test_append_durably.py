"""Durable appends of many threads: gathered, each with its own outcome."""

from __future__ import annotations

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ares_exp.records import run_dir
from ares_exp.records.run_dir import append_durably
from tests.leaks import wait_until


class SlowDisk:
    """Syncs only when a test lets it.

    Attributes:
        started: Released when a sync starts.
        may_end: Acquired by each sync.
        synced: Names of the synced files and folders, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.synced: list[str] = []
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        self.started.release()
        assert self.may_end.acquire(timeout=30)
        self.synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)


def test_texts_that_arrive_during_a_sync_share_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    (tmp_path / "rows").touch()
    with ThreadPoolExecutor(20) as threads:
        first = threads.submit(append_durably, tmp_path / "rows", "0\n")
        assert disk.started.acquire(timeout=30)
        others = [threads.submit(append_durably, tmp_path / "rows", f"{number}\n") for number in range(1, 15)]
        others += [
            threads.submit(append_durably, tmp_path / f"new {number}", "new", flags=os.O_CREAT, is_new=True)
            for number in range(5)
        ]
        assert wait_until(lambda: len(run_dir._arrived) == 19)
        disk.may_end.release()
        first.result(30)
        assert disk.started.acquire(timeout=30)
        assert not any(other.done() for other in others)  # the first sync may have started before they were written
        disk.may_end.release(20)
        for other in others:
            other.result(30)
    assert disk.synced[:2] == ["rows", "rows"]
    assert sorted(disk.synced[2:]) == sorted([*(f"new {number}" for number in range(5)), tmp_path.name])
    assert sorted((tmp_path / "rows").read_text().split(), key=int) == [str(number) for number in range(15)]


def test_failure_belongs_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(append_durably, tmp_path / "a", "1", flags=os.O_CREAT)
        assert disk.started.acquire(timeout=30)
        missing = threads.submit(append_durably, tmp_path / "missing", "2")
        good = threads.submit(append_durably, tmp_path / "a", "3")
        assert wait_until(lambda: len(run_dir._arrived) == 2)
        disk.may_end.release(2)
        first.result(30)
        good.result(30)
        with pytest.raises(FileNotFoundError, match="missing"):
            missing.result(30)
    assert (tmp_path / "a").read_text() == "13"


def test_text_that_cannot_be_synced_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    path = tmp_path / "rows"
    append_durably(path, "whole\n", flags=os.O_CREAT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            append_durably(path, "lost\n")
    append_durably(path, "again\n")
    assert path.read_text() == "whole\nagain\n"


def test_interrupted_sync_fails_texts_that_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, waiting = threading.Event(), threading.Event()

    def interrupt(descriptor: int, really: Any = os.fsync) -> None:
        if not started.is_set():
            started.set()
            assert waiting.wait(30)
            raise KeyboardInterrupt
        really(descriptor)

    monkeypatch.setattr(os, "fsync", interrupt)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(append_durably, tmp_path / "a", "1", flags=os.O_CREAT)
        assert started.wait(30)
        second = threads.submit(append_durably, tmp_path / "b", "2", flags=os.O_CREAT)
        assert wait_until(lambda: len(run_dir._arrived) == 1)
        waiting.set()
        with pytest.raises(KeyboardInterrupt):
            first.result(30)
        second.result(30)
    assert (tmp_path / "b").read_text() == "2"


def test_name_of_file_in_working_directory_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    append_durably("rows", "whole\n", flags=os.O_CREAT, is_new=True)
    assert Path("rows").read_text() == "whole\n"


def test_full_disk_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    append_durably(path, "whole\n", flags=os.O_CREAT)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="rows"):
            append_durably(path, "too long for it\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "whole\n"
