"""Artifact entries and collect hooks of task.toml: what to fetch from the container after the agent."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from ares_exp.tasks.toml_table import Seconds, TomlTable, User

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
    """A file or directory of the container to fetch; in the file also written as a bare string."""

    source: Annotated[str, AfterValidator(_source)]
    destination: Annotated[str, AfterValidator(_destination)] | None = None
    exclude: tuple[str, ...] = ()
    service: Annotated[str, AfterValidator(_service)] = MAIN_SERVICE

    @model_validator(mode="after")
    def _absolute_for_other_services(self) -> Self:
        if self.service != MAIN_SERVICE and not self.source.startswith("/"):
            raise ValueError(f"expected an absolute source for service {self.service!r}, got {self.source!r}")
        return self


def _as_table(entry: object) -> object:
    return {"source": entry} if isinstance(entry, str) else entry


Artifacts = tuple[Annotated[Artifact, BeforeValidator(_as_table)], ...]


class CollectHook(TomlTable):
    """`[[verifier.collect]]`: a command to run before artifacts are fetched."""

    command: str
    service: str = MAIN_SERVICE
    timeout_sec: Seconds = 60.0
    user: User | None = None
