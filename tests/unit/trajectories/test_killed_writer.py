"""Files of a killed process, and of a living one: read as they are."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ares_exp.records.results import Outcome
from ares_exp.trajectories import load
from ares_exp.trajectories.files.line_file import WriterLock, has_writer
from tests.unit.trajectories.chats import chat, write

WRITER = """
import sys
from pathlib import Path
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.trajectories.collectors.jsonl_collector import JsonlTrajectoryCollector
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


def test_reader_that_asks_does_not_keep_a_writer_from_its_lock(tmp_path: Path) -> None:
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
