"""Episodes in JSON files, their schema, and their records."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given

from ares_exp.errors import AgentError, TrajectoryFormatError
from ares_exp.records.results import Outcome
from ares_exp.trajectories.collectors import JsonTrajectoryCollector
from ares_exp.trajectories.files.episode_file import dump_episode
from ares_exp.trajectories.files.line_file import write_lines
from ares_exp.trajectories.records import Ending, EpisodeTrajectory, StepRecord, ending
from ares_exp.trajectories.stored_episodes import load
from tests.examples import examples
from tests.unit.trajectories.chats import chat, read_episodes, salvaged
from tests.unit.trajectories.strategies import trajectories

GOLDEN = Path(__file__).parent / "golden"


def expected() -> EpisodeTrajectory:
    return EpisodeTrajectory.from_dict(json.loads((GOLDEN / "version_3.expected.json").read_text()))


def test_golden_files_are_read() -> None:
    loaded = EpisodeTrajectory.load(GOLDEN / "version_3.json")
    assert loaded == expected()
    assert loaded.limit == "steps"
    assert loaded.steps[2].observation["messages"][0]["content"] == "(history shortened)"
    assert list(read_episodes(GOLDEN / "version_3.jsonl")) == [expected()]


@pytest.mark.parametrize("version", ["1", "2", "4", "true", '"3"'])
@pytest.mark.parametrize("name", ["e.json", "e.jsonl"])
def test_file_of_another_version_is_rejected(tmp_path: Path, name: str, version: str) -> None:
    golden = (GOLDEN / f"version_3{Path(name).suffix}").read_text()
    (tmp_path / name).write_text(golden.replace('"schema_version": 3', f'"schema_version": {version}'))
    rejected = r"expected schema_version 3, got .*: use the version of ares_exp that wrote the file\.$"
    with pytest.raises(TrajectoryFormatError, match=rejected):
        EpisodeTrajectory.load(tmp_path / name) if name == "e.json" else list(read_episodes(tmp_path / name))
    with pytest.raises(TrajectoryFormatError, match=rejected):
        load(tmp_path / name)


def test_current_version_is_written_unchanged() -> None:
    """A change here needs a new schema version: files of this one are on people's disks."""
    assert "".join(dump_episode(expected())) == (GOLDEN / "version_3.json").read_text()
    assert "".join(dump_episode(expected(), shared=True)) == (GOLDEN / "version_3.jsonl").read_text()


@pytest.mark.parametrize("name", ["e.json", "e.json.zst"])
@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episode=trajectories())
def test_loaded_episode_equals_the_written_one(tmp_path: Path, name: str, episode: EpisodeTrajectory) -> None:
    write_lines(tmp_path / name, dump_episode(episode), sync=False)
    assert EpisodeTrajectory.load(tmp_path / name) == episode
    assert salvaged(tmp_path / name) == ([episode], [])


@pytest.mark.parametrize("name", ["e.json", "e.jsonl"])
def test_file_cut_anywhere_has_its_complete_steps(tmp_path: Path, name: str) -> None:
    data = (GOLDEN / f"version_3{Path(name).suffix}").read_bytes()
    whole = expected()
    path = tmp_path / name
    head = data.index(b"\n") + 1
    kept = set()
    ends = {at for at, byte in enumerate(data) if byte == ord("\n")}
    near = {at + offset for at in ends for offset in range(-2, 4)}
    for length in sorted({*range(0, len(data), 23), *near, head - 2} & {*range(len(data) - 1)}):
        path.write_bytes(data[:length])
        if length < head - 1:
            with pytest.raises(TrajectoryFormatError, match=re.escape(name)):
                EpisodeTrajectory.load(path)
            assert salvaged(path)[0] == []
            continue
        saved = EpisodeTrajectory.load(path)
        assert salvaged(path) == ([saved], [])
        [stored] = load(tmp_path)
        assert (stored.load(), stored.outcome, stored.num_steps) == (saved, saved.outcome, saved.num_steps)
        assert saved.steps == whole.steps[: len(saved.steps)]
        assert saved.outcome is (Outcome.TRUNCATED if len(saved.steps) == 4 else Outcome.LOST)
        assert saved.metadata == whole.metadata
        kept.add(len(saved.steps))
    assert kept == {0, 1, 2, 3, 4}


