"""Functions that read, validate and upload the files of a task, and compute their digest."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.cancellation import in_thread
from ares_exp.containers.container import Container
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import ConfigError, ContainerStartError, TaskError, TrajectoryFormatError, TransferError
from ares_exp.tasks.task_toml import EnvironmentSection
from ares_exp.tasks.verification.link_bounds import LinkBounds
from ares_exp.tasks.verification.root_commands import as_root

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


IGNORE_FILE = ".harborignore"
_FILTERED = ("tests", "solution")


class UploadFilter:
    """The files of a task that a `.harborignore` excludes from uploads, from validation and from the content digest.

    A `.harborignore` has the syntax of a `.gitignore`. It may be in `tests/`, `solution/`, `steps/*/tests/`,
    `steps/*/solution/` and their subdirectories, and applies to its directory and all subdirectories. Rules in a
    subdirectory take precedence. The contents of an excluded directory, and links to an excluded path, are also
    excluded.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))
        self._read: dict[Path, GitIgnoreSpec | None] = {}

    def excludes(self, path: Path) -> bool:
        """Returns whether a path in the task is excluded. Raises `TaskError` if a `.harborignore` is invalid."""
        real = Path(os.path.realpath(path))
        return self._is_ruled_out(path) or (real != path and self._is_ruled_out(real))

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
        path = folder / IGNORE_FILE
        if folder not in self._read and not path.exists():
            self._read[folder] = None
        elif folder not in self._read:
            import pathspec

            try:
                lines = LinkBounds.of(self._root).read_text(path).splitlines()
                self._read[folder] = pathspec.GitIgnoreSpec.from_lines(lines)
            except (OSError, ValueError) as error:
                raise TaskError(f"{path}: a line is not a valid .gitignore pattern: {error}.") from None
        return self._read[folder]


def _matches(ruling: list[tuple[Path, GitIgnoreSpec]], path: Path, *, is_directory: bool) -> bool:
    """Returns whether `path` is excluded by the nearest `.harborignore` with a rule that matches it.

    `ruling` contains the rules of each `.harborignore` above the path, ordered from the root down.
    """
    for folder, rules in reversed(ruling):
        said = rules.check_file(path.relative_to(folder).as_posix() + "/" * is_directory).include
        if said is not None:
            return said
    return False


@asynccontextmanager
async def uploadable(root: Path, folder: Path) -> AsyncIterator[Path]:
    """Yields `folder` of the task `root` for an upload, without files that a `.harborignore` excludes.

    If `folder` has no `.harborignore`, yields `folder` itself, otherwise a temporary copy.
    """
    if not await asyncio.to_thread(lambda: any(IGNORE_FILE in names for _, _, names in os.walk(folder))):
        yield folder
        return
    async with working_directory("transfer") as copy:
        await in_thread(lambda: _copy(folder, copy, UploadFilter(root)))
        yield copy


def _copy(folder: Path, target: Path, chosen: UploadFilter) -> None:
    def excluded(directory: str, names: list[str]) -> set[str]:
        return {name for name in names if chosen.excludes(Path(directory, name))}

    def copy(source: str, new: str) -> None:
        if not Path(source).is_file():
            raise TransferError(f"Cannot read {source} for an upload: expected a file, a directory or a link.")
        shutil.copy2(source, new)

    try:
        shutil.copytree(folder, target, symlinks=True, ignore=excluded, copy_function=copy, dirs_exist_ok=True)
    except OSError as error:
        raise TransferError(f"Cannot copy {folder} for an upload: {error}.") from error
    finally:
        target.chmod(0o700)  # other users must not read the copy, whatever the mode of `folder` is


_FILES = ("task.toml", "instruction.md", "README.md", "trajectory.json")
_GITIGNORE = ".gitignore"
TOP_FILES = (*_FILES, _GITIGNORE)
"""Names of the files in the root of a task directory that ares_exp reads."""
_FOLDERS = ("environment", "tests", "solution", "steps")
_DEFAULT_IGNORES = ("__pycache__/", "*.py[cod]", "*.sw[op]", "*~", ".DS_Store")


