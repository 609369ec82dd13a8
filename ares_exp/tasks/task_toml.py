"""The tables of `task.toml`, their parser with its error messages, and functions that find problems to warn about.

The problems are unsupported features, and keys that are unknown, have no effect, or have an old name.
"""

from __future__ import annotations

import math
import re
import reprlib
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ares_exp.containers.network_policy import NetworkMode, NetworkPolicy, normalise_host
from ares_exp.errors import TaskError
from ares_exp.tasks.verification.link_bounds import LinkBounds

REMEDY = "Correct the value, or remove the key to get its default."


def _not_negative(seconds: float) -> float:
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"expected a number of seconds, 0 or more, got {seconds}")
    return seconds


Seconds = Annotated[float, AfterValidator(_not_negative)]
"""A duration in seconds, which may be 0 or infinite. Unlike in Harbor, it must not be negative."""

User = str | int
EnvVars = dict[str, str]


class TomlTable(BaseModel):
    """Base class of the tables of task.toml.

    A key with a number also accepts a string such as `"60"`, but a key with a string does not accept a number. Unknown
    keys have no effect. `unknown_keys` returns them for warnings.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown_keys(self) -> list[str]:
        """Returns the unknown keys in this table and its nested tables, as dotted names such as `verifier.color`."""
        return [*(self.model_extra or {}), *_unknown_below(self)]


def _unknown_below(table: TomlTable) -> Iterator[str]:
    for name in type(table).model_fields:
        value = getattr(table, name)
        items = {f"{name}[{i}]": item for i, item in enumerate(value)} if isinstance(value, tuple) else {name: value}
        for place, item in items.items():
            if isinstance(item, TomlTable):
                yield from (f"{place}.{key}" for key in item.unknown_keys())


def explain(error: ValidationError, raw: object, *, root: str = "task.toml") -> str:
    """Returns a description of each invalid field of `raw`: its name, its expected value and its actual value.

    `raw` is the data that failed the validation. `root` is its name in the message, such as `task.toml`.
    """
    by_field: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False):
        field = _field(item["loc"], raw, missing=item["type"] == "missing") or root
        by_field.setdefault(field, []).append(_expectation(item["type"], item["msg"], item["input"]))
    return "; ".join(f"{field}: {' or '.join(dict.fromkeys(texts))}" for field, texts in by_field.items())


def _field(location: Sequence[str | int], raw: object, *, missing: bool) -> str:
    """Returns the dotted name of a field from its `location` in a pydantic error, without names of union members."""
    parts: list[str] = []
    for key in location:
        is_item = isinstance(raw, list) and isinstance(key, int) and key < len(raw)
        present = is_item or (isinstance(raw, dict) and key in raw)
        if present or missing:
            parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
        if not present:
            break
        raw = raw[key]  # type: ignore[index]
    return "".join(parts).removeprefix(".")


def _expectation(kind: str, message: str, found: object) -> str:
    if kind == "missing":
        return "this key is required"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{message.replace('Input should be', 'expected')}, got {reprlib.repr(found)} ({type(found).__name__})"


AllowedHost = Annotated[str, AfterValidator(normalise_host)]


class PhaseTable(TomlTable):
    """A table that may set the network of one phase (`[agent]`, `[verifier]`)."""

    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[AllowedHost, ...] | None = None

    @model_validator(mode="after")
    def _hosts_need_a_mode(self) -> Self:
        if self.network is None and self.allowed_hosts is not None:
            raise ValueError('allowed_hosts needs network_mode = "allowlist", got no network_mode')
        return self

    @property
    def network(self) -> NetworkPolicy | None:
        """Network policy of this phase; `None` if this table sets no `network_mode`, so that another table applies."""
        mode = self.network_mode
        return None if mode is None else NetworkPolicy(mode, frozenset(self.allowed_hosts or ()))


_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])(\..*)?", re.IGNORECASE)


def check_step_name(name: str) -> str:
    """Returns `name` unchanged. Raises `ValueError` if some operating systems do not allow it as a directory name."""
    checks = (
        (not name.strip(), "is blank"),
        (name in (".", ".."), "means another directory"),
        (name.endswith((".", " ")), "ends in a dot or a space"),
        (_FORBIDDEN.search(name) is not None, "contains a character that some file systems reject"),
        (_DEVICES.fullmatch(name) is not None, "is the name of a Windows device"),
        (len(name.encode()) > 255, "is longer than 255 bytes"),
    )
    for wrong, complaint in checks:
        if wrong:
            raise ValueError(f"expected a portable directory name, got {name!r}, which {complaint}")
    return name


def check_unique(names: Iterable[str]) -> None:
    """Raises `ValueError` if two names are equal, ignoring case and Unicode normalisation."""
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", name).casefold()
        if key in seen:
            raise ValueError(f"expected different step names, got {seen[key]!r} and {name!r}")
        seen[key] = name


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REFERENCE = r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-)?\}"
_REFERENCES_ONLY = re.compile(rf"\s*([A-Za-z]+\s+)?{_REFERENCE}([\s:-]*{_REFERENCE})*\s*")
_DEFAULT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*):-[^}]+\}")
_CREDENTIAL = re.compile(r"key|secret|token(?!s)|password|credential|auth|^(set-)?cookie2?$", re.IGNORECASE)


class McpServer(TomlTable):
    """An entry of `mcp_servers`: an MCP server whose tools the agent may use."""

    name: str
    transport: Annotated[
        Literal["sse", "streamable-http", "stdio"],
        BeforeValidator(lambda value: "streamable-http" if value == "http" else value),
    ] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_what_its_transport_needs(self) -> Self:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f'transport = "{self.transport}" needs {needed}, which is missing')
        if self.headers and self.transport == "stdio":
            raise ValueError('headers need an HTTP transport, got transport = "stdio"')
        for name, value in self.headers.items():
            _check_header(name, value)
        return self


def _check_header(name: str, value: str) -> None:
    """Raises `ValueError` if an HTTP header is malformed or contains a credential in plain text."""
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"expected a header name of letters, digits and hyphens, got {name!r}")
    if "\n" in value or "\r" in value:
        raise ValueError(f"expected the value of header {name!r} to be on one line, got a line break")
    is_literal = bool(value.strip()) and not _REFERENCES_ONLY.fullmatch(value)
    has_default = any(_CREDENTIAL.search(variable) for variable in _DEFAULT.findall(value))
    if has_default or (_CREDENTIAL.search(name) and is_literal):
        raise ValueError(
            f"header {name!r} looks like a credential. Replace its text with a reference to a host variable, "
            'such as "Bearer ${API_KEY}"'
        )


_UNITS_IN_MB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def _size_mb(key: str, text: str) -> int:
    size = text.strip().upper()
    try:
        megabytes = float(size[:-1]) * _UNITS_IN_MB[size[-1:]]
    except (KeyError, ValueError):
        megabytes = math.nan
    if not math.isfinite(megabytes):
        raise ValueError(f'{key}: expected a number followed by G, M or K (such as "2G"), got {text!r}')
    return int(megabytes)


def translate_legacy_sizes(table: object) -> object:
    """Replaces the old keys `memory` and `storage`. For example, `memory = "2G"` becomes `memory_mb = 2048`.

    An old key whose value is not a string is dropped, because it is not a size.

    Raises:
        ValueError: The string is not a size, or differs from the value of the new key.
    """
    if not isinstance(table, Mapping):
        return table
    new: dict[str, Any] = dict(table)
    for old_key, key in (("memory", "memory_mb"), ("storage", "storage_mb")):
        size = new.pop(old_key, None)
        if isinstance(size, str):
            megabytes = _size_mb(old_key, size)
            if new.setdefault(key, megabytes) != megabytes:
                raise ValueError(f"{old_key} = {size!r} contradicts {key} = {new[key]!r}. Keep only {key}")
    return new


def _whole_as_int(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number of cpus, got {number}")
    return int(number) if number == int(number) else number


def _topology(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)+", text):
        raise ValueError(f'expected two or more positive integers joined by x (such as "2x4"), got {text!r}')
    return text


class Tpu(TomlTable):
    """The key `tpu`, which requests TPUs by their type and the topology of their chips, such as `2x4`."""

    type: Annotated[str, Field(min_length=1)]
    topology: Annotated[str, AfterValidator(_topology)]


class HealthCheck(TomlTable):
    """The key `healthcheck`, which sets a command that must succeed before the agent starts."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Seconds = 0.0
    start_interval_sec: Seconds = 5.0
    retries: int = 3


