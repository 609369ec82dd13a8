"""The nested parts of a snapshot's metadata. Each function gives them back, or raises `SnapshotMetadataError`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ares_exp.errors import SnapshotMetadataError
from ares_exp.snapshots.checked_json import Fields


def time_step(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The pending time step."""
    get = Fields(data, f"{where}: in `time_step`")
    get.text("step_type", choices=("FIRST", "MID"))
    get.optional_number("reward")
    get.optional_number("discount")
    return data


def resources(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The container's limits, each a number or `null`."""
    get = Fields(data, f"{where}: in `container_resources`")
    for name in data:
        get.optional_number(name)
    return data


def container(data: dict[str, Any], where: str) -> dict[str, Any]:
    """What is told of the container; whatever is missing is not known."""
    get = Fields(data, f"{where}: in `container`")
    checks: dict[str, Callable[[str], object]] = {
        "options": get.table,
        "workdir": get.optional_text,
        "env_names": get.texts,
        "processes": get.items,
        "not_captured": get.texts,
    }
    return _checked(data, checks)


def agent(data: dict[str, Any], where: str) -> dict[str, Any]:
    """What is told of the agent; whatever is missing is not known."""
    get = Fields(data, f"{where}: in `agent`")
    checks: dict[str, Callable[[str], object]] = {
        "factory": get.text,
        "options": get.table,
        "source_digest": get.optional_text,
        "state": get.optional_digest,
        "state_version": get.optional_integer,
    }
    return _checked(data, checks)


def episode(data: dict[str, Any], where: str) -> dict[str, Any]:
    """What is told of the episode: stages that are over name objects; the rest is checked where it is used."""
    for stage in Fields(data, f"{where}: in `episode`").items("past_stages") if "past_stages" in data else ():
        if not isinstance(stage, dict):
            raise SnapshotMetadataError(f"{where}: expected tables in `past_stages`, got a {type(stage).__name__}.")
        Fields(stage, f"{where}: in `past_stages`").digests("journal")
    return data


def _checked(data: dict[str, Any], checks: Mapping[str, Callable[[str], object]]) -> dict[str, Any]:
    for name in data.keys() & checks.keys():
        checks[name](name)
    return data
