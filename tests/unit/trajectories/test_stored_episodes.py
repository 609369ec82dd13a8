"""`ares_exp.trajectories.load`: what it finds, in which order, and what it reads for that."""

import logging
import os
import pickle
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import ares_exp.trajectories
from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories import load
from ares_exp.trajectories.collectors import JsonlTrajectoryCollector, JsonTrajectoryCollector
from ares_exp.trajectories.files.episode_file import dump_episode, find_headers
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.examples import examples
from tests.unit.trajectories.chats import chat, ids, write
from tests.unit.trajectories.strategies import trajectories

FORMATS = ["e.json", "e.json.zst", "e.jsonl", "e.jsonl.zst"]


@pytest.mark.parametrize("name", FORMATS)
@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episode=trajectories())
def test_headers_match_the_episode(tmp_path: Path, name: str, episode: EpisodeTrajectory) -> None:
    [stored] = load(write(tmp_path / name, episode))
    for field in ("episode_id", "task_name", "outcome", "total_reward", "num_steps", "start_time", "end_time", "error"):
        assert getattr(stored, field) == getattr(episode, field), field
    assert stored.metadata == episode.metadata
    assert stored.load() == episode


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.zst"])
@examples(6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episodes=st.lists(trajectories(), max_size=4, unique_by=lambda episode: episode.episode_id))
def test_all_episodes_of_a_file_are_loaded(tmp_path: Path, name: str, episodes: list[EpisodeTrajectory]) -> None:
    loaded = list(load(write(tmp_path / name, *episodes)).trajectories())
    assert loaded == sorted(episodes, key=lambda episode: (episode.start_time, episode.episode_id))


def test_header_is_read_from_both_file_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "e.json", chat(length=200))
    data = path.read_bytes()
    first, last = data.index(b"\n") + 1, data.rindex(b"\n]")
    path.write_bytes(data[:first] + b"\xff\n" * 3_000_000 + data[last:])  # what is between is not even text
    tracemalloc.start()
    try:
        [stored] = load(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert (stored.num_steps, stored.outcome) == (200, Outcome.COMPLETED)
    with pytest.raises(TrajectoryFormatError, match=rf"e.json.* at byte {first}: it is not valid UTF-8|byte {first}"):
        stored.load()


@pytest.mark.parametrize("length", [0, 1, 100, 4095, 4096, 4097, 20_000])
def test_last_line_of_any_length_is_found(tmp_path: Path, length: int) -> None:
    episode = chat(outcome=Outcome.ERRORED)
    text = "".join(dump_episode(episode)).replace("it went wrong", "é" * length)
    (tmp_path / "e.json").write_text(text)
    [found] = find_headers(tmp_path / "e.json")
    assert found.ended == replace(episode, steps=(), error=ErrorInfo("Trouble", "é" * length))
    (tmp_path / "e.json").write_text(text.rstrip("\n"))
    [again] = find_headers(tmp_path / "e.json")
    assert again.ended == found.ended


def run_with_all_formats(run: Path) -> None:
    (run / "episodes.jsonl").parent.mkdir(parents=True, exist_ok=True)
    (run / "episodes.jsonl").write_text('{"episode_id": "a1"}\n')
    (run / "summary.json").write_text("{}")
    write(run / "trajectories" / "a1.json", chat("a1"))
    write(run / "trajectories.jsonl", chat("a1"), chat("b2", "other", start=500.0))
    write(run / "trajectories" / "c3.json", chat("c3", start=2000.0))


def test_episode_in_several_formats_counts_once(tmp_path: Path) -> None:
    run_with_all_formats(tmp_path)
    episodes = load(tmp_path)
    assert ids(episodes) == ["b2", "a1", "c3"]
    assert [episode.path.name for episode in episodes] == ["trajectories.jsonl", "a1.json", "c3.json"]


def test_sweep_has_the_episodes_of_all_runs(tmp_path: Path) -> None:
    for number, name in enumerate(["0", "1", "deep/er/2", ".hidden"]):
        write(tmp_path / name / "trajectories" / f"e{number}.json", chat(f"e{number}", start=float(number)))
    write(tmp_path / "0" / "other" / "x.json", chat("x"))  # in a run, but no place of ours
    (tmp_path / "again").symlink_to(tmp_path / "0")
    (tmp_path / "multirun.yaml").write_text("")
    for name in ("plan.json", "sweep.json"):
        (tmp_path / name).write_text('{"jobs": []}')
    assert ids(load(tmp_path)) == ["e0", "e1", "e2"]


def test_empty_or_missing_path_is_reported(tmp_path: Path) -> None:
    assert len(load(tmp_path)) == 0
    with pytest.raises(TrajectoryFormatError, match=r"gone: No such file"):
        load(tmp_path / "gone")
    (tmp_path / "e.txt").write_text("")
    with pytest.raises(TrajectoryFormatError, match=r"e\.txt: expected the name"):
        load(tmp_path / "e.txt")


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, ["a", "b", "c", "d"]),
        ({"task": "fix-*"}, ["a", "b"]),
        ({"task": "fix"}, []),
        ({"outcome": "completed"}, ["a", "b", "d"]),
        ({"outcome": [Outcome.ERRORED, "lost"]}, ["c"]),
        ({"min_reward": 0.5}, ["b", "d"]),
        ({"max_reward": 0.5}, ["a", "d"]),
        ({"min_reward": 0.5, "max_reward": 0.5}, ["d"]),
        ({"min_reward": float("-inf")}, ["a", "b", "d"]),  # a missing reward is within no bounds
        ({"task": "fix-*", "min_reward": 1}, ["b"]),
        ({"where": lambda episode: episode.start_time > 2}, ["c", "d"]),
    ],
)
def test_filters_select_episodes(tmp_path: Path, conditions: dict[str, object], expected: list[str]) -> None:
    write(tmp_path / "a.json", chat("a", "fix-one", reward=0.0, start=1.0))
    write(tmp_path / "b.json", chat("b", "fix-two", reward=1.0, start=2.0))
    write(tmp_path / "c.json", chat("c", "other", reward=None, outcome=Outcome.ERRORED, start=3.0))
    write(tmp_path / "d.json", chat("d", "other", reward=0.5, start=4.0))
    assert ids(load(tmp_path).filter(**conditions)) == expected  # type: ignore[arg-type]
    if "where" not in conditions:
        assert ids(load(tmp_path, **conditions)) == expected  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'great'\. Use one of completed"):
        load(tmp_path, outcome="great")


