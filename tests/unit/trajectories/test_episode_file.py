import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.results import Outcome
from ares_exp.trajectories.files.episode_file import dump_episode, load_episode, salvage_episode
from ares_exp.trajectories.files.jsonl_file import jsonl_lines, load_jsonl
from ares_exp.trajectories.files.line_file import write_lines
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.examples import examples
from tests.unit.trajectories.strategies import trajectories

GOLDEN = Path(__file__).parent / "golden"


def expected(version: int) -> EpisodeTrajectory:
    return EpisodeTrajectory.from_dict(json.loads((GOLDEN / f"version_{version}.expected.json").read_text()))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version_keeps_loading(version: int) -> None:
    loaded = EpisodeTrajectory.load(GOLDEN / f"version_{version}.json")
    assert loaded == expected(version)
    assert loaded.steps[2].observation is not None
    assert loaded.steps[2].observation["messages"][0]["content"] == "(history shortened)"


def test_the_current_version_is_written_as_it_always_was() -> None:
    """A change here needs a new schema version: files of this one are on people's disks."""
    assert "".join(dump_episode(expected(3))) == (GOLDEN / "version_3.json").read_text()
    assert "".join(jsonl_lines(expected(3))) == (GOLDEN / "version_3.jsonl").read_text()


def test_the_version_before_had_no_reasoning() -> None:
    action, before = (expected(version).steps[1].action for version in (3, 2))
    assert action is not None
    assert before is not None
    assert action["data"] == ({"thinking": "First I look around.", "signature": "c2VhbA=="}, *before["data"])
    assert action["usage"] == {**before["usage"], "cached_tokens": 4, "reasoning_tokens": 3}


def test_the_limit_is_known_of_files_of_before_it_was_a_field() -> None:
    for name in ("version_1.json", "version_2.json"):  # from version 3 on it always was
        assert EpisodeTrajectory.load(GOLDEN / name).limit == "steps"


def test_jsonl_keeps_loading() -> None:
    for version in (2, 3):
        assert load_jsonl(GOLDEN / f"version_{version}.jsonl") == [expected(version)]


@pytest.mark.parametrize("name", ["e.json", "e.json.zst"])
@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episode=trajectories())
def test_what_is_loaded_equals_what_was_written(tmp_path: Path, name: str, episode: EpisodeTrajectory) -> None:
    write_lines(tmp_path / name, dump_episode(episode), sync=False)
    assert EpisodeTrajectory.load(tmp_path / name) == episode
    assert salvage_episode(tmp_path / name) == (episode, None)


@examples(20)
@given(trajectories())
def test_the_file_is_one_json_object_also_when_it_was_laid_out_anew(episode: EpisodeTrajectory) -> None:
    data = json.loads("".join(dump_episode(episode)))
    assert EpisodeTrajectory.from_dict(data) == episode


def test_compressed_is_smaller(tmp_path: Path) -> None:
    lines = list(dump_episode(expected(2)))
    write_lines(tmp_path / "e.json.zst", lines)
    assert (tmp_path / "e.json.zst").stat().st_size < sum(map(len, lines)) / 2


def test_a_file_cut_anywhere_is_told_and_salvaged(tmp_path: Path) -> None:
    data = (GOLDEN / "version_2.json").read_bytes()
    whole = expected(2)
    path = tmp_path / "e.json"
    head = data.index(b"\n") + 1
    kept = set()
    for length in range(len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(TrajectoryFormatError, match=r"e\.json"):
            load_episode(path)
        if length < head - 1:
            with pytest.raises(TrajectoryFormatError):
                salvage_episode(path)
            continue
        saved, problem = salvage_episode(path)
        assert problem
        assert saved.steps == whole.steps[: len(saved.steps)]
        assert saved.outcome is (Outcome.TRUNCATED if len(saved.steps) == 4 else Outcome.LOST)
        assert saved.metadata == whole.metadata
        kept.add(len(saved.steps))
    assert kept == {0, 1, 2, 3, 4}


def test_a_broken_step_is_named_by_its_place(tmp_path: Path) -> None:
    lines = (GOLDEN / "version_2.json").read_text().splitlines(keepends=True)
    path = tmp_path / "e.json"
    path.write_text("".join([*lines[:2], lines[2].replace('"conversation": 2', '"conversation": 99'), *lines[3:]]))
    with pytest.raises(TrajectoryFormatError) as caught:
        load_episode(path)
    offset = len("".join(lines[:2]).encode())
    assert f"{path} at byte {offset} (line 3): expected a conversation below 3, got 99" in str(caught.value)
    assert "recover" in str(caught.value)
    saved, problem = salvage_episode(path)
    assert saved.num_steps == 1
    assert saved.outcome is Outcome.LOST
    assert saved.total_reward is None
    assert "line 3" in str(problem)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda text: text.replace('"num_steps": 4', '"num_steps": 5'), "expected 5 steps, got 4"),
        (lambda text: text.replace('"outcome": "truncated"', '"outcome": "great"'), "great"),
        (lambda text: text.replace('"end_time": 1003.5', '"end_time": "late"'), "end_time"),
        (lambda text: text.replace('"schema_version": 2', '"schema_version": 4'), "update ares_exp"),
        (lambda text: '{"schema_version": "ATIF-v1.6", "steps": []}', "name it ….atif.json"),
        (lambda text: text.replace('"task_name"', '"name"'), "task_name"),
        (lambda text: text.replace("\n,{", "\n{", 1).replace("{", "", 1), "."),
        (lambda text: text + "{}\n", "after"),
    ],
)
def test_other_mistakes_are_told(tmp_path: Path, change: object, what: str) -> None:
    path = tmp_path / "e.json"
    path.write_text(change((GOLDEN / "version_2.json").read_text()))  # type: ignore[operator]
    with pytest.raises(TrajectoryFormatError, match=what):
        load_episode(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"\xff\xfe", b"[" * 200_000, b"{" * 200_000, b'{"steps": [\n' + b"[" * 200_000, b"\x28\xb5\x2f\xfd"],
)
@pytest.mark.parametrize("name", ["e.json", "e.json.zst"])
def test_garbage_is_told(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TrajectoryFormatError, match=r"e\.json"):
        EpisodeTrajectory.load(tmp_path / name)


@pytest.mark.parametrize("ranges", [[[0, 999]], [[-1, 1]], [[1, 0]], [[0]], "x", [["a", "b"]], 3])
def test_hostile_message_ranges_of_version_1_are_refused(tmp_path: Path, ranges: object) -> None:
    data = json.loads((GOLDEN / "version_1.json").read_text())
    data["steps"][0]["observation"]["message_ranges"] = ranges
    (tmp_path / "e.json").write_text(json.dumps(data))
    with pytest.raises(TrajectoryFormatError):
        EpisodeTrajectory.load(tmp_path / "e.json")


def test_a_truncated_compressed_file_is_told_and_salvaged(tmp_path: Path) -> None:
    path = tmp_path / "e.json.zst"
    write_lines(path, dump_episode(expected(2)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TrajectoryFormatError, match=r"e\.json\.zst"):
        load_episode(path)


def test_an_object_laid_out_anew_is_read_within_the_bound_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes, compressed, can be gigabytes of short lines."""
    monkeypatch.setattr("ares_exp.trajectories.files.line_file.MAX_LINE_BYTES", 10_000)
    path = tmp_path / "e.json"
    path.write_text("[\n" + "0,\n" * 4_000 + "0]")
    with pytest.raises(TrajectoryFormatError, match="expected a JSON object of at most 10000 bytes, got more"):
        EpisodeTrajectory.load(path)
