"""The tables of `task.toml`, their parser, and functions that find unsupported features and keys to warn about."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from ares_exp.errors import TaskError
from ares_exp.tasks.environment_section import EnvironmentSection, HealthCheck
from ares_exp.tasks.toml_table import (
    REMEDY,
    EnvVars,
    PhaseTable,
    Seconds,
    TomlTable,
    User,
    check_step_name,
    check_unique,
    explain,
)
from ares_exp.tasks.verification.link_bounds import LinkBounds

MAIN_SERVICE = "main"


def _service(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(f"expected a service name of letters, digits, '_', '.' and '-', got {name!r}")
    return name


def _source(path: str) -> str:
    if ".." in PurePosixPath(path).parts:
        raise ValueError(f"expected a path without '..', got {path!r}")
    return path


def _destination(path: str) -> str | None:
    if path == "":
        return None
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\\" in path or str(parts) in (".", "manifest.json"):
        raise ValueError(f"expected a relative path other than manifest.json, without '..' or backslash, got {path!r}")
    return path


class Artifact(TomlTable):
    """A file or directory to copy from the container. Instead of a table, an entry may be only the `source` string."""

    source: Annotated[str, AfterValidator(_source)]
    destination: Annotated[str, AfterValidator(_destination)] | None = None
    exclude: tuple[str, ...] = ()
    service: Annotated[str, AfterValidator(_service)] = MAIN_SERVICE

    @model_validator(mode="after")
    def _absolute_for_other_services(self) -> Self:
        if self.service != MAIN_SERVICE and not self.source.startswith("/"):
            raise ValueError(f"expected an absolute source for service {self.service!r}, got {self.source!r}")
        return self


Artifacts = tuple[
    Annotated[Artifact, BeforeValidator(lambda entry: {"source": entry} if isinstance(entry, str) else entry)], ...
]


class CollectHook(TomlTable):
    """An entry of `[[verifier.collect]]`: a command that runs before the artifacts are collected."""

    command: str
    service: str = MAIN_SERVICE
    timeout_sec: Seconds = 60.0
    user: User | None = None


TASK_TOML = "task.toml"

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
"""The supported values of `schema_version`."""

VerifierMode = Literal["shared", "separate"]


def _package_name(name: str) -> str:
    half = r"[A-Za-z0-9][A-Za-z0-9._-]*"
    if not re.fullmatch(f"{half}/{half}", name) or ".." in name:
        raise ValueError(f'expected "organisation/name" (letters, digits, ".", "_", "-"), got {name!r}')
    return name


class Author(TomlTable):
    """An entry of `[task].authors`."""

    name: str
    email: str | None = None


class PackageSection(TomlTable):
    """The table `[task]`, which describes the task as a package."""

    name: Annotated[str, AfterValidator(_package_name)]
    version: Annotated[str, Field(min_length=1)] | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()


class AgentSection(PhaseTable):
    """The table `[agent]`, which sets the agent's time limit, user and network. By default, the time is unlimited."""

    timeout_sec: Seconds | None = None
    user: User | None = None


class VerifierSection(PhaseTable):
    """The table `[verifier]`, which configures the tests."""

    timeout_sec: Seconds = 600.0
    env: EnvVars = Field(default_factory=dict)
    user: User | None = None
    environment_mode: VerifierMode | None = None
    environment: EnvironmentSection | None = None
    collect: tuple[CollectHook, ...] = ()

    @model_validator(mode="after")
    def _shared_has_no_environment(self) -> Self:
        if self.environment is not None and self.environment_mode == "shared":
            raise ValueError('[verifier.environment] needs environment_mode = "separate", got "shared"')
        return self

    @property
    def mode(self) -> VerifierMode:
        """`shared` if the tests run in the agent's container; `separate` if they run in a separate container."""
        return self.environment_mode or ("separate" if self.environment is not None else "shared")


class SolutionSection(TomlTable):
    """The table `[solution]`, which sets the environment variables of the solution script."""

    env: EnvVars = Field(default_factory=dict)


class Step(TomlTable):
    """An entry of `[[steps]]`: one step of a task, with its own agent, tests and artifacts."""

    name: Annotated[str, AfterValidator(check_step_name)]
    agent: AgentSection = Field(default_factory=AgentSection)
    verifier: VerifierSection = Field(default_factory=VerifierSection)
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthCheck | None = None
    artifacts: Artifacts = ()


