"""`.harborignore`: the files of a task's tests and solutions that stay on the host."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.cancellation import in_thread
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import TaskError, TransferError
from ares_exp.tasks.verification.link_bounds import LinkBounds

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILE = ".harborignore"
_FILTERED = ("tests", "solution")


class UploadFilter:
    """The files of a task that are left out of uploads, of its validation, and of its content digest.

    `.harborignore` has the syntax of `.gitignore`. It is read in `tests/`, `solution/`, `steps/*/tests/`,
    `steps/*/solution/` and below; it holds for its directory and those in it, whose own rules win over it.
    What is in a directory that is left out is left out, too; so is a link to what is.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))
        self._read: dict[Path, GitIgnoreSpec | None] = {}

    def excludes(self, path: Path) -> bool:
        """Whether `path`, below the task directory, is left out. Blocking.

        Raises:
            TaskError: A `.harborignore` cannot be read.
        """
        real = Path(os.path.realpath(path))
        return self._is_ruled_out(path) or (real != path and self._is_ruled_out(real))

    def excludes_any(self, folder: Path) -> bool:
        """Whether something in `folder` or below may be left out. Blocking."""
        return any(IGNORE_FILE in names for _, _, names in os.walk(folder))

    def _is_ruled_out(self, path: Path) -> bool:
        if not path.is_relative_to(self._root):
            return False
        parts = path.relative_to(self._root).parts
        if parts and parts[-1] == IGNORE_FILE:
            return True
        start = 3 if len(parts) > 3 and parts[0] == "steps" and parts[2] in _FILTERED else 1
        if len(parts) <= start or parts[start - 1] not in _FILTERED:
            return False
        ruling: list[tuple[Path, GitIgnoreSpec]] = []
        folder = self._root.joinpath(*parts[:start])
        for part in parts[start:]:
            if (rules := self._rules(folder)) is not None:
                ruling.append((folder, rules))
            folder = folder / part
            if ruling and _matches(ruling, folder, is_directory=folder != path or path.is_dir()):
                return True
        return False

    def _rules(self, folder: Path) -> GitIgnoreSpec | None:
        if folder not in self._read:
            self._read[folder] = self._read_rules(folder / IGNORE_FILE)
        return self._read[folder]

    def _read_rules(self, path: Path) -> GitIgnoreSpec | None:
        if not path.exists():
            return None
        import pathspec

        try:
            return pathspec.GitIgnoreSpec.from_lines(LinkBounds.of(self._root).read_text(path).splitlines())
        except (OSError, ValueError) as error:
            raise TaskError(f"{path}: expected lines as in a .gitignore, got: {error}.") from None


def _matches(ruling: list[tuple[Path, GitIgnoreSpec]], path: Path, *, is_directory: bool) -> bool:
    """Whether the nearest rules that say something about a path say that it is left out."""
    for folder, rules in reversed(ruling):
        said = rules.check_file(path.relative_to(folder).as_posix() + "/" * is_directory).include
        if said is not None:
            return said
    return False


@asynccontextmanager
async def uploadable(root: Path, folder: Path) -> AsyncIterator[Path]:
    """Yields `folder` of the task `root` for upload: itself, or a temporary copy without the files that are left out.

    Raises:
        TransferError: It cannot be copied.
    """
    chosen = UploadFilter(root)
    if not await asyncio.to_thread(chosen.excludes_any, folder):
        yield folder
        return
    async with working_directory("transfer") as copy:
        await in_thread(lambda: _copy(folder, copy, chosen))
        yield copy


def _copy(folder: Path, target: Path, chosen: UploadFilter) -> None:
    try:
        for path in _kept(folder, chosen):
            new = target / path.relative_to(folder)
            if path.is_symlink() or path.is_file():
                shutil.copy2(path, new, follow_symlinks=False)
            elif path.is_dir():
                new.mkdir()
                shutil.copymode(path, new)
            else:
                raise TransferError(f"Cannot read {path} for an upload: expected a file, a directory or a link.")
    except OSError as error:
        raise TransferError(f"Cannot copy {folder} for an upload: {error}.") from error


def _kept(folder: Path, chosen: UploadFilter) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if not chosen.excludes(path):
            yield path
            if path.is_dir() and not path.is_symlink():
                yield from _kept(path, chosen)
