"""What is wrong with a Dockerfile, as far as reading it tells, and whether it needs BuildKit: found before a build."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ares_exp.containers.dockerfile.instructions import KNOWN, find_syntax, heredocs, instructions, read_text
from ares_exp.errors import TaskError

_FLAGS = {
    "RUN --mount": "RUN --mount=type=cache,target=/c true",
    "RUN --network": "RUN --network=none true",
    "RUN --security": "RUN --security=sandbox true",
    "RUN --device": "RUN --device=vendor.invalid/device=one true",
    "COPY --chmod": "COPY --chmod=755 a /a",
    "COPY --link": "COPY --link a /a",
    "COPY --parents": "COPY --parents a /a",
    "COPY --exclude": "COPY --exclude=b a /a",
    "ADD --chmod": "ADD --chmod=755 a /a",
    "ADD --link": "ADD --link a /a",
    "ADD --exclude": "ADD --exclude=b a /a",
    "ADD --checksum": f"ADD --checksum=sha256:{'0' * 64} http://host.invalid/a /a",
    "ADD --keep-git-dir": "ADD --keep-git-dir=true https://host.invalid/a.git /a",
    "ADD --unpack": "ADD --unpack=true a /a",
}
"""Flags that only BuildKit knows, each with an instruction that has it."""

_AUTOMATIC = re.compile(r"(?:TARGET|BUILD)(?:PLATFORM|OS|ARCH|VARIANT)")


@dataclass(frozen=True, slots=True)
class BuildKitFeature:
    """Something that the classic builder cannot do.

    Attributes:
        name: As a user would call it.
        line: Where it stands first.
        sample: A short instruction that uses it.
    """

    name: str
    line: int
    sample: str


@dataclass(frozen=True, slots=True)
class BuildKitNeeds:
    """What a Dockerfile asks of BuildKit.

    Attributes:
        features: None of them: the classic builder builds it.
        frontend: The image that its `# syntax=` line names.
        custom_frontend: Whether that is another one than Docker's own, without which the file may mean anything.
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
    if syntax.is_foreign:  # the file need not even be a Dockerfile
        foreign = BuildKitFeature(f"the frontend {syntax.frontend}", syntax.line, "")
        return BuildKitNeeds((foreign,), syntax.frontend, True)
    features: dict[str, BuildKitFeature] = {}
    for name, value, line in instructions(text):
        if name not in KNOWN:
            raise TaskError(f"{path}:{line}: expected a Dockerfile instruction, got {name}.")
        if name in ("COPY", "ADD") and "--from" not in value and not value.lstrip().startswith("["):
            _check_sources(path, line, value)
        for feature, sample in _features(name, value):
            features.setdefault(feature, BuildKitFeature(feature, line, sample))
    return BuildKitNeeds(tuple(features.values()), syntax.frontend, False)


def without_syntax_line(text: str) -> str:
    """The same Dockerfile, for the frontend inside the engine; its lines keep their numbers."""
    line, frontend = find_syntax(text)
    lines = text.splitlines(keepends=True)
    return text if frontend is None else "".join((*lines[: line - 1], "#\n", *lines[line:]))


def _features(name: str, value: str) -> Iterator[tuple[str, str]]:
    """What of BuildKit an instruction uses, each with a sample."""
    for flag in re.findall(r"(?:^|\s)--([a-z-]+)", _leading_flags(value)):
        if sample := _FLAGS.get(f"{name} --{flag}"):
            yield f"{name} --{flag}", sample
    if heredocs(name, value):
        yield "a here-document", "COPY <<E /e\nE"
    if name == "ARG":  # one with a default is not empty without BuildKit, and may be meant for both
        for word in filter(_AUTOMATIC.fullmatch, value.split()):
            yield f"the value of {word}", f"ARG {word}"
    elif name == "FROM" and (variable := re.search(rf"\$\{{?({_AUTOMATIC.pattern})\b", value)):
        yield f"the value of {variable[1]}", f"ARG {variable[1]}"


def _leading_flags(value: str) -> str:
    found = re.match(r"\s*(?:--\S+\s+)*", value)
    return found[0] if found else ""


def _check_sources(path: Path, line: int, value: str) -> None:
    """Refuses sources that are not in the context; those with globs, variables or a URL are left to the engine."""
    *sources, _ = [word for word in value.split() if not word.startswith("--")] or [""]
    for source in sources:
        if not re.search(r"[*?\[\]$\\:'\"<]", source) and not (path.parent / source.lstrip("/")).exists():
            raise TaskError(f"{path}:{line}: expected {source} in {path.parent}, found no such file.")
