"""The schema of conversations in documents of the Agent Trajectory Interchange Format (ATIF) 1.0 to 1.8.

It contains only the fields that are read. Other fields are ignored. `atif_writer` writes documents.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.validation import explain_validation
from ares_exp.trajectories.records import BROKEN, what_broke

NEWEST_VERSION = "ATIF-v1.8"
VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))

Extra = dict[str, Any] | None


def validate_atif(document: Any) -> None:
    """Validates the conversation in a parsed document.

    Raises:
        TrajectoryFormatError: A required field is missing, or a field is invalid. The message names the field.
    """
    try:
        _Document.model_validate(document)
    except ValidationError as error:
        raise TrajectoryFormatError(f"Expected a valid ATIF document, but {explain_validation(error)}.") from None
    except BROKEN as error:
        raise TrajectoryFormatError(f"Expected a valid ATIF document, but {what_broke(error)}.") from None


class _Read(BaseModel):
    model_config = ConfigDict(strict=True)


class _Source(_Read):
    path: str


class _Text(_Read):
    type: Literal["text"]
    text: str


class _Media(_Read):
    type: Literal["image", "audio"]
    source: _Source


_Content = str | list[Annotated[_Text | _Media, Field(discriminator="type")]]


class _ToolCall(_Read):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: Extra = None


class _Result(_Read):
    source_call_id: str | None = None
    content: _Content | None = None


class _Observation(_Read):
    results: list[_Result]


class _Step(_Read):
    source: Literal["system", "user", "agent"]
    message: _Content
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    extra: Extra = None


class _Document(_Read):
    schema_version: Literal[VERSIONS] = NEWEST_VERSION  # type: ignore[valid-type]
    steps: Annotated[list[_Step], Field(min_length=1)]
