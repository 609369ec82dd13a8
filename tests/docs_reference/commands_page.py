"""docs/reference/commands.md: the `--help` of every command of the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import ares_exp
from tests.docs_reference.markdown import GENERATED

MODULES = (
    "list",
    "trajectories",
    "compare",
    "sweeps",
    "merge",
    "snapshots",
    "trackers",
    "containers",
    "testing",
    "export_job",
    "testing",
)


def commands_page() -> str:
    """The page."""
    parts = [
        GENERATED,
        "# Command reference\n\n"
        "The `--help` of `python -m ares_exp` and of the modules that look at what was played.\n",
        f"\n## ares_exp\n\n```text\n{_main_help()}```\n\n(Groups and keys: [config.md](config.md).)\n",
    ]
    for module in MODULES:
        for words, text in _helps(module):
            name = " ".join(words)
            parts.append(f"\n{'#' * (1 + len(words))} {name}\n\n```text\n{text}```\n")
    return "".join(parts)


def comparable(page: str) -> str:
    """A page without what Python versions lay out differently: line breaks, and how a short option is written."""
    return " ".join(re.sub(r"(?m)(-\w) [A-Z]+, --", r"\1, --", page).split())


def _main_help() -> str:
    text = _help()
    begin, end = text.index("Groups (group=option"), text.index("Flags:\n")
    return text[:begin] + text[end:]


def _helps(module: str) -> Iterator[tuple[list[str], str]]:
    """The help of a module, and of its commands, if it has some."""
    text = _help(f".{module}")
    yield [module], text
    listed = re.search(r"^positional arguments:\n  (?:COMMAND|command)\n((?:    .*\n)+)", text, re.MULTILINE)
    for command in re.findall(r"^    (\w+)", listed[1] if listed else "", re.MULTILINE):
        yield [module, command], _help(f".{module}", command)


def _help(module: str = "", *command: str) -> str:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    words = [sys.executable, "-m", f"{ares_exp.__name__}{module}", *command, "--help"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines()) + "\n"