def test_stored_episodes_are_a_sequence(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / f"e{number}.json", chat(f"e{number}", start=float(-number)))
    episodes = load(tmp_path)
    assert ids(episodes) == ["e4", "e3", "e2", "e1", "e0"]
    assert ids(episodes[1:3]) == ["e3", "e2"]
    assert ids(episodes[1:].filter(task="fix-bug")[-2:]) == ["e1", "e0"]
    assert episodes[-1].episode_id == "e0"
    assert episodes[0] in episodes
    assert repr(episodes) == "<5 episodes of 1 task>"
    assert [one.load() for one in pickle.loads(pickle.dumps(list(episodes)))] == list(episodes.trajectories())


def test_rows_are_flat(tmp_path: Path) -> None:
    [row] = load(write(tmp_path / "e.json", chat(outcome=Outcome.TRUNCATED))).rows()
    assert row == {
        "episode_id": "a1", "task_name": "fix-bug", "outcome": "truncated", "total_reward": 1.0, "num_steps": 4,
        "start_time": 1000.0, "end_time": 1004.0, "duration_sec": 4.0, "error_type": "Trouble",
        "error_message": "it went wrong", "path": str(tmp_path / "e.json"), "metadata.seed": 7,
    }  # fmt: skip
    assert type(row["outcome"]) is str


def test_only_one_episode_is_in_memory(tmp_path: Path) -> None:
    text = "x" * 1_000_000
    for number in range(8):
        write(tmp_path / f"e{number}.json", chat(f"e{number}", text + str(number)))
    tracemalloc.start()
    try:
        assert sum(len(episode.steps) for episode in load(tmp_path).trajectories()) == 32
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2 * len(text)  # headers and an episode; all of them together are 24 MB and more


@pytest.mark.parametrize("name", ["e1.json", "e1.json.zst"])
def test_broken_files_are_reported_or_skipped(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / name).write_bytes(b"{ no trajectory\n")
    write(tmp_path / "e2.json", chat("e2"))
    with pytest.raises(TrajectoryFormatError, match=name):
        load(tmp_path)
    with caplog.at_level(logging.WARNING):
        episodes = load(tmp_path, skip_broken=True)
    assert ids(episodes) == ["e2"]
    [problem] = episodes.left_out
    assert problem.startswith(f"{tmp_path / name}")
    assert name in caplog.text


