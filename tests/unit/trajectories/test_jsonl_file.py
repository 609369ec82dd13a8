from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.results import Outcome
from ares_exp.trajectories import load
from ares_exp.trajectories.files.episode_file import dump_episode, read_episodes
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord
from tests.examples import examples
from tests.unit.trajectories.chats import salvaged
from tests.unit.trajectories.strategies import trajectories

GOLDEN = Path(__file__).parent / "golden" / "version_3.jsonl"


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episodes=st.lists(trajectories(), max_size=3, unique_by=lambda episode: episode.episode_id))
def test_mixed_lines_of_several_episodes_are_kept_apart(tmp_path: Path, episodes: list[EpisodeTrajectory]) -> None:
    dumped = [dump_episode(episode, shared=True) for episode in episodes]
    mixed = [line for lines in zip_longest(*dumped) for line in lines if line is not None]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(mixed), encoding="utf-8", newline="")
    loaded = list(read_episodes(path))
    assert sorted(loaded, key=lambda e: e.episode_id) == sorted(episodes, key=lambda e: e.episode_id)


def two(tmp_path: Path) -> tuple[Path, list[str], EpisodeTrajectory]:
    """A file of two episodes of six lines each."""
    [episode] = list(read_episodes(GOLDEN))
    lines = [*dump_episode(episode, shared=True), *dump_episode(replace(episode, episode_id="other"), shared=True)]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(lines))
    return path, lines, episode


def test_an_episode_is_there_as_soon_as_it_has_ended(tmp_path: Path) -> None:
    path, lines, episode = two(tmp_path)
    path.write_text("".join(lines[:8]))
    reading = read_episodes(path)
    assert next(reading) == episode
    unfinished = next(reading)
    assert (unfinished.episode_id, unfinished.outcome) == ("other", Outcome.LOST)
    assert unfinished.steps == episode.steps[:1]


def test_empty_lines_mean_nothing(tmp_path: Path) -> None:
    """A writer puts one where it found a line that another thread was just writing."""
    path, lines, episode = two(tmp_path)
    path.write_text("\n".join(["", *lines, ""]))
    assert list(read_episodes(path)) == [episode, replace(episode, episode_id="other")]
    assert [stored.load() for stored in load(path)] == list(read_episodes(path))
    assert salvaged(path)[1] == []


def test_a_broken_line_costs_its_episode_the_rest_and_others_nothing(tmp_path: Path) -> None:
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


def test_an_episode_that_lacks_a_step_is_not_read_as_whole(tmp_path: Path) -> None:
    steps = [StepRecord(number, "MID", {"board": number}, None, 0.0, 1.0, 0.0) for number in range(4)]
    path = tmp_path / "t.jsonl"
    lines = list(dump_episode(replace(two(tmp_path)[2], steps=tuple(steps)), shared=True))
    path.write_text("".join([*lines[:2], *lines[3:]]))
    with pytest.raises(TrajectoryFormatError, match="expected 4 steps, got 3"):
        list(read_episodes(path))


def test_an_unfinished_episode_starts_over(tmp_path: Path) -> None:
    path, lines, episode = two(tmp_path)
    path.write_text("".join([*lines[:3], *lines[:6]]))
    assert list(read_episodes(path)) == [episode]


@pytest.mark.parametrize(
    "line",
    [
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
    ],
    ids=lambda line: line[:50],
)
def test_other_lines_are_told(tmp_path: Path, line: str) -> None:
    path, lines, _ = two(tmp_path)
    path.write_text("".join([*lines, line]))
    with pytest.raises(TrajectoryFormatError, match=r"t\.jsonl at byte \d+ \(line 13\)"):
        list(read_episodes(path))
    assert len(salvaged(path)[0]) == 2


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path, lines, _ = two(tmp_path)
    path.write_bytes("".join(lines[:6]).encode() + b"\xff\n")
    with pytest.raises(TrajectoryFormatError, match="UTF-8"):
        list(read_episodes(path))
    assert len(salvaged(path)[0]) == 1
    with pytest.raises(TrajectoryFormatError, match="none"):
        list(read_episodes(tmp_path / "none.jsonl"))
