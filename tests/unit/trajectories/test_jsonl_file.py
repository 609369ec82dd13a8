"""Episodes in JSON Lines files, and files of killed writers."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.results import Outcome
from ares_exp.trajectories import load
from ares_exp.trajectories.files.episode_file import dump_episode
from ares_exp.trajectories.files.line_file import WriterLock, has_writer
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord
from tests.examples import examples
from tests.unit.trajectories.chats import chat, read_episodes, salvaged, write
from tests.unit.trajectories.strategies import trajectories

GOLDEN = Path(__file__).parent / "golden" / "version_3.jsonl"


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episodes=st.lists(trajectories(), max_size=3, unique_by=lambda episode: episode.episode_id))
def test_interleaved_lines_are_assigned_to_their_episodes(tmp_path: Path, episodes: list[EpisodeTrajectory]) -> None:
    dumped = [dump_episode(episode, shared=True) for episode in episodes]
    mixed = [line for lines in zip_longest(*dumped) for line in lines if line is not None]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(mixed), encoding="utf-8", newline="")
    loaded = list(read_episodes(path))
    assert sorted(loaded, key=lambda e: e.episode_id) == sorted(episodes, key=lambda e: e.episode_id)


def two(tmp_path: Path) -> tuple[Path, list[str], EpisodeTrajectory]:
    [episode] = list(read_episodes(GOLDEN))
    lines = [*dump_episode(episode, shared=True), *dump_episode(replace(episode, episode_id="other"), shared=True)]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(lines))
    return path, lines, episode


def test_episode_is_readable_when_it_ends(tmp_path: Path) -> None:
    path, lines, episode = two(tmp_path)
    path.write_text("".join(lines[:8]))
    reading = read_episodes(path)
    assert next(reading) == episode
    unfinished = next(reading)
    assert (unfinished.episode_id, unfinished.outcome) == ("other", Outcome.LOST)
    assert unfinished.steps == episode.steps[:1]


def test_empty_lines_are_ignored(tmp_path: Path) -> None:
    """A writer puts one where it found a line that another thread was just writing."""
    path, lines, episode = two(tmp_path)
    path.write_text("\n".join(["", *lines, ""]))
    assert list(read_episodes(path)) == [episode, replace(episode, episode_id="other")]
    assert [stored.load() for stored in load(path)] == list(read_episodes(path))
    assert salvaged(path)[1] == []


def test_broken_line_loses_only_its_episode(tmp_path: Path) -> None:
    path, lines, episode = two(tmp_path)
    path.write_text("".join([*lines[:2], lines[2].replace('"step_type": "MID"', '"step_type": 3'), *lines[3:]]))
    with pytest.raises(TrajectoryFormatError, match=r"t\.jsonl at byte \d+ \(line 3\): expected `step_type`"):
        list(read_episodes(path))
    [whole, cut], problems = salvaged(path)
    assert whole == replace(episode, episode_id="other")
    assert cut.steps == episode.steps[:1]
    assert cut.outcome is Outcome.LOST
    assert len(problems) == 1


def test_torn_line_in_the_middle_is_reported(tmp_path: Path) -> None:
    path, lines, _ = two(tmp_path)
    path.write_text("".join([*lines[:8], lines[8][:40], "\n", *lines[:6]]))
    with pytest.raises(TrajectoryFormatError, match="line 9"):
        list(read_episodes(path))
    episodes, [problem] = salvaged(path)
    assert [one.num_steps for one in episodes] == [4, 4, 1]
    assert "line 9" in problem


def test_episode_missing_a_step_is_incomplete(tmp_path: Path) -> None:
    steps = [StepRecord(number, "MID", {"board": number}, None, 0.0, 1.0, 0.0) for number in range(4)]
    path = tmp_path / "t.jsonl"
    lines = list(dump_episode(replace(two(tmp_path)[2], steps=tuple(steps)), shared=True))
    path.write_text("".join([*lines[:2], *lines[3:]]))
    with pytest.raises(TrajectoryFormatError, match="expected 4 steps, got 3"):
        list(read_episodes(path))


def test_unfinished_episode_starts_over(tmp_path: Path) -> None:
    path, lines, episode = two(tmp_path)
    path.write_text("".join([*lines[:3], *lines[:6]]))
    assert list(read_episodes(path)) == [episode]


@pytest.mark.parametrize("line", [
    "x\n",
    "[]\n",
    "{}\n",
    '{"type": "start", "episode_id": 3}\n',
    '{"type": "start", "episode_id": "e"}\n',
    '{"type": "start", "episode_id": "e", "schema_version": 9}\n',
    '{"type": "start", "episode_id": "e", "schema_version": 2}\n',
    '{"type": "step", "episode_id": "never started"}\n',
    '{"type": "news", "episode_id": "e"}\n',
    "[" * 100_000 + "\n",
], ids=lambda line: line[:50])  # fmt: skip
def test_unknown_lines_are_reported(tmp_path: Path, line: str) -> None:
    path, lines, _ = two(tmp_path)
    path.write_text("".join([*lines, line]))
    with pytest.raises(TrajectoryFormatError, match=r"t\.jsonl at byte \d+ \(line 13\)"):
        list(read_episodes(path))
    assert len(salvaged(path)[0]) == 2


def test_invalid_utf8_is_reported(tmp_path: Path) -> None:
    path, lines, _ = two(tmp_path)
    path.write_bytes("".join(lines[:6]).encode() + b"\xff\n")
    with pytest.raises(TrajectoryFormatError, match="UTF-8"):
        list(read_episodes(path))
    assert len(salvaged(path)[0]) == 1
    with pytest.raises(TrajectoryFormatError, match="none"):
        list(read_episodes(tmp_path / "none.jsonl"))


WRITER = """
import sys
from pathlib import Path
from ares_exp.trajectories.collectors import JsonTrajectoryCollector
from ares_exp.trajectories.collectors import JsonlTrajectoryCollector
from tests.unit.trajectories.chats import chat

