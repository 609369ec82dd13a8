"""The files that a Harbor task must have, and checks of its symbolic links."""

from __future__ import annotations

import os
from pathlib import Path

from ares_exp.errors import TaskError
from ares_exp.tasks.content_digest import TOP_FILES
from ares_exp.tasks.harborignore import IGNORE_FILE, UploadFilter
from ares_exp.tasks.task_toml import TaskToml, VerifierSection
from ares_exp.tasks.verification.link_bounds import LinkBounds

INSTRUCTION = "instruction.md"
COMPOSE = "docker-compose.yaml"
CONTAINER_DEFINITIONS = ("Dockerfile", COMPOSE)
_READ_BEFORE_A_BUILD = (*CONTAINER_DEFINITIONS, ".dockerignore")


def compose_file(folder: Path | None) -> Path | None:
    """Finds the Docker Compose file of a container definition; `None` when it has none."""
    return folder / COMPOSE if folder is not None and (folder / COMPOSE).is_file() else None


def check_definition_links(bounds: LinkBounds) -> None:
    """Checks the links of every file outside of `tests/`, `solution/` and `steps/` that this process reads.

    Other links in `environment/` are copied into the image as links, or rejected by the backend that builds it.

    Raises:
        TaskError: A link leaves the bounds.
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


def check_files(root: Path, config: TaskToml) -> None:
    """Checks that the task has the files that it needs and that no uploaded link leaves it.

    Raises:
        TaskError: The first error that was found.
    """
    chosen, bounds = UploadFilter(root), LinkBounds(root)
    if config.steps:
        for step in config.steps:
            _require(root / "steps" / step.name / INSTRUCTION, "the instruction of this step")
            _require_test_script(root, config, step.verifier, chosen, root / "steps" / step.name / "tests")
            check_links(root / "steps" / step.name, bounds, chosen)
    else:
        _require(root / INSTRUCTION, "the text that the agent is given")
        _require_test_script(root, config, config.verifier, chosen)
    for folder in ("tests", "solution"):
        check_links(root / folder, bounds, chosen)


def _require(path: Path, meaning: str) -> None:
    if not path.exists():
        raise TaskError(f"{path}: expected {meaning}, found no file.")


def _require_test_script(
    root: Path, config: TaskToml, verifier: VerifierSection, chosen: UploadFilter, *own: Path
) -> None:
    """Checks that some tests directory holds the entry script, unless the verifier's own image brings it."""
    name = "test.bat" if config.environment.os == "windows" else "test.sh"
    folders = [*own, root / "tests"]
    if _image_owns_tests(config, verifier, folders):
        return
    script = next((folder / name for folder in folders if (folder / name).exists()), None)
    if script is None:
        raise TaskError(f"{root / 'tests' / name}: expected the script that scores the task, found no file.")
    require_uploaded(script, chosen)


def require_uploaded(script: Path, chosen: UploadFilter) -> None:
    """Checks that a script that is to be run is not left out of what is uploaded.

    Raises:
        TaskError: It is.
    """
    if chosen.excludes(script):
        raise TaskError(f"{script}: expected this script to be uploaded, a {IGNORE_FILE} leaves it out.")


def _image_owns_tests(config: TaskToml, verifier: VerifierSection, folders: list[Path]) -> bool:
    own_mode = verifier.environment_mode or ("separate" if verifier.environment else config.verifier.mode)
    if own_mode != "separate":
        return False
    images = [table.environment.docker_image for table in (verifier, config.verifier) if table.environment]
    return any(images) or any((folder / file).exists() for folder in folders for file in CONTAINER_DEFINITIONS)


def check_links(folder: Path, bounds: LinkBounds, chosen: UploadFilter) -> None:
    """Checks every symbolic link in and below `folder` that is uploaded. Dangling links that stay inside are allowed.

    Raises:
        TaskError: A link leaves the bounds, or directories link in a circle.
    """
    if folder.is_symlink() or folder.exists():
        _LinkCheck(bounds, chosen).visit(folder, above=frozenset())


class _LinkCheck:
    def __init__(self, bounds: LinkBounds, chosen: UploadFilter) -> None:
        self._bounds = bounds
        self._chosen = chosen
        self._done: set[Path] = set()

    def visit(self, path: Path, *, above: frozenset[Path]) -> None:
        if self._chosen.excludes(path):
            return
        real = self._bounds.real(path)
        if real in above:
            raise TaskError(f"{path}: expected a tree of directories, this link leads back to {real}. Remove the link.")
        if real in self._done or not real.is_dir():
            return
        for child in sorted(path.iterdir()):
            self.visit(child, above=above | {real})
        self._done.add(real)
