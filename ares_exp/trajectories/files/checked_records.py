"""Records made of their JSON form, every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ares_exp.containers.activity import CommandRecord
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.records.validation import Table, Text, explain_validation
from ares_exp.trajectories.records import AsideRecord, StepRecord

Integer = Annotated[int, Field(ge=-(2**1000), le=2**1000)]
"""One that fits into a float: nothing could be computed of longer ones."""


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True)


class _Command(_Fields):
    command: Text
    exit_code: Integer | None
    duration_sec: float
    timed_out: bool = False


class _Aside(_Fields):
    request: Table
    answer: Table


class _Step(_Fields):
    step_index: Integer
    step_type: Literal["FIRST", "MID", "LAST"]
    observation: Table | None
    action: Table | None
    reward: float | None
    discount: float | None
    timestamp: float
    policy_sec: float | None = None
    environment_sec: float | None = None
    container_sec: float | None = None
    commands: Annotated[tuple[_Command, ...] | None, Field(strict=False)] = None
    asides: Annotated[tuple[_Aside, ...] | None, Field(strict=False)] = None


class _Error(_Fields):
    type: Text
    message: Text
    limit: Text | None = None


class _Episode(_Fields):
    episode_id: Text
    task_name: Text
    start_time: float
    end_time: float
    total_reward: float | None
    num_steps: Integer
    truncated: bool
    outcome: Annotated[Outcome, Field(strict=False)]
    error: _Error | None
    metadata: Table | None = None
    rewards: dict[Text, float] | None = None


_STEP_FIELDS = tuple(item.name for item in fields(StepRecord) if item.name not in ("commands", "asides"))


def step_from_dict(data: Mapping[str, Any]) -> StepRecord:
    """Makes the record that `StepRecord.to_dict` gave; keys of later versions are ignored.

    Raises:
        ValueError: A field is missing, or is not what it should be.
    """
    _check(_Step, data)
    values = {name: data[name] for name in _STEP_FIELDS if name in data}
    commands = [
        CommandRecord(one["command"], one["exit_code"], one["duration_sec"], one.get("timed_out", False))
        for one in data.get("commands") or ()
    ]
    asides = [AsideRecord(one["request"], one["answer"]) for one in data.get("asides") or ()]
    return StepRecord(**values, commands=commands, asides=asides)


def episode_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an `EpisodeTrajectory` but `steps`, out of its JSON form.

    Raises:
        ValueError: A field is missing, or is not what it should be.
    """
    _check(_Episode, data)
    error, unfinished = data["error"], data.get("unfinished_step")
    return {
        **{name: data[name] for name in _Episode.model_fields if name in data},
        "outcome": Outcome(data["outcome"]),
        "error": None if error is None else ErrorInfo.from_dict(error),
        "metadata": data.get("metadata") or {},
        "rewards": data.get("rewards") or {},
        "unfinished_step": None if unfinished is None else step_from_dict(unfinished),
    }


def _check(model: type[BaseModel], data: Mapping[str, Any]) -> None:
    try:
        model.__pydantic_validator__.validate_python(data)
    except ValidationError as error:
        raise ValueError(explain_validation(error)) from None
