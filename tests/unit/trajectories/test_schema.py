"""The published JSON Schema, against every fixture and against freshly recorded files."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given

from ares_exp.trajectories.files.episode_file import dump_episode
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.examples import examples
from tests.unit.trajectories.chats import chat
from tests.unit.trajectories.strategies import trajectories

GOLDEN = Path(__file__).parent / "golden"
SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "trajectory.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))


def dumped(episode: EpisodeTrajectory) -> dict[str, Any]:
    data: dict[str, Any] = json.loads("".join(dump_episode(episode)))
    return data


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
