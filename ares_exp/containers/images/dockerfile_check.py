"""Static check of a Dockerfile before a build: errors, and features that need BuildKit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ares_exp.containers.images.dockerfile_instructions import (
    KNOWN,
    Instruction,
    find_syntax,
    instructions,
    read_text,
    split_flags,
    without_heredocs,
)
from ares_exp.errors import TaskError

_FLAGS = {
    "RUN --mount": (1, 2),
    "RUN --network": (1, 3),
    "RUN --security": (1, 20),
    "RUN --device": (1, 14),
    "COPY --chmod": (1, 2),
    "COPY --link": (1, 4),
    "COPY --parents": (1, 20),
    "COPY --exclude": (1, 19),
    "ADD --chmod": (1, 2),
    "ADD --link": (1, 4),
    "ADD --exclude": (1, 19),
    "ADD --checksum": (1, 6),
    "ADD --keep-git-dir": (1, 1),
    "ADD --unpack": (1, 17),
}
"""Flags known only to BuildKit, each with the Dockerfile syntax version that introduced it.

Source: Docker's Dockerfile reference, "Added in docker/dockerfile version".
"""

_HERE_DOCUMENT = (1, 4)
_AUTOMATIC_VALUE = (1, 0)
_AUTOMATIC = re.compile(r"(?:TARGET|BUILD)(?:PLATFORM|OS|ARCH|VARIANT)")


@dataclass(frozen=True, slots=True)
class BuildKitFeature:
    """A feature that the classic builder lacks.

    Attributes:
        name: Its name in messages.
        line: The line of its first use.
        syntax: Version of the Dockerfile syntax that introduced it.
    """

    name: str
    line: int
    syntax: tuple[int, int]


@dataclass(frozen=True, slots=True)
class BuildKitNeeds:
    """The BuildKit features that a Dockerfile needs.

    Attributes:
        features: If empty, the classic builder can build it.
        frontend: The image in its `# syntax=` line.
        custom_frontend: Whether that is not Docker's frontend: the file then cannot be checked.
    """

    features: tuple[BuildKitFeature, ...]
    frontend: str | None
    custom_frontend: bool


def check_dockerfile(path: Path) -> BuildKitNeeds:
    """Reads the Dockerfile at `path`; its folder is the build context.

    Raises:
        TaskError: It cannot be read, has an unknown instruction, or copies a file that is not there.
    """
    text = read_text(path)
    syntax = find_syntax(text)
    if syntax.is_foreign:  # the file may have any format
        foreign = BuildKitFeature(f"the frontend {syntax.frontend}", syntax.line, (1, 0))
        return BuildKitNeeds((foreign,), syntax.frontend, True)
    features: dict[str, BuildKitFeature] = {}
    for instruction in instructions(text):
        name, value, line, _ = instruction
        if name not in KNOWN:
            raise TaskError(f"{path}:{line}: expected a Dockerfile instruction, got {name}.")
        if name in ("COPY", "ADD") and "--from" not in value and not value.lstrip().startswith("["):
            _check_sources(path, line, without_heredocs(value))
        for feature, since in _features(instruction):
            features.setdefault(feature, BuildKitFeature(feature, line, since))
    return BuildKitNeeds(tuple(features.values()), syntax.frontend, False)


def without_syntax_line(text: str) -> str:
    """Returns the Dockerfile for the engine's built-in frontend, with the same line numbers."""
    line, frontend = find_syntax(text)
    lines = text.splitlines(keepends=True)
    return text if frontend is None else "".join((*lines[: line - 1], "#\n", *lines[line:]))


def _features(instruction: Instruction) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the BuildKit features of an instruction, each with the syntax version that introduced it."""
    name, value, _, documents = instruction
    for flag, _ in split_flags(value)[0]:
        if since := _FLAGS.get(f"{name} --{flag}"):
            yield f"{name} --{flag}", since
    if documents:
        yield "a here-document", _HERE_DOCUMENT
    if name == "ARG":  # one with a default also works without BuildKit
        for word in filter(_AUTOMATIC.fullmatch, value.split()):
            yield f"the value of {word}", _AUTOMATIC_VALUE
    elif name == "FROM" and (variable := re.search(rf"\$\{{?({_AUTOMATIC.pattern})\b", value)):
        yield f"the value of {variable[1]}", _AUTOMATIC_VALUE


def _check_sources(path: Path, line: int, value: str) -> None:
    """Refuses sources missing in the context; the engine checks those with globs, variables or a URL."""
    *sources, _ = [word for word in value.split() if not word.startswith("--")] or [""]
    for source in sources:
        if not re.search(r"[*?\[\]$\\:'\"<]", source) and not (path.parent / source.lstrip("/")).exists():
            raise TaskError(f"{path}:{line}: expected {source} in {path.parent}, found no such file.")