@pytest.mark.parametrize("name", ["e1.json", "e1.jsonl"])
def test_broken_record_loses_only_later_steps(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, chat("e1"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"step_index": 2', b'"step_index": "two"').rpartition(b"\n")[0][:-9])
    with pytest.raises(TrajectoryFormatError, match=rf"{name} at byte \d+"):
        load(tmp_path)
    episodes = load(tmp_path, skip_broken=True)
    assert [(one.num_steps, one.outcome) for one in episodes] == [(2, Outcome.LOST)]
    assert [problem.partition(" at byte")[0] for problem in episodes.left_out] == [str(path)]


def test_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "e.json")
    with pytest.raises(TrajectoryFormatError, match="but it is a pipe"):
        load(tmp_path / "e.json")


def test_foreign_file_is_reported_briefly(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n' * 1000)
    write(tmp_path / "e1.json", chat("e1"))
    episodes = load(tmp_path, skip_broken=True)
    assert ids(episodes) == ["e1"]
    assert len(episodes.left_out) == 11
    assert "990 more lines" in episodes.left_out[-1]


def test_broken_step_is_found_on_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.json", chat("a"))
    path.write_text(path.read_text().replace('"step_index": 2', '"step_index": "two"'))
    write(tmp_path / "b.json", chat("b"))
    episodes = load(tmp_path)
    with pytest.raises(TrajectoryFormatError, match=r"a\.json at byte \d+ \(line 4\): expected `step_index`"):
        list(episodes.trajectories())
    assert ids(episodes.trajectories(skip_broken=True)) == ["b"]
    assert "a.json" in caplog.text


def test_running_episodes_are_loaded(tmp_path: Path) -> None:
    collectors = [
        JsonTrajectoryCollector(tmp_path / "trajectories"),
        JsonlTrajectoryCollector(tmp_path / "trajectories.jsonl"),
    ]
    steps = chat().steps
    handles = [one.begin_episode(task_name="t", episode_id=name) for one, name in zip(collectors, "ab", strict=True)]
    for collector, handle in zip(collectors, handles, strict=True):
        for step in steps[:2]:
            collector.record_step(step, episode=handle)
    none = load(tmp_path)
    assert len(none) == 0
    assert [problem.partition(": ")[2] for problem in none.left_out] == [
        "episode a has not ended.",
        "episode b has not ended.",
    ]
    found = load(tmp_path, partial=True)
    assert sorted((one.episode_id, one.num_steps, one.outcome) for one in found) == [("a", 2, None), ("b", 2, None)]
    assert [one.load().steps for one in found] == [steps[:2]] * 2
    for collector, handle in zip(collectors, handles, strict=True):
        collector.end_episode(episode=handle)
        collector.close()
    assert {one.load().outcome for one in found} == {Outcome.COMPLETED, Outcome.LOST}  # a's file is read again
    assert {one.outcome for one in load(tmp_path)} == {Outcome.COMPLETED}


def test_unfinished_file_without_writer_is_a_lost_episode(tmp_path: Path) -> None:
    lines = list(dump_episode(chat(length=6)))
    (tmp_path / "a1.json").write_text("".join(lines[:4]) + lines[4][:20])
    [stored] = load(tmp_path / "a1.json")
    assert (stored.outcome, stored.num_steps, stored.total_reward) == (Outcome.LOST, 3, None)
    assert stored.load().steps == chat(length=6).steps[:3]
    write(tmp_path / "a1.json.zst", chat(length=6))  # the process was killed before it removed the other file
    assert [one.path.name for one in load(tmp_path)] == ["a1.json.zst"]


def test_finished_file_comes_before_a_lost_one(tmp_path: Path) -> None:
    (tmp_path / "a1.json").write_text("".join(list(dump_episode(chat()))[:2]))
    write(tmp_path / "all.jsonl", chat())
    assert [(one.path.name, one.outcome) for one in load(tmp_path)] == [("all.jsonl", Outcome.COMPLETED)]


def test_empty_file_of_a_killed_process_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a1.json").touch()
    write(tmp_path / "b1.json", chat("b1"))
    assert ids(load(tmp_path)) == ["b1"]


def test_package_import_is_lazy() -> None:
    code = (
        "import sys, ares_exp.trajectories; print([n for n in sys.modules if n.startswith('ares_exp.trajectories.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert ares_exp.trajectories.load is load
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ares_exp.trajectories.nothing  # noqa: B018
