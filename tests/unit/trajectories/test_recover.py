"""`python -m ares_exp.trajectories recover`: after SIGKILL, beside a living writer, and of broken files."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp.cli.words import run_word
from ares_exp.records.results import Outcome
from ares_exp.trajectories import load
from ares_exp.trajectories.commands.recover import RecoveryAction, recover
from ares_exp.trajectories.files.episode_file import dump_episode, load_episode
from ares_exp.trajectories.files.jsonl_file import load_jsonl
from ares_exp.trajectories.files.writer_lock import WriterLock, has_writer
from tests.examples import examples
from tests.unit.trajectories.chats import chat, cut, write

main = partial(run_word, program="ares-exp")

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
for step in steps:
    for name, collector in collectors.items():
        collector.record_step(step, episode=handles[name])
        print(name, step.step_index, flush=True)
sys.stdin.read()  # and then it is killed
for name, collector in collectors.items():
    collector.end_episode(episode=handles[name])
"""


@contextmanager
def writing(run: Path, length: int, until: int) -> Iterator[dict[str, int]]:
    """A process in mid-episode, which has said this many times that it recorded a step; what it had recorded then."""
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


@pytest.mark.parametrize("seed", range(4))
def test_killed_in_mid_episode(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    steps = chat(length=400).steps
    with writing(tmp_path, 400, until=random.Random(seed).randint(5, 900)) as recorded:
        pass  # it went on recording until the signal came, wherever that was
    assert main(["recover", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert not list(tmp_path.rglob("*.partial"))
    names = {"trajectories/json.json", "trajectories/zstd.json.zst"}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == {
        *names, "trajectories.jsonl", "trajectories.recovered.jsonl",
    }  # fmt: skip
    episodes = load(tmp_path)
    assert {episode.episode_id for episode in episodes} == {"json", "zstd", "jsonl"}
    for stored in episodes:
        assert stored.outcome is Outcome.LOST
        assert stored.total_reward is None
        assert stored.num_steps >= recorded[stored.episode_id]
        assert f"{stored.num_steps} time steps (outcome lost) kept in {stored.path.name}" in said
        assert stored.load().steps == steps[: stored.num_steps]
    assert main(["recover", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "3 of 3 files are whole.\n"


def test_a_living_writer_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "trajectories" / "old.json", chat("old"))
    with writing(tmp_path, 20, until=60):
        files = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
        for _ in range(20):
            assert main(["recover", str(tmp_path)]) == 0
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == files
    said = capsys.readouterr().out
    for name in ("json.json.partial", "zstd.json.zst.partial"):
        assert f"{name}: a living process writes in its folder" in said
    assert "trajectories.jsonl: a living process writes in it" in said
    assert before.name not in said
    assert "3 left alone; 1 of 4 files are whole" in said


def test_who_asks_does_not_keep_a_writer_from_its_lock(tmp_path: Path) -> None:
    """A writer that begins while somebody looks whether there is one must not look dead ever after."""
    asking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_EX)
    done = threading.Timer(0.05, os.close, [asking])
    done.start()
    lock = WriterLock()
    lock.acquire(tmp_path, "a1")
    done.join()
    assert [one.action for one in recover([partial(tmp_path)])] == [RecoveryAction.LEFT_ALONE]
    lock.release("another")  # which never had it
    assert has_writer(tmp_path)
    lock.release("a1")
    assert [one.action for one in recover([tmp_path / "a1.json.partial"])] == [RecoveryAction.RECOVERED]


def partial(folder: Path, name: str = "a1.json", *, steps: int = 2) -> Path:
    path = folder / f"{name}.partial"
    path.write_text("".join(list(dump_episode(chat(length=6)))[: 1 + steps]))
    return path


def test_a_dry_run_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial(tmp_path)
    cut(write(tmp_path / "b2.json", chat("b2")), 0.5)
    cut(write(tmp_path / "c3.jsonl", chat("c3")), 0.5)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["recover", "--dry-run", str(tmp_path)]) == 0
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
    planned = capsys.readouterr().out
    assert "3 recovered; 0 of 3 files are whole. Nothing was done (--dry-run)." in planned
    assert main(["recover", str(tmp_path)]) == 0
    assert capsys.readouterr().out == planned.replace(" Nothing was done (--dry-run).", "")


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(share=st.floats(0, 1, exclude_max=True))
@pytest.mark.parametrize("name", ["a1.json", "a1.jsonl"])
def test_a_file_cut_anywhere(tmp_path: Path, name: str, share: float) -> None:
    path = write(tmp_path / name, chat(length=12))
    recovered = tmp_path / name.replace("a1", "a1.recovered")
    recovered.unlink(missing_ok=True)
    head = path.read_bytes().index(b"\n")
    broken = cut(path, share).read_bytes()
    [*recoveries] = recover([path])
    assert path.read_bytes() == broken
    if len(broken) < head:
        assert [one.action for one in recoveries] == ([RecoveryAction.FAILED] if broken or name == "a1.json" else [])
        return
    if recoveries:  # only the last line end is gone
        [episode] = load(recovered)
        assert episode.load().steps == chat(length=12).steps[: episode.num_steps]
        assert episode.num_steps >= broken.count(b"\n") - 1
    else:
        assert load(path)[0].load() == chat(length=12)


def test_what_is_broken_in_the_middle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a1.json", chat(length=10))
    path.write_text(path.read_text().replace('"step_index": 4', '"step_index": }'))
    assert main(["recover", str(path)]) == 0
    assert "4 time steps (outcome lost) of 10 kept in a1.recovered.json. Found: at byte" in capsys.readouterr().out
    assert load_episode(tmp_path / "a1.recovered.json").steps == chat(length=10).steps[:4]


def test_a_jsonl_file_keeps_its_good_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "x.jsonl", chat("a"), chat("b", length=6), chat("c"))
    path.write_text(
        path.read_text().replace('"episode_id": "b", "step_index": 2', '"episode_id": "b", "step_index": x')
    )
    assert main(["recover", str(tmp_path)]) == 0
    assert "10 time steps (3 episodes: 2 completed, 1 lost) kept in x.recovered.jsonl" in capsys.readouterr().out
    a, c, b = load_jsonl(tmp_path / "x.recovered.jsonl")
    assert (a, c) == (chat("a"), chat("c"))
    assert (b.episode_id, b.num_steps, b.outcome) == ("b", 2, Outcome.LOST)
    assert len(load(tmp_path)) == 3


@pytest.mark.parametrize("name", ["a1.json", "a1.json.zst"])
def test_nothing_can_be_read(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x00garbage")
    partial(tmp_path, "b2.json")
    assert main(["recover", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"failed      {path}: " in said
    assert "1 failed" in said
    assert "b2.json" in said  # the others go on
    assert path.read_bytes() == b"\x00garbage"


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cut(write(tmp_path / "a1.json", chat(length=9)), 0.7)
    (tmp_path / "a1.recovered.json").write_text("mine")
    assert main(["recover", str(path)]) == 0
    assert "a1.recovered.json has its good part already" in capsys.readouterr().out
    path.touch()
    path.write_bytes(path.read_bytes() + b" ")
    assert main(["recover", str(path)]) == 1
    assert "a1.recovered.json is there already: move it away" in capsys.readouterr().out
    assert (tmp_path / "a1.recovered.json").read_text() == "mine"


def test_a_partial_file_beside_its_finished_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a process leaves them that dies between finishing a compressed file and removing the partial one."""
    write(tmp_path / "a1.json.zst", chat(length=6))
    left = partial(tmp_path, "a1.json.zst")
    assert main(["recover", str(tmp_path)]) == 0
    assert "removed" in capsys.readouterr().out
    assert not left.exists()
    cut(tmp_path / "a1.json.zst", 0.5)
    partial(tmp_path, "a1.json.zst", steps=5)
    main(["recover", str(tmp_path)])
    assert [one.num_steps for one in load(tmp_path, skip_broken=True)] == [5]


def test_a_partial_file_whose_end_is_there_has_its_own_outcome(tmp_path: Path) -> None:
    partial(tmp_path, steps=7)
    assert main(["recover", str(tmp_path)]) == 0
    assert load_episode(tmp_path / "a1.json") == chat(length=6)


def test_a_partial_file_broken_in_the_middle_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = partial(tmp_path, steps=6)
    data = path.read_text().replace('"step_index": 3', '"step_index": x')
    path.write_text(data)
    assert main(["recover", str(tmp_path)]) == 0
    assert "3 time steps (outcome lost) kept in a1.json. Lost: 3 lines" in capsys.readouterr().out
    assert (tmp_path / "a1.json.partial.broken").read_text() == data
    assert [one.num_steps for one in load(tmp_path, partial=True)] == [3]


def test_an_empty_partial_file_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a1.json.partial").touch()
    assert main(["recover", str(tmp_path)]) == 0
    assert "its process died before it wrote anything" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["gone", "notes.txt"])
def test_mistakes_are_told_before_anything_is_done(
    tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left = partial(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert main(["recover", str(tmp_path), str(tmp_path / wrong)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {tmp_path / wrong}: ")
    assert left.exists()
