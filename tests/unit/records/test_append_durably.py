"""Durable appends, and calls that gather items."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from ares_exp.records.run_dir import GatheredCalls, append_durably, syncing_together


def fail(descriptor: int) -> None:
    raise OSError(5, "Input/output error")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the synced files and folders, in order."""
    names: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda at: names.append(Path(f"/proc/self/fd/{at}").readlink().name))
    return names


def test_append_syncs_the_file_and_a_new_name(tmp_path: Path, synced: list[str]) -> None:
    append_durably(tmp_path / "rows", "1\n", flags=os.O_CREAT, is_new=True)
    append_durably(tmp_path / "rows", "2\n")
    assert synced == ["rows", tmp_path.name, "rows"]


def test_name_of_file_in_working_directory_is_synced(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    append_durably("rows", "whole\n", flags=os.O_CREAT, is_new=True)
    assert synced == ["rows", tmp_path.name]


def test_texts_of_a_group_are_synced_once_per_file(tmp_path: Path, synced: list[str]) -> None:
    with syncing_together():
        for number in range(3):
            append_durably(tmp_path / f"new {number}", "new", flags=os.O_CREAT, is_new=True)
            append_durably(tmp_path / "rows", f"{number}\n", flags=os.O_CREAT)
        assert not synced
    assert sorted(synced) == sorted(["new 0", "new 1", "new 2", "rows", tmp_path.name])
    append_durably(tmp_path / "rows", "3\n")
    assert synced[-1] == "rows"


def test_failed_sync_of_a_group_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"), syncing_together():
        append_durably(tmp_path / "rows", "1\n", flags=os.O_CREAT)


def test_text_that_cannot_be_synced_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    append_durably(path, "whole\n", flags=os.O_CREAT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            append_durably(path, "lost\n")
    append_durably(path, "again\n")
    assert path.read_text() == "whole\nagain\n"


async def test_items_that_arrive_during_a_call_share_the_next() -> None:
    taken: list[Sequence[int]] = []
    loop, started, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def take(items: Sequence[int]) -> None:
        taken.append(items)
        loop.call_soon_threadsafe(started.set)
        assert may_end.wait(30)
        if 1 in items:
            raise OSError("no")

    calls = GatheredCalls(take)
    first = calls.put(0)
    async with asyncio.timeout(30):
        await started.wait()
    others = [calls.put(number) for number in range(1, 5)]
    may_end.set()
    await first
    found = await asyncio.gather(*others, return_exceptions=True)
    assert taken == [[0], [1, 2, 3, 4]]
    assert [type(one) for one in found] == [OSError] * 4
