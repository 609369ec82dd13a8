"""The features of a Harbor task that are refused, or deserve a warning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ares_exp.tasks.environment_section import EnvironmentSection
from ares_exp.tasks.task_toml import ParsedToml, TaskToml


def refusals(config: TaskToml) -> list[str]:
    """Features that the task uses and that are not supported, each with the field that asks for it."""
    return [feature for name, environment in _environments(config) for feature in _refused(name, environment)]


def _refused(name: str, environment: EnvironmentSection) -> Iterator[str]:
    if environment.os != "linux":
        yield f'operating system "{environment.os}" ([{name}].os)'
    if environment.tpu is not None:
        yield f"TPUs ([{name}].tpu)"


def _environments(config: TaskToml) -> Iterator[tuple[str, EnvironmentSection]]:
    """Lists every environment that the task describes, with the name of its table."""
    yield "environment", config.environment
    owners = [("verifier", config.verifier)]
    owners += [(f"steps[{number}].verifier", step.verifier) for number, step in enumerate(config.steps)]
    yield from ((f"{name}.environment", owner.environment) for name, owner in owners if owner.environment is not None)


def warnings_of(parsed: ParsedToml) -> list[str]:
    """Keys of task.toml that are ignored, dropped, or spelt as in old versions of the format."""
    found = [f"unknown key {key} is ignored" for key in parsed.config.unknown_keys()]
    if "version" in parsed.raw:
        found.append("version is the old name of schema_version")
    for name, table in _environment_tables(parsed.raw):
        found += [f"{name}.{text}" for text in _environment_warnings(table)]
    return found


def _environment_tables(raw: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Lists every table of a validated task.toml that has the keys of `[environment]`, with its dotted name."""
    owners = [("", raw), ("verifier.", raw.get("verifier", {}))]
    owners += [(f"steps[{i}].verifier.", step.get("verifier", {})) for i, step in enumerate(raw.get("steps", []))]
    return ((f"{prefix}environment", owner["environment"]) for prefix, owner in owners if "environment" in owner)


def _environment_warnings(table: Mapping[str, Any]) -> Iterator[str]:
    for key in ("memory", "storage"):
        if isinstance(table.get(key), str):
            yield f"{key} is the old name of {key}_mb"
        elif key in table:
            yield f"{key} = {table[key]!r} is no size string and sets no limit; write {key}_mb = {table[key]!r}"
    if "allow_internet" in table:
        yield from _internet_warnings(table)
    if table.get("gpu_types"):
        yield "gpu_types is not enforced"


def _internet_warnings(table: Mapping[str, Any]) -> Iterator[str]:
    if "network_mode" in table:
        yield "allow_internet is ignored beside network_mode"
    elif table.get("allowed_hosts") == [] and not table["allow_internet"]:
        yield 'allow_internet = false does nothing beside allowed_hosts = []; write network_mode = "no-network"'
    else:
        yield "allow_internet is the old spelling of network_mode"
