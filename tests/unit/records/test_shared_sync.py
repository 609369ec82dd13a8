from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ares_exp.records import shared_sync
from ares_exp.records.shared_sync import SharedSync
from tests.leaks import wait_until


class SlowDisk:
    """Syncs only when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.syncs = 0
        monkeypatch.setattr(shared_sync, "sync_to_disk", self._sync)

    def _sync(self, path: Path) -> None:
        self.begun.release()
        self.let.acquire()
        self.syncs += 1


def test_one_sync_serves_all_that_asked_during_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, shared = SlowDisk(monkeypatch), SharedSync(tmp_path)
    with ThreadPoolExecutor(20) as threads:
        first = threads.submit(shared.sync)
        disk.begun.acquire()
        others = [threads.submit(shared.sync) for _ in range(19)]
        assert wait_until(lambda: shared._asked == 20)
        disk.let.release()
        first.result(30)
        disk.begun.acquire()
        assert not any(other.done() for other in others)  # the first sync may have begun before they had written
        disk.let.release()
        for other in others:
            other.result(30)
    assert disk.syncs == 2


def test_a_sync_that_failed_serves_nobody(tmp_path: Path) -> None:
    shared = SharedSync(tmp_path / "later")
    with pytest.raises(FileNotFoundError):
        shared.sync()
    (tmp_path / "later").write_text("here")
    shared.sync()
