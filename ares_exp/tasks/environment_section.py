"""The table `[environment]` of task.toml, which sets image, resources, network, tool servers and health check."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ares_exp.containers.network_policy import NetworkMode, NetworkPolicy
from ares_exp.tasks.toml_table import AllowedHost, EnvVars, Seconds, TomlTable

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
