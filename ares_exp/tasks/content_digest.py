"""The content digest of a Harbor task, as Harbor computes it: equal digests, equal tasks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from ares_exp.tasks.harborignore import UploadFilter
from ares_exp.tasks.verification.link_bounds import LinkBounds

_FILES = ("task.toml", "instruction.md", "README.md", "trajectory.json")
_GITIGNORE = ".gitignore"
TOP_FILES = (*_FILES, _GITIGNORE)
"""The files directly in a task directory that are read."""
_FOLDERS = ("environment", "tests", "solution", "steps")
_DEFAULT_IGNORES = ("__pycache__/", "*.py[cod]", "*.sw[op]", "*~", ".DS_Store")


def content_digest(bounds: LinkBounds) -> str:
    """Computes `sha256:` and the hex digest over the sorted relative paths and contents of the task's files.

    File modes and empty directories do not count, nor does what the task's `.gitignore` names (without one: bytecode
    caches, editor backups, `.DS_Store`), nor what a `.harborignore` leaves out. Reads every file.

    Raises:
        OSError: A file cannot be read.
        TaskError: A `.harborignore` cannot.
    """
    total = hashlib.sha256()
    for relative in digested_files(bounds):
        with (bounds.root / relative).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{relative}\0{content}\n".encode(errors="surrogateescape"))
    return f"sha256:{total.hexdigest()}"


def digested_files(bounds: LinkBounds) -> list[str]:
    """Lists the files that the digest of a task covers, as paths relative to it, sorted.

    Links that leave the bounds are left out: in a build context they are copied as links, and nothing reads the target.

    Raises:
        OSError: Its `.gitignore` cannot be read.
        TaskError: A `.harborignore` cannot.
    """
    import pathspec

    root = bounds.root
    gitignore = root / _GITIGNORE
    lines = gitignore.read_text(encoding="utf-8").splitlines() if gitignore.is_file() else _DEFAULT_IGNORES
    ignored = pathspec.GitIgnoreSpec.from_lines(lines)
    chosen = UploadFilter(root)
    return sorted(
        relative
        for relative in _present(root)
        if not ignored.match_file(relative) and not chosen.excludes(root / relative) and bounds.contain(root / relative)
    )


def _present(root: Path) -> Iterator[str]:
    yield from (name for name in _FILES if (root / name).is_file())
    for folder in _FOLDERS:
        for directory, _, names in os.walk(root / folder):
            paths = (Path(directory, name) for name in names)
            yield from (path.relative_to(root).as_posix() for path in paths if path.is_file())