class TaskToml(TomlTable):
    """The content of a task.toml. Every key has a default, so an empty file is valid."""

    schema_version: str = "1.4"
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: Artifacts = ()
    steps: tuple[Step, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict)
    task: PackageSection | None = None
    agent: AgentSection = Field(default_factory=AgentSection)
    verifier: VerifierSection = Field(default_factory=VerifierSection)
    solution: SolutionSection = Field(default_factory=SolutionSection)
    environment: EnvironmentSection = Field(default_factory=EnvironmentSection)

    @model_validator(mode="before")
    @classmethod
    def _legacy_version(cls, raw: dict[str, Any]) -> dict[str, Any]:
        version = {"schema_version": raw["version"]} if "version" in raw else {}
        return {**version, **{key: value for key, value in raw.items() if key != "version"}}

    @model_validator(mode="after")
    def _steps_are_told_apart(self) -> Self:
        check_unique(step.name for step in self.steps)
        return self


@dataclass(frozen=True, slots=True)
class ParsedToml:
    """The content of a task.toml, both as parsed TOML (`raw`) and validated (`config`)."""

    raw: Mapping[str, Any]
    config: TaskToml


def parse_task_toml(text: str, *, path: Path) -> ParsedToml:
    """Parses and validates the text of the task.toml at `path`. Raises a `TaskError` that names each invalid field."""
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TaskError(f"{path}: invalid TOML 1.0: {error}. Correct the file.") from None
    try:
        return ParsedToml(raw, TaskToml.model_validate(raw))
    except ValidationError as error:
        raise TaskError(f"{path}: {explain(error, raw)}. {REMEDY}") from None


def read_task_toml(path: Path, bounds: LinkBounds) -> ParsedToml:
    """Reads the task.toml at `path`. Raises `TaskError` if it is missing, invalid, or outside of `bounds`."""
    try:
        return parse_task_toml(bounds.read_text(path), path=path)
    except FileNotFoundError:
        raise TaskError(f"{path}: this file is missing. A task is a directory with a task.toml.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read as UTF-8 text: {error}.") from None


def refusals(config: TaskToml) -> list[str]:
    """Returns the unsupported features of a task, each with its key, such as `TPUs ([environment].tpu)`."""
    tables = {
        "environment": config.environment,
        "verifier.environment": config.verifier.environment,
        **{f"steps[{i}].verifier.environment": step.verifier.environment for i, step in enumerate(config.steps)},
    }
    found = []
    for name, environment in tables.items():
        if environment is not None and environment.os != "linux":
            found.append(f'operating system "{environment.os}" ([{name}].os)')
        if environment is not None and environment.tpu is not None:
            found.append(f"TPUs ([{name}].tpu)")
    return found


def warnings_of(parsed: ParsedToml) -> list[str]:
    """Returns warnings about keys of task.toml that are unknown, have no effect, or have an old name."""
    found = [f"unknown key {key} is ignored" for key in parsed.config.unknown_keys()]
    if "version" in parsed.raw:
        found.append("version is the old name of schema_version")
    if (version := parsed.config.schema_version) not in VERSIONS:
        found.append(f'schema_version "{version}" is unknown, expected {VERSIONS[0]} to {VERSIONS[-1]}')
    owners = {
        "": parsed.raw,
        "verifier.": parsed.raw.get("verifier", {}),
        **{f"steps[{i}].verifier.": step.get("verifier", {}) for i, step in enumerate(parsed.raw.get("steps", []))},
    }
    for prefix, owner in owners.items():
        found += [f"{prefix}environment.{text}" for text in _environment_warnings(owner.get("environment", {}))]
    return found


def _environment_warnings(table: Mapping[str, Any]) -> Iterator[str]:
    for key in ("memory", "storage"):
        if isinstance(table.get(key), str):
            yield f"{key} is the old name of {key}_mb"
        elif key in table:
            yield f"{key} = {table[key]!r} is not a text such as '2G', so it is ignored. Use {key}_mb = {table[key]!r}"
    if "allow_internet" in table and "network_mode" in table:
        yield "allow_internet is ignored because network_mode is set"
    elif "allow_internet" in table and table.get("allowed_hosts") == [] and not table["allow_internet"]:
        yield 'allow_internet = false has no effect with allowed_hosts = []. Use network_mode = "no-network"'
    elif "allow_internet" in table:
        yield "allow_internet is the old spelling of network_mode"
    if table.get("gpu_types"):
        yield "gpu_types is not enforced"
