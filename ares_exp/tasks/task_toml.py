"""task.toml of the Harbor task format, every field of it, as pydantic models."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from ares_exp.errors import TaskError
from ares_exp.tasks.artifact import Artifacts, CollectHook
from ares_exp.tasks.environment_section import EnvironmentSection, HealthCheck
from ares_exp.tasks.step_name import check_step_name, check_unique
from ares_exp.tasks.task_network import PhaseTable
from ares_exp.tasks.toml_table import REMEDY, EnvVars, Seconds, TomlTable, User, explain
from ares_exp.tasks.verification.link_bounds import LinkBounds

TASK_TOML = "task.toml"

VerifierMode = Literal["shared", "separate"]


def _package_name(name: str) -> str:
    half = r"[A-Za-z0-9][A-Za-z0-9._-]*"
    if not re.fullmatch(f"{half}/{half}", name) or ".." in name:
        raise ValueError(f'expected "organisation/name" (letters, digits, ".", "_", "-"), got {name!r}')
    return name


class Author(TomlTable):
    """One entry of `[task].authors`."""

    name: str
    email: str | None = None


class PackageSection(TomlTable):
    """`[task]`: the task's identity as a package."""

    name: Annotated[str, AfterValidator(_package_name)]
    version: Annotated[str, Field(min_length=1)] | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()


class AgentSection(PhaseTable):
    """`[agent]`: limits of the agent phase. No `timeout_sec` means no limit."""

    timeout_sec: Seconds | None = None
    user: User | None = None


class VerifierSection(PhaseTable):
    """`[verifier]`: how the tests are run."""

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
        """The container of the tests: the agent's, or a separate one."""
        return self.environment_mode or ("separate" if self.environment is not None else "shared")


class SolutionSection(TomlTable):
    """`[solution]`: variables of the solution script."""

    env: EnvVars = Field(default_factory=dict)


class Step(TomlTable):
    """One entry of `[[steps]]`."""

    name: Annotated[str, AfterValidator(check_step_name)]
    agent: AgentSection = Field(default_factory=AgentSection)
    verifier: VerifierSection = Field(default_factory=VerifierSection)
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthCheck | None = None
    artifacts: Artifacts = ()


class TaskToml(TomlTable):
    """A whole task.toml. Every key has a default: an empty file is valid."""

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
    """A task.toml as written and as understood."""

    raw: Mapping[str, Any]
    config: TaskToml


def parse_task_toml(text: str, *, path: Path) -> ParsedToml:
    """Parses and validates the text of a task.toml; `path` is for messages.

    Raises:
        TaskError: No TOML, or a field is wrong; the message names each.
    """
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TaskError(f"{path}: expected TOML 1.0, got an error at: {error}. Correct the file.") from None
    try:
        return ParsedToml(raw, TaskToml.model_validate(raw))
    except ValidationError as error:
        raise TaskError(f"{path}: {explain(error, raw)}. {REMEDY}") from None


def read_task_toml(path: Path, bounds: LinkBounds) -> ParsedToml:
    """Reads and parses the task.toml at `path`.

    Raises:
        TaskError: The file is missing, unreadable, not UTF-8, invalid, or behind a link that leaves the bounds.
    """
    try:
        return parse_task_toml(bounds.read_text(path), path=path)
    except FileNotFoundError:
        raise TaskError(f"{path}: expected this file, found none. A task is a directory with a task.toml.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: expected readable UTF-8 text, got: {error}.") from None