def content_digest(bounds: LinkBounds) -> str:
    """Returns the digest of a task, which changes if one of its `digested_files` is changed, added or removed.

    The digest consists of `sha256:` and the hash of the relative paths and contents of these files. File modes and
    empty directories do not affect it.
    """
    total = hashlib.sha256()
    for relative in digested_files(bounds):
        with (bounds.root / relative).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{relative}\0{content}\n".encode(errors="surrogateescape"))
    return f"sha256:{total.hexdigest()}"


def digested_files(bounds: LinkBounds) -> list[str]:
    """Returns the sorted relative paths of the files that the digest of a task covers.

    Files that the task's `.gitignore` or a `.harborignore` excludes are omitted. If the task has no `.gitignore`,
    bytecode caches, editor backups and `.DS_Store` are omitted. Links that point outside of `bounds` are also omitted,
    because an image build copies only the links themselves, not their targets.

    Raises:
        OSError: The `.gitignore` of the task cannot be read.
        TaskError: A `.harborignore` cannot be read.
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


def with_files(content: str, texts: Mapping[str, str]) -> str:
    """Appends digests of additional files to a task's content digest. `texts` has their contents by file name."""
    digests = {name: hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest() for name, text in texts.items()}
    return f"{content} {json.dumps(digests, sort_keys=True)}" if digests else content


def content_of(recorded: str | None) -> str | None:
    """Returns only the content digest of a task, without the digests that `with_files` has appended to it."""
    return recorded.partition(" ")[0] if isinstance(recorded, str) else recorded


def changed_files(before: str | None, now: str | None) -> list[str]:
    """Returns the names of additional files (see `with_files`) that both digests contain with different hashes."""
    old, new = _files(before), _files(now)
    return [name for name in old if name in new and old[name] != new[name]]


def _files(recorded: str | None) -> dict[str, str]:
    try:
        files = json.loads(str(recorded).partition(" ")[2] or "{}")
    except (ValueError, RecursionError):
        return {}
    return files if isinstance(files, dict) else {}


INSTRUCTION = "instruction.md"
COMPOSE = "docker-compose.yaml"
CONTAINER_DEFINITIONS = ("Dockerfile", COMPOSE)
_READ_BEFORE_A_BUILD = (*CONTAINER_DEFINITIONS, ".dockerignore")


def compose_file(folder: Path | None) -> Path | None:
    """Returns the path of the Docker Compose file in a folder; `None` if the folder has no such file."""
    return folder / COMPOSE if folder is not None and (folder / COMPOSE).is_file() else None


def check_definition_links(bounds: LinkBounds) -> None:
    """Checks the symbolic links that are followed when a task is loaded or its image is built.

    These are links in the root of the task and the container definition in `environment/`. Links in `tests/`,
    `solution/` and `steps/` are not checked here. Other links in `environment/` are either copied into the image as
    links, or rejected by the backend that builds the image.

    Raises:
        TaskError: A link points outside of the bounds.
    """
    environment = bounds.root / "environment"
    for path in (*(bounds.root / name for name in TOP_FILES), environment):
        bounds.real(path)
    for name in _READ_BEFORE_A_BUILD:
        bounds.real(environment / name)
    if compose_file(environment) is not None:  # Docker Compose reads further files next to it
        for directory, folders, names in os.walk(environment):
            for path in (Path(directory, name) for name in (*folders, *names)):
                bounds.real(path)


def require_uploaded(script: Path, chosen: UploadFilter) -> None:
    """Raises `TaskError` if a `.harborignore` excludes the script from the upload."""
    if chosen.excludes(script):
        raise TaskError(
            f"{script}: this script is needed in the container, but a {IGNORE_FILE} excludes it from the upload."
        )


def check_links(folder: Path, bounds: LinkBounds, chosen: UploadFilter) -> None:
    """Checks all symbolic links in `folder` that are uploaded. They may point to missing files inside the bounds.

    Raises:
        TaskError: A link points outside of the bounds, or links to directories form a cycle.
    """
    done: set[Path] = set()

    def visit(path: Path, above: frozenset[Path]) -> None:
        if chosen.excludes(path):
            return
        real = bounds.real(path)
        if real in above:
            raise TaskError(f"{path}: this link points back to its parent directory {real}. Remove the link.")
        if real not in done and real.is_dir():
            for child in sorted(path.iterdir()):
                visit(child, above | {real})
            done.add(real)

    if folder.is_symlink() or folder.exists():
        visit(folder, frozenset())