def test_broken_step_is_reported_with_its_line(tmp_path: Path) -> None:
    lines = (GOLDEN / "version_3.json").read_text().splitlines(keepends=True)
    path = tmp_path / "e.json"
    path.write_text("".join([*lines[:2], lines[2].replace('"conversation": 2', '"conversation": 99'), *lines[3:]]))
    with pytest.raises(TrajectoryFormatError) as caught:
        EpisodeTrajectory.load(path)
    offset = len("".join(lines[:2]).encode())
    assert f"{path} at byte {offset} (line 3): expected a conversation number below 3, got 99" in str(caught.value)
    [saved], [problem] = salvaged(path)
    assert saved.num_steps == 1
    assert saved.outcome is Outcome.LOST
    assert saved.total_reward is None
    assert "line 3" in problem


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda text: text.replace('"num_steps": 4', '"num_steps": 5'), "expected 5 steps, got 4"),
        (lambda text: text.replace('"outcome": "truncated"', '"outcome": "great"'), "great"),
        (lambda text: text.replace('"end_time": 1003.5', '"end_time": "late"'), "end_time"),
        (lambda text: '{"schema_version": "ATIF-v1.6", "steps": []}', "use the run that it was exported from"),
        (lambda text: text.replace('"task_name"', '"name"'), "task_name"),
        (lambda text: text.replace("\n,{", "\n{", 1).replace("{", "", 1), "."),
        (lambda text: text + "{}\n", "has already ended"),
    ],
)
def test_other_mistakes_are_reported(tmp_path: Path, change: object, what: str) -> None:
    path = tmp_path / "e.json"
    path.write_text(change((GOLDEN / "version_3.json").read_text()))  # type: ignore[operator]
    with pytest.raises(TrajectoryFormatError, match=what):
        EpisodeTrajectory.load(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"\xff\xfe", b"[" * 200_000, b"{" * 200_000, b'{"steps": [\n' + b"[" * 200_000, b"\x28\xb5\x2f\xfd"],
)
@pytest.mark.parametrize("name", ["e.json", "e.json.zst"])
def test_garbage_is_reported(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TrajectoryFormatError, match=r"e\.json"):
        EpisodeTrajectory.load(tmp_path / name)


def test_truncated_compressed_file_is_reported_and_salvaged(tmp_path: Path) -> None:
    path = tmp_path / "e.json.zst"
    write_lines(path, dump_episode(expected()))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TrajectoryFormatError, match=r"e\.json\.zst"):
        EpisodeTrajectory.load(path)


