from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.results import Outcome
from ares_exp.trajectories import load
from ares_exp.trajectories.files.jsonl_file import jsonl_lines, load_jsonl, read_jsonl, salvage_jsonl
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.examples import examples
from tests.unit.trajectories.strategies import trajectories

GOLDEN = Path(__file__).parent / "golden" / "version_3.jsonl"


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episodes=st.lists(trajectories(), max_size=3, unique_by=lambda episode: episode.episode_id))
def test_mixed_lines_of_several_episodes_are_kept_apart(tmp_path: Path, episodes: list[EpisodeTrajectory]) -> None:
    mixed = [line for lines in zip_longest(*map(jsonl_lines, episodes)) for line in lines if line is not None]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(mixed), encoding="utf-8", newline="")
    loaded = load_jsonl(path)
    assert sorted(loaded, key=lambda e: e.episode_id) == sorted(episodes, key=lambda e: e.episode_id)


def two(tmp_path: Path) -> tuple[Path, list[str], EpisodeTrajectory]:
    """A file of two episodes of six lines each."""
    [episode] = load_jsonl(GOLDEN)
    lines = [*jsonl_lines(episode), *jsonl_lines(replace(episode, episode_id="other"))]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(lines))
    return path, lines, episode


def test_an_episode_is_there_as_soon_as_it_has_ended(tmp_path: Path) -> None:
    path, lines, episode = two(tmp_path)
    path.write_text("".join(lines[:8]))
    reading = read_jsonl(path)
    assert next(reading) == episode
    with pytest.raises(TrajectoryFormatError, match="the end of episode other is missing: 1 steps are there"):
        next(reading)


def test_empty_lines_mean_nothing(tmp_path: Path) -> None:
    """A writer puts one where it found a line that another thread was just writing."""
    path, lines, episode = two(tmp_path)
    path.write_text("\n".join(["", *lines, ""]))
    assert load_jsonl(path) == [episode, replace(episode, episode_id="other")]
    assert [stored.load() for stored in load(path)] == load_jsonl(path)
    assert salvage_jsonl(path)[1] == []


def test_a_broken_line_costs_its_episode_the_rest_and_others_nothing(tmp_path: Path) -> None:
    path, lines, episode = two(tmp_path)
    path.write_text("".join([*lines[:2], lines[2].replace('"step_type": "MID"', '"step_type": 3'), *lines[3:]]))
    with pytest.raises(TrajectoryFormatError, match=r"t\.jsonl at byte \d+ \(line 3\): expected `step_type`"):
        load_jsonl(path)
    [whole, cut], problems = salvage_jsonl(path)
    assert whole == replace(episode, episode_id="other")
    assert cut.steps == episode.steps[:1]
    assert cut.outcome is Outcome.LOST
    assert len(problems) == 1


def test_a_torn_line_is_told_and_passed_over(tmp_path: Path) -> None:
    path, lines, _ = two(tmp_path)
    path.write_text("".join([*lines[:10], lines[10][:40]]))
    with pytest.raises(TrajectoryFormatError, match="line 11"):
        load_jsonl(path)
    episodes, problems = salvage_jsonl(path)
    assert [e.num_steps for e in episodes] == [4, 3]
    assert len(problems) == 2


def test_an_unfinished_episode_starts_over(tmp_path: Path) -> None:
    path, lines, episode = two(tmp_path)
    path.write_text("".join([*lines[:3], *lines[:6]]))
    assert load_jsonl(path) == [episode]


@pytest.mark.parametrize(
    "line",
    [
        "x\n",
        "[]\n",
        "{}\n",
        '{"type": "begin", "episode_id": 3}\n',
        '{"type": "begin", "episode_id": "e"}\n',
        '{"type": "begin", "episode_id": "e", "schema_version": 9}\n',
        '{"type": "begin", "episode_id": "e", "schema_version": 2}\n',
        '{"type": "step", "episode_id": "never begun"}\n',
        '{"type": "news", "episode_id": "e"}\n',
        "[" * 100_000 + "\n",
    ],
    ids=lambda line: line[:50],
)
def test_other_lines_are_told(tmp_path: Path, line: str) -> None:
    path, lines, _ = two(tmp_path)
    path.write_text("".join([*lines, line]))
    with pytest.raises(TrajectoryFormatError, match=r"t\.jsonl at byte \d+ \(line 13\)"):
        load_jsonl(path)
    assert len(salvage_jsonl(path)[0]) == 2


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path, lines, _ = two(tmp_path)
    path.write_bytes("".join(lines[:6]).encode() + b"\xff\n")
    with pytest.raises(TrajectoryFormatError, match="UTF-8"):
        load_jsonl(path)
    assert len(salvage_jsonl(path)[0]) == 1
    with pytest.raises(TrajectoryFormatError, match="none"):
        load_jsonl(tmp_path / "none.jsonl")
