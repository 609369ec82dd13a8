"""`[[environment.mcp_servers]]` of task.toml."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ares_exp.tasks.toml_table import TomlTable

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REFERENCE = r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-)?\}"
_REFERENCES_ONLY = re.compile(rf"\s*([A-Za-z]+\s+)?{_REFERENCE}([\s:-]*{_REFERENCE})*\s*")
_DEFAULT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*):-[^}]+\}")
_CREDENTIAL = re.compile(r"key|secret|token(?!s)|password|credential|auth|^(set-)?cookie2?$", re.IGNORECASE)


def _transport(value: object) -> object:
    return "streamable-http" if value == "http" else value


class McpServer(TomlTable):
    """A tool server that the agent may use."""

    name: str
    transport: Annotated[Literal["sse", "streamable-http", "stdio"], BeforeValidator(_transport)] = "sse"
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
    """Refuses what is no header, and credentials that are written out."""
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"expected a header name of letters, digits and hyphens, got {name!r}")
    if "\n" in value or "\r" in value:
        raise ValueError(f"expected the value of header {name!r} on one line, got a line break")
    is_literal = bool(value.strip()) and not _REFERENCES_ONLY.fullmatch(value)
    has_default = any(_CREDENTIAL.search(variable) for variable in _DEFAULT.findall(value))
    if has_default or (_CREDENTIAL.search(name) and is_literal):
        raise ValueError(
            f"header {name!r} looks like a credential: expected references to host variables only "
            '(such as "Bearer ${API_KEY}"), got literal text'
        )