def test_reformatted_object_is_read_within_line_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes, compressed, can be gigabytes of short lines."""
    monkeypatch.setattr("ares_exp.trajectories.files.line_file.MAX_LINE_BYTES", 10_000)
    path = tmp_path / "e.json"
    path.write_text("[\n" + "0,\n" * 4_000 + "0]")
    with pytest.raises(TrajectoryFormatError, match="the JSON object is longer than the limit of 10000 bytes"):
        EpisodeTrajectory.load(path)


SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "trajectory.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))


def dumped(episode: EpisodeTrajectory) -> dict[str, Any]:
    return json.loads("".join(dump_episode(episode)))


def test_schema_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)


def test_fixtures_are_valid() -> None:
    VALIDATOR.validate(json.loads((GOLDEN / "version_3.json").read_text()))
    start, *steps, end = map(json.loads, (GOLDEN / "version_3.jsonl").read_text().splitlines())
    VALIDATOR.validate({**start, "steps": steps, **end})


@examples(20, suppress_health_check=[HealthCheck.too_slow])
@given(episode=trajectories())
def test_recorded_file_is_valid(episode: EpisodeTrajectory) -> None:
    VALIDATOR.validate(dumped(episode))


@pytest.mark.parametrize(
    ("name", "value"),
    [("schema_version", 2), ("outcome", "fine"), ("total_reward", "1"), ("rewards", {"a": "b"}), ("steps", [{}])],
)
def test_invalid_field_is_found(name: str, value: object) -> None:
    data = dumped(chat())
    VALIDATOR.validate(data)
    [error, *_] = VALIDATOR.iter_errors({**data, name: value})
    assert error.absolute_path[0] == name
    with pytest.raises(Exception, match=name if name != "steps" else "observation"):
        EpisodeTrajectory.from_dict({**data, name: value})


def record(directory: Path, records: list[StepRecord], **more: object) -> EpisodeTrajectory:
    collector = JsonTrajectoryCollector(directory)
    collector.begin_episode(task_name="t", episode_id="e")
    for item in records:
        collector.record_step(item)
    return collector.end_episode(**more)  # type: ignore[arg-type]


def step(index: int, reward: float | None, kind: str = "MID") -> StepRecord:
    return StepRecord(index, kind, None, None, reward, None if kind == "FIRST" else 1.0, 0.0)  # type: ignore[arg-type]


def test_returns_to_go_are_discounted(tmp_path: Path) -> None:
    trajectory = record(tmp_path, [step(0, None, "FIRST"), step(1, 1.0), step(2, None), step(3, 4.0, "LAST")])
    assert trajectory.returns_to_go() == (5.0, 4.0, 4.0)
    assert trajectory.returns_to_go(0.5) == (2.0, 2.0, 4.0)
    assert trajectory.returns_to_go(0.0) == (1.0, 0.0, 4.0)
    for discount in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            trajectory.returns_to_go(discount)


def test_returns_without_a_reward_are_missing(tmp_path: Path) -> None:
    assert record(tmp_path, [step(0, None, "FIRST"), step(1, 1.0)]).returns_to_go() == (None,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_index", "0"),
        ("step_type", "NEXT"),
        ("reward", "1"),
        ("timestamp", None),
        ("action", [1]),
        ("discount", True),
        ("commands", [{"command": "ls", "exit_code": "0", "duration_sec": 1.0}]),
    ],
)
def test_field_of_wrong_type_is_named(name: str, value: object) -> None:
    data = json.loads(json.dumps(step(1, 0.0).to_dict()))
    assert StepRecord.from_dict(data) == step(1, 0.0)
    with pytest.raises((TypeError, ValueError), match="exit_code" if name == "commands" else name):
        StepRecord.from_dict({**data, name: value})


def test_error_after_the_last_step_is_ignored() -> None:
    last = chat().steps[-1]
    assert ending(last, RuntimeError("while it closed")) == Ending(Outcome.COMPLETED, None, 1.0)
    assert ending(None, AgentError("no")).outcome is Outcome.AGENT_ERROR


@pytest.mark.parametrize("episode_id", ["../x", "a/b", "", "x" * 300])
def test_invalid_episode_id_is_refused(tmp_path: Path, episode_id: str) -> None:
    with pytest.raises(ValueError, match="episode id"):
        JsonTrajectoryCollector(tmp_path).begin_episode(task_name="a", episode_id=episode_id)


@pytest.mark.parametrize(
    ("field", "value"), [("start_time", 10**400), ("total_reward", 10**400), ("metadata", 3), ("metadata", ["a"])]
)
def test_non_numeric_or_infinite_values_are_refused(field: str, value: object) -> None:
    data = chat(length=2).to_dict()
    with pytest.raises(TrajectoryFormatError, match=f"expected `{field}` to be a"):
        EpisodeTrajectory.from_dict({**data, field: value})
