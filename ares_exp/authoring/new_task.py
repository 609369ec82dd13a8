"""`ares-exp new-task`: a small valid task with comments, to be edited."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from pathlib import Path

from ares_exp.errors import ConfigError
from ares_exp.terminal.run_command import EXIT_OK

DESCRIPTION = """\
Makes a small task in the Harbor format, with comments: a file of numbers is to be added up. It can be played as it is;
edit its five files to make it yours.
"""
EPILOG = """\
Examples:
  %(prog)s tasks/my-task
  %(prog)s tasks/my-task --image python:3.12-slim

Exit codes: 0 made; 2 the command line is wrong, or there is something already.
"""
TEMPLATE = Path(__file__).parent / "template"
FILES = {
    "instruction.md": "what the agent is told",
    "task.toml": "time limits, resources, network",
    "environment/Dockerfile": "what the agent works in",
    "tests/test.sh": "gives the reward when the agent is done",
    "solution/solve.sh": "solves the task, which shows that the tests can be passed",
}
IMAGE = "debian:bookworm-slim"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IMAGE = re.compile(r"[\w./:@-]+", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command line takes."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the task's folder; its last part is the name")
    parser.add_argument("--image", default=IMAGE, help="the image that the Dockerfile begins with (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Makes the task, and says what is in it and what to do next."""
    make_task(arguments.folder, image=arguments.image)
    sys.stdout.write(_told(arguments.folder))
    return EXIT_OK


def make_task(folder: Path, *, image: str = IMAGE) -> None:
    """Makes a task in a folder, which must be empty if it is there.

    Args:
        folder: Its last part is the name of the task.
        image: What its Dockerfile begins with.

    Raises:
        ConfigError: There is something in the folder, or a name is none.
    """
    folder = folder.expanduser()
    if not _NAME.fullmatch(folder.absolute().name) or ".." in folder.parts:
        raise ConfigError(
            f"Expected the last part of the folder to be a name for the task (letters, digits, `.`, `_`, `-`), got "
            f"{str(folder)!r:.200}."
        )
    if not _IMAGE.fullmatch(image):
        raise ConfigError(f"Expected `--image` to be the name of an image, got {image!r:.200}.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"Expected a new or an empty folder, but {folder} has files. Choose another one.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"Expected a new or an empty folder, but {folder} is a file. Choose another one.")
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TEMPLATE / name, folder / name)
        (folder / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text(encoding="utf-8").replace(IMAGE, image), encoding="utf-8")


def _told(folder: Path) -> str:
    shown = shlex.quote(str(folder))
    width = max(map(len, FILES))
    files = "\n".join(f"  {name:<{width}}  {about}" for name, about in FILES.items())
    return (
        f"{folder} is a task that can be played:\n{files}\n\n"
        f"Do its tests test?     ares-exp check-task {shown}\n"
        f"Play it with a model:  ares-exp env.path={shown} policy=openai policy.model=...\n"
    )