class EnvironmentSection(TomlTable):
    """The table `[environment]`, which describes the agent's container. `[verifier.environment]` has the same keys."""

    docker_image: str | None = None
    os: Annotated[
        Literal["linux", "windows"], BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
    ] = "linux"
    build_timeout_sec: Seconds = 600.0
    cpus: Annotated[float, AfterValidator(_whole_as_int)] | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: Tpu | None = None
    workdir: str | None = None
    env: EnvVars = Field(default_factory=dict)
    mcp_servers: tuple[McpServer, ...] = ()
    skills_dir: str | None = None
    healthcheck: HealthCheck | None = None
    network_mode: NetworkMode = "public"
    allowed_hosts: tuple[AllowedHost, ...] | None = None
    allow_internet: bool | None = None

    _legacy_sizes = model_validator(mode="before")(translate_legacy_sizes)

    @model_validator(mode="after")
    def _hosts_fit_the_mode(self) -> Self:
        _ = self.network  # raises if hosts are set with a mode that does not use them
        return self

    @property
    def network(self) -> NetworkPolicy:
        """The network policy that follows from `network_mode`, `allowed_hosts` and the old key `allow_internet`."""
        legacy_off = self.allow_internet is False and not {"network_mode", "allowed_hosts"} & self.model_fields_set
        mode: NetworkMode = "no-network" if legacy_off else self.network_mode
        return NetworkPolicy(mode, frozenset(self.allowed_hosts or ()))


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
