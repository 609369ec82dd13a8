"""The files of the build context that a Dockerfile needs, and their transfer to the builder of the Daytona service.

The service's SDK uploads the sources of `COPY` lines, but ignores `ADD`, variables, bind mounts and `.dockerignore`,
and loses links and empty directories. So this module finds files by Docker's rules and copies them to a directory. If
necessary, it adds a stage to the Dockerfile that makes the SDK upload the whole directory.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ares_exp.containers.images.dockerfile_instructions import (
    Instruction,
    json_words,
    split_flags,
    split_words,
    without_heredocs,
)
from ares_exp.containers.images.dockerfile_steps import match_source, names_not_ignored
from ares_exp.errors import TaskError, UnsupportedTaskError

_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://|git@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A file, directory or pattern of the context that the instruction on `line` needs."""

    line: int
    pattern: str


def local_sources(instruction: Instruction) -> list[LocalSource]:
    """Returns the sources of an instruction in the context; `.` for a source with a variable."""
    flags, rest = split_flags(instruction.value)
    if instruction.name == "RUN":
        patterns = [source for name, setting in flags if name == "mount" for source in _mounted(setting)]
    elif instruction.name in ("COPY", "ADD") and not any(name == "from" for name, _ in flags):
        words = _words(instruction, without_heredocs(rest))
        patterns = [word for word in words[:-1] if not (instruction.name == "ADD" and _REMOTE.match(word))]
    else:
        return []
    return [LocalSource(instruction.line, "." if "$" in pattern else pattern) for pattern in patterns]


def _mounted(setting: str) -> Iterator[str]:
    options = {part.partition("=")[0]: part.partition("=")[2] for part in setting.split(",")}
    if options.get("type", "bind") == "bind" and "from" not in options:
        yield options.get("source") or options.get("src") or "."


def _words(instruction: Instruction, text: str) -> tuple[str, ...]:
    from dockerfile_parse.util import WordSplitter

    if words := json_words(text):
        return words
    try:
        return tuple(w if "$" in w else str(WordSplitter(w, args={}, envs={}).dequote()) for w in split_words(text))
    except ValueError as error:
        raise TaskError(f"Dockerfile, line {instruction.line}: {instruction.name}: {error}.") from error


def find_files(sources: list[LocalSource], context: Path) -> Mapping[str, Path]:
    """Returns the files to send to the builder, by their names in the context. Applies `.dockerignore`. Blocking.

    Raises `TaskError` if a source is missing. Raises `UnsupportedTaskError` if a source leads out of the context, or
    cannot be uploaded unchanged: a link in a directory, an empty directory, a device, a name that is not UTF-8.
    """
    root = context.resolve()
    names = names_not_ignored(root)
    kept = None if names is None else {root / name for name in names}
    found: dict[str, Path] = {}
    for source in sources:
        for path in match_source(source.pattern, context, source.line):
            _collect(path.relative_to(root).as_posix(), path.resolve(), kept, found)
    return found


def check_as_read_by_sdk(found: Sequence[Instruction]) -> None:
    """Raises `UnsupportedTaskError` if the SDK would interpret the sources of a COPY differently."""
    for instruction in found:
        sources = local_sources(instruction) if instruction.name == "COPY" else []
        if sources and ("$" in instruction.value or any(source.pattern.startswith("/") for source in sources)):
            raise UnsupportedTaskError(
                f"line {instruction.line} has a variable or a leading slash in the source of a COPY, which the SDK "
                "interprets differently from Docker"
            )


def as_read_by_sdk(text: str, found: Sequence[Instruction]) -> str:
    """Returns the text, with an added unused stage if this is needed to make the SDK send the whole directory.

    This is the case if an instruction other than `COPY`, or a `COPY` with a here-document, needs files.
    """
    for instruction in found:
        if local_sources(instruction) and (instruction.name != "COPY" or "<<" in instruction.value):
            lines = text.splitlines(keepends=True)
            first = next(one.line for one in found if one.name == "FROM") - 1
            return "".join((*lines[:first], "FROM scratch AS ares-exp-context\nCOPY . /\n", *lines[first:]))
    return text


def _collect(name: str, path: Path, kept: set[Path] | None, found: dict[str, Path]) -> None:
    children = sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []
    for child in children:
        _collect(child.name if name == "." else f"{name}/{child.name}", child, kept, found)
    if children or (kept is not None and path not in kept):
        return
    if path.is_symlink() or not path.is_file():
        raise _lost(f"the {'link' if path.is_symlink() else 'empty directory' if path.is_dir() else 'device'} {name}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise _lost(f"the name {name!r}, which is not UTF-8,") from error
    found[name] = path


def _lost(what: str) -> UnsupportedTaskError:
    return UnsupportedTaskError(f"{what} cannot be sent to the service")


def find_directory(directory: Path) -> Mapping[str, Path]:
    """Returns all files of a directory, by their names in it. Raises the same errors as `find_files`. Blocking."""
    found: dict[str, Path] = {}
    for child in sorted(directory.iterdir()):
        _collect(child.name, child, None, found)
    return found


def copy_files(files: Mapping[str, Path], directory: Path) -> None:
    """Copies the files into `directory` under their names, always in the same order. Blocking.

    The SDK's hash of an upload depends on the order in which the directory lists its files.
    """
    for name in sorted(files):
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(files[name], target)