run, length = Path(sys.argv[1]), int(sys.argv[2])
collectors = {
    "json": JsonTrajectoryCollector(run / "trajectories"),
    "zstd": JsonTrajectoryCollector(run / "trajectories", compression="zstd"),
    "jsonl": JsonlTrajectoryCollector(run / "trajectories.jsonl"),
}
steps = chat(length=length).steps
handles = {name: one.begin_episode(task_name="fix-bug", episode_id=name) for name, one in collectors.items()}
for step in steps[:-1]:
    for name, collector in collectors.items():
        collector.record_step(step, episode=handles[name])
        print(name, step.step_index, flush=True)
sys.stdin.read()  # and then it is killed
"""


@contextmanager
def writing(run: Path, length: int, until: int) -> Iterator[dict[str, int]]:
    """Runs a process that records episodes; it is killed at the end.

    Yields:
        How many steps of each episode the process had recorded when it had reported `until` steps.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run), str(length)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    recorded: dict[str, int] = {}
    try:
        for _ in range(until):
            name, index = process.stdout.readline().split()
            recorded[name] = int(index) + 1
        yield recorded
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize("seed", range(2))
def test_episodes_of_killed_process_are_lost_but_readable(tmp_path: Path, seed: int) -> None:
    steps = chat(length=400).steps
    with writing(tmp_path, 400, until=random.Random(seed).randint(5, 900)) as recorded:
        pass  # it continues to record until the signal arrives
    episodes = load(tmp_path)
    assert {episode.episode_id for episode in episodes} == {"json", "zstd", "jsonl"}
    assert episodes.left_out == ()
    for stored in episodes:
        assert stored.outcome is Outcome.LOST
        assert stored.num_steps >= recorded[stored.episode_id]
        assert stored.load().steps == steps[: stored.num_steps]


def test_episodes_of_living_process_are_running(tmp_path: Path) -> None:
    write(tmp_path / "trajectories" / "old.json", chat("old"))
    with writing(tmp_path, 20, until=30) as recorded:
        running = load(tmp_path, partial=True).filter(where=lambda episode: episode.outcome is None)
        assert {episode.episode_id for episode in running} == {"json", "zstd", "jsonl"}
        assert all(episode.num_steps >= recorded[episode.episode_id] for episode in running)
        assert [episode.episode_id for episode in load(tmp_path)] == ["old"]


def test_reader_probing_the_lock_does_not_block_writers(tmp_path: Path) -> None:
    """A writer that starts while a reader asks whether there is one must not look dead from then on."""
    asking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_EX)
    done = threading.Timer(0.05, os.close, [asking])
    done.start()
    lock = WriterLock()
    lock.acquire(tmp_path, "a1")
    done.join()
    assert has_writer(tmp_path)
    lock.release("another")  # which never had it
    assert has_writer(tmp_path)
    lock.release("a1")
    assert not has_writer(tmp_path)


def test_writer_is_assumed_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("no locks")))
    WriterLock().acquire(tmp_path, "a1")
    assert has_writer(tmp_path)
