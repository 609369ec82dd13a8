"""What a Harbor task asks for that is refused, and what in it deserves a warning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ares_exp.tasks.task_files import COMPOSE
from ares_exp.tasks.task_toml import ParsedToml, TaskToml


def refusals(root: Path, config: TaskToml) -> list[str]:
    """Features that the task uses and that are not supported, each with the field or file that asks for it."""
    return [*_refused_fields(config), *_refused_files(root)]


def _refused_fields(config: TaskToml) -> Iterator[str]:
    environment, verifier = config.environment, config.verifier
    checks: list[tuple[object, str]] = [
        (config.steps, "multi-step tasks ([[steps]])"),
        (config.artifacts, "artifacts (artifacts)"),
        (verifier.mode == "separate", _separate_verifier(config)),
        (verifier.collect, "collect hooks ([[verifier.collect]])"),
        (environment.os != "linux", f'operating system "{environment.os}" ([environment].os)'),
        (environment.tpu, "TPUs ([environment].tpu)"),
        (environment.healthcheck, "health checks ([environment.healthcheck])"),
        (environment.mcp_servers, "MCP servers ([[environment.mcp_servers]])"),
        (environment.skills_dir, "skills ([environment].skills_dir)"),
    ]
    return (feature for used, feature in checks if used)


def _separate_verifier(config: TaskToml) -> str:
    field = "[verifier.environment]" if config.verifier.environment_mode is None else "[verifier].environment_mode"
    return f"a verifier environment of its own ({field})"


def _refused_files(root: Path) -> Iterator[str]:
    if (root / "environment" / COMPOSE).exists():
        yield f"Docker Compose (environment/{COMPOSE})"
    if (root / "trajectory.json").exists():
        yield "prior context (trajectory.json)"
    for folder in ("tests", "solution"):
        for path in sorted((root / folder).rglob(".harborignore")):
            yield f"upload filters ({path.relative_to(root).as_posix()})"


def warnings_of(parsed: ParsedToml) -> list[str]:
    """Keys of task.toml that are ignored, dropped, or spelt as in old versions of the format."""
    found = [f"unknown key {key} is ignored" for key in parsed.config.unknown_keys()]
    if "version" in parsed.raw:
        found.append("version is the old name of schema_version")
    for name, table in _environment_tables(parsed.raw):
        found += [f"{name}.{text}" for text in _environment_warnings(table)]
    return found


def _environment_tables(raw: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every table of a validated task.toml that has the keys of `[environment]`, with its dotted name."""
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
