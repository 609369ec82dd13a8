"""The files of the build context that a Dockerfile needs, and their transfer to the service's builder.

The SDK uploads the sources of `COPY` lines: it ignores `ADD`, variables, bind mounts and `.dockerignore`, and takes a
source with a leading slash for a file of this machine. And its upload loses links and empty directories. Here the files
are found as Docker finds them, and copied to a directory, of which a line more makes the SDK upload all.
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
from ares_exp.containers.images.dockerfile_steps import match_source, names_not_ignored, stage_context
from ares_exp.containers.ownership import OwnedDirectory, short_lived_directory
from ares_exp.errors import TaskError, UnsupportedTaskError

_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://|git@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A file, directory or pattern of the context that the instruction on a line needs."""

    line: int
    pattern: str


def local_sources(instruction: Instruction) -> list[LocalSource]:
    """Returns the sources of an instruction in the context; `.` for a source with a variable.

    Raises:
        TaskError: Its words cannot be told apart.
    """
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
    """Finds the files to send to the builder. Blocking.

    Args:
        sources: The sources of the instructions.
        context: The task's directory; its `.dockerignore` applies.

    Returns:
        Names in the context and their files, none of them outside of it.

    Raises:
        TaskError: A source is missing.
        UnsupportedTaskError: A source leads out of the context, or cannot be uploaded unchanged: a link in a directory,
            an empty directory, a device, a name that is not UTF-8.
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
    """Checks that the SDK finds no other local sources than those of the context.

    Raises:
        UnsupportedTaskError: With the line of an instruction of which it would.
    """
    for instruction in found:
        sources = local_sources(instruction) if instruction.name == "COPY" else []
        if sources and ("$" in instruction.value or any(source.pattern.startswith("/") for source in sources)):
            raise UnsupportedTaskError(
                f"the SDK takes variables and leading slashes in the sources of COPY otherwise, in line "
                f"{instruction.line}"
            )


def as_read_by_sdk(text: str, found: Sequence[Instruction]) -> str:
    """Returns the text with a stage that nobody uses, by which the SDK sends the whole directory, where that is needed.

    It is for what needs files of the context and is no `COPY`, or is one with a here-document.
    """
    for instruction in found:
        if local_sources(instruction) and (instruction.name != "COPY" or "<<" in instruction.value):
            lines = text.splitlines(keepends=True)
            first = next(one.line for one in found if one.name == "FROM") - 1
            return "".join((*lines[:first], "FROM scratch AS ares-exp-context\nCOPY . /\n", *lines[first:]))
    return text


def _collect(name: str, path: Path, kept: set[Path] | None, found: dict[str, Path]) -> None:
    """Adds the file `path`, or the files below it, by their names in the context."""
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
        raise _lost(f"the name {name!r}, which is no UTF-8,") from error
    found[name] = path


def _lost(what: str) -> UnsupportedTaskError:
    return UnsupportedTaskError(f"{what} would be lost on the way")


def copy_not_ignored(context: Path) -> tuple[Path, OwnedDirectory]:
    """Returns the context without ignored files, and the directory to remove afterwards. Blocking."""
    directory = short_lived_directory("build")
    try:
        return stage_context(context, directory.path), directory
    except BaseException:
        directory.remove()
        raise


def find_directory(directory: Path) -> Mapping[str, Path]:
    """Finds all files of a directory by their names in it, to send them to the builder. Blocking.

    Raises:
        UnsupportedTaskError: One cannot be uploaded unchanged: a link, an empty directory, a name that is not UTF-8.
    """
    found: dict[str, Path] = {}
    for child in sorted(directory.iterdir()):
        _collect(child.name, child, None, found)
    return found


def copy_files(files: Mapping[str, Path], directory: Path) -> None:
    """Copies the files to their names below `directory`, always in the same order. Blocking.

    The SDK's hash of what it uploads depends on the order in which the directory lists it.
    """
    for name in sorted(files):
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(files[name], target)
