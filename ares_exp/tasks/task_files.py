"""Which files a Harbor task must have, and where its symbolic links may lead."""

from __future__ import annotations

import os
from pathlib import Path

from ares_exp.errors import TaskError
from ares_exp.tasks.task_toml import TaskToml, VerifierSection

INSTRUCTION = "instruction.md"
COMPOSE = "docker-compose.yaml"
CONTAINER_DEFINITIONS = ("Dockerfile", COMPOSE)


def check_files(root: Path, config: TaskToml) -> None:
    """Checks that what the task needs is there and that no uploaded link leaves the task.

    Raises:
        TaskError: The first thing that is wrong.
    """
    if config.steps:
        for step in config.steps:
            _require(root / "steps" / step.name / INSTRUCTION, "the instruction of this step")
            _require_test_script(root, config, step.verifier, root / "steps" / step.name / "tests")
            check_links(root / "steps" / step.name, root)
    else:
        _require(root / INSTRUCTION, "the text that the agent is given")
        _require_test_script(root, config, config.verifier)
    for folder in ("tests", "solution"):
        check_links(root / folder, root)


def _require(path: Path, meaning: str) -> None:
    if not path.exists():
        raise TaskError(f"{path}: expected {meaning}, found no file.")


def _require_test_script(root: Path, config: TaskToml, verifier: VerifierSection, *own: Path) -> None:
    """Some tests directory must hold the entry script, unless an image of the verifier's own brings it."""
    name = "test.bat" if config.environment.os == "windows" else "test.sh"
    folders = [*own, root / "tests"]
    if not any((folder / name).exists() for folder in folders) and not _image_owns_tests(config, verifier, folders):
        raise TaskError(f"{root / 'tests' / name}: expected the script that scores the task, found no file.")


def _image_owns_tests(config: TaskToml, verifier: VerifierSection, folders: list[Path]) -> bool:
    own_mode = verifier.environment_mode or ("separate" if verifier.environment else config.verifier.mode)
    if own_mode != "separate":
        return False
    images = [table.environment.docker_image for table in (verifier, config.verifier) if table.environment]
    return any(images) or any((folder / file).exists() for folder in folders for file in CONTAINER_DEFINITIONS)


def check_links(folder: Path, root: Path) -> None:
    """Checks every symbolic link in and below `folder`. Dangling links that stay inside the task are fine.

    Raises:
        TaskError: A link leads out of `root`, or directories link in a circle.
    """
    if folder.is_symlink() or folder.exists():
        _visit(folder, Path(os.path.realpath(root)), above=frozenset(), done=set())


def _visit(path: Path, root: Path, *, above: frozenset[Path], done: set[Path]) -> None:
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(root):
        raise TaskError(
            f"{path}: expected a link to a place inside the task, it leads to {real}. Copy the file instead."
        )
    if real in above:
        raise TaskError(f"{path}: expected a tree of directories, this link leads back to {real}. Remove the link.")
    if real in done or not real.is_dir():
        return
    for child in sorted(real.iterdir()):
        _visit(child, root, above=above | {real}, done=done)
    done.add(real)