async def upload_image_files(container: Container, folder: Path, environment: EnvironmentSection) -> None:
    """Copies the task's `environment/` to the container's working directory, if the task uses a prebuilt image.

    `folder` is the path of `environment/`. Nothing is copied if it contains a Dockerfile or a Docker Compose file.

    Raises:
        ContainerStartError: The container has no working directory.
        ContainerError: The container failed.
    """
    if not environment.docker_image or not await asyncio.to_thread(_is_data, folder):
        return
    purpose = f"copy {folder} to the working directory"
    here = await as_root(container, "pwd", purpose=purpose, cwd=None, failure=ContainerStartError)
    await container.upload(folder, (here.splitlines() or ["/"])[-1])


def _is_data(folder: Path) -> bool:
    if not folder.is_dir() or any((folder / name).exists() for name in CONTAINER_DEFINITIONS):
        return False
    return any(folder.iterdir())


_CANARY = re.compile(r"(?=.*canary)(?:#.*|<!--.*-->)", re.I | re.S)


def strip_canary(text: str) -> str:
    """Removes canary lines, and then blank lines, from the start of a text.

    A canary line marks a file as unsuitable for training data, and is not meant for the agent. It contains the word
    "canary", and is a one-line HTML comment or starts with `#`.
    """
    lines = dropwhile(lambda line: _CANARY.fullmatch(line.strip()), text.split("\n"))
    return "\n".join(dropwhile(lambda line: not line.strip(), lines))


def read_instruction(path: Path, bounds: LinkBounds) -> str:
    """Reads an instruction without its canary lines. Raises `TaskError` if the file is missing or invalid."""
    try:
        return strip_canary(bounds.read_text(path))
    except FileNotFoundError:
        raise TaskError(f"{path}: the file with the agent's instruction is missing.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read as UTF-8 text: {error}.") from None


def read_extra_instruction(path: Path) -> str:
    """Reads the text of a file in `env.extra_instruction_paths`. Raises `ConfigError` if this fails."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a NUL in the path raises ValueError, and is possible in a recorded config
        raise ConfigError(
            f"Expected `env.extra_instruction_paths` to be UTF-8 files, but {path} cannot be read: {error}."
        ) from None


TRAJECTORY = "trajectory.json"


def read_prior_context(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Reads the messages of a prior conversation, oldest first; empty if the file does not exist. Blocking.

    The file is a trajectory in the ATIF format. Its system steps at the start are omitted, because they are the system
    prompt of the recorded agent. If a system step reports that the agent replaced its context (for example, by a
    summary), all earlier messages are omitted, and the conversation starts with the observation in this step.

    Raises:
        TaskError: The file is not a valid ATIF document, or has no conversation.
    """
    if not path.is_file():
        return ()
    from ares_exp.trajectories.exports.atif_messages import validate_atif
    from ares_exp.trajectories.files.line_file import read_lines, read_rest
    from ares_exp.trajectories.records import BROKEN, what_broke

    try:
        with read_lines(path) as lines:
            document = json.loads(read_rest(lines))
        validate_atif(document)
        messages = _messages(document)
    except (OSError, TrajectoryFormatError, *BROKEN) as error:
        what = str(error) if isinstance(error, OSError | TrajectoryFormatError) else f"{what_broke(error)}."
        raise TaskError(f"{path}: {what} The prior context of a task must be a valid ATIF document.") from None
    if not messages:
        raise TaskError(f"{path}: expected an ATIF document with at least one message, found none.")
    return messages


def _messages(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    from ares_exp.llms.request import freeze
    from ares_exp.trajectories.exports.atif_messages import llm_calls, message_of_result, message_of_step

    messages: list[Mapping[str, Any]] = []
    after_prompt = False
    for step in document["steps"]:
        if step["source"] == "system" and _replaces_context(step):
            messages.clear()
        elif step["source"] != "system" or after_prompt:
            messages.append(message_of_step(step))
        after_prompt |= step["source"] != "system"
        calls = {call[0] for call in llm_calls(step)}
        for result in (step.get("observation") or {"results": ()})["results"]:
            if result.get("content") is not None:
                messages.append(message_of_result(result, calls))
    return tuple(map(freeze, messages))


def _replaces_context(step: Mapping[str, Any]) -> bool:
    management = (step.get("extra") or {}).get("context_management")
    return isinstance(management, Mapping) and management.get("boundary") == "replace"
