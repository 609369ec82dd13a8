"""docs/reference/commands.md: the `--help` of every command of the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

from ares_exp.cli.commands import COMMANDS
from ares_exp.terminal.subcommands import Subcommands
from tests.docs_reference.markdown import GENERATED

MODULE_OF = {
    "list": "list",
    "show": "trajectories show",
    "diff": "trajectories diff",
    "convert": "trajectories convert",
    "recover": "trajectories recover",
    "compare": "compare",
    "sweeps": "sweeps",
    "merge": "merge",
    "export": "export_job",
    "snapshots": "snapshots",
    "sync": "trackers sync",
    "dashboard": "trackers dashboard",
    "clean": "containers clean",
    "check-part": "testing",
}
"""Commands that were modules alone once: what follows `python -m ares_exp.`; later commands have no such name."""


def commands_page() -> str:
    """The page."""
    parts = [
        GENERATED,
        "# Command reference\n\n"
        "The `--help` of `ares-exp` and of its commands. `python -m ares_exp` is the same as `ares-exp`.\n",
        f"\n## ares-exp\n\n```text\n{_main_help()}```\n\n(Groups and keys: [config.md](config.md).)\n",
    ]
    for words, text in _helps():
        parts.append(f"\n{'#' * (1 + len(words))} {' '.join(words)}\n\n```text\n{text}```\n")
    rows = "".join(f"| `ares-exp {name}` | `python -m ares_exp.{module}` |\n" for name, module in MODULE_OF.items())
    parts.append(
        "\n## Commands as modules\n\n"
        "These commands can be called by their modules, too, as in earlier versions:\n\n"
        f"| command | module |\n|---|---|\n{rows}"
    )
    return "".join(parts)


def comparable(page: str) -> str:
    """A page without what Python versions lay out differently: line breaks, and how a short option is written."""
    return " ".join(re.sub(r"(?m)(-\w) [A-Z]+, --", r"\1, --", page).split())


def _main_help() -> str:
    text = _help()
    begin, end = text.index("Groups (group=option"), text.index("Flags:\n")
    return text[:begin] + text[end:]


def _helps() -> Iterator[tuple[list[str], str]]:
    """The help of every command, and of those below it."""
    for name, command in COMMANDS.items():
        yield [name], _help(name)
        for below in command.commands if isinstance(command, Subcommands) else ():
            yield [name, below], _help(name, below)


def _help(*words: str) -> str:
    """What `--help` prints, as it is printed where `ares-exp` is typed."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    start = "import sys; sys.argv[0] = 'ares-exp'; from ares_exp.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", start, *words, "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines()) + "\n"
