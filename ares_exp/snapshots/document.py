"""The fields of snapshot.json: the type and the bounds of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ares_exp.errors import SnapshotMetadataError
from ares_exp.records.validation import Table, Text, explain_validation

Count = Annotated[int, Field(ge=0, lt=2**63)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""The sha256 of an object's content: its name."""
Digests = Annotated[tuple[Digest, ...], Field(strict=False)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]


def _in_utc(time: str) -> str:
    try:
        if datetime.fromisoformat(time).utcoffset() == timedelta(0):
            return time
    except ValueError:
        pass
    raise ValueError("expected a time in UTC with its offset, such as 2026-01-31T12:00:00+00:00")


def _absolute(path: str) -> str:
    try:
        if os.fsencode(path).startswith(b"/") and "\0" not in path:
            return path
    except UnicodeError:
        pass
    raise ValueError("expected an absolute path")


def _false(value: bool) -> bool:
    if value:
        raise ValueError("expected false")
    return value


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True)


class _TimeStep(_Fields):
    step_type: Literal["FIRST", "MID"]
    reward: float | None
    discount: float | None


class _Container(_Fields):
    """Facts of the container; a missing one is not known."""

    options: Table = Field(default_factory=dict)
    workdir: Text | None = None
    env_names: Texts = ()
    processes: Annotated[tuple[Any, ...], Field(strict=False)] = ()
    not_captured: Texts = ()


class _Agent(_Fields):
    """Facts of the agent; a missing one is not known."""

    factory: Text = ""
    options: Table = Field(default_factory=dict)
    source_digest: Text | None = None
    state: Digest | None = None
    state_version: Count | None = None


class _PastStage(_Fields):
    journal: Digests


class _Episode(_Fields):
    """Finished stages name objects; other facts are checked where they are used (`EpisodeFacts`)."""

    past_stages: Annotated[tuple[_PastStage, ...], Field(strict=False)] = ()


class _Document(_Fields):
    """As in `EnvironmentSnapshot`."""

    snapshot_id: Text
    created_at: Annotated[str, AfterValidator(_in_utc)]
    step_count: Count
    step_limit: Count | None
    task_type: Text
    task_data: Table
    container_type: Text
    container_image: Text | None
    container_dockerfile_path: Text | None
    container_resources: dict[str, float | None]
    time_step: _TimeStep
    message_objects: Digests
    journal: Digests
    journal_entries: Count
    filesystem: Digests
    filesystem_base: Text
    filesystem_entries: Count
    filesystem_bytes: Count
    container: _Container
    agent: _Agent
    episode: _Episode
    lineage: Table
    writer: Table
    requires_reset: Annotated[bool, AfterValidator(_false)]


class _Place(_Fields):
    snapshot_dir: Annotated[str, AfterValidator(_absolute)]


def check_document(data: Mapping[str, Any], where: str) -> None:
    """Checks the fields of a snapshot.json.

    Raises:
        SnapshotMetadataError: One is missing, has another type, or is out of its bounds.
    """
    _check(_Document, data, where)


def place_of(data: Mapping[str, Any], where: str) -> Path:
    """Returns the snapshot's directory as a copy of its snapshot.json says it. Raises as `check_document` does."""
    _check(_Place, data, where)
    return Path(data["snapshot_dir"])


def _check(model: type[BaseModel], data: Mapping[str, Any], where: str) -> None:
    try:
        model.model_validate(data)
    except ValidationError as error:
        raise SnapshotMetadataError(f"{where}: {explain_validation(error)}.") from None
