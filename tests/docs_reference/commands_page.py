"""docs/reference/commands.md: the `--help` of every command of the package."""

from __future__ import annotations

import json
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
    main_help, *helps = _helps().items()
    parts = [
        GENERATED,
        "# Command reference\n\n"
        "The `--help` of `ares-exp` and of its commands. `python -m ares_exp` is the same as `ares-exp`.\n",
        f"\n## ares-exp\n\n```text\n{_without_groups(main_help[1])}```\n\n(Groups and keys: [config.md](config.md).)\n",
    ]
    for words, text in helps:
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


def _without_groups(text: str) -> str:
    begin, end = text.index("Groups (group=option"), text.index("Flags:\n")
    return text[:begin] + text[end:]


def _all_words() -> Iterator[tuple[str, ...]]:
    """The program, every command, and those below it."""
    yield ()
    for name, command in COMMANDS.items():
        yield (name,)
        for below in command.commands if isinstance(command, Subcommands) else ():
            yield (name, below)


_PRINT = """
import contextlib, io, json, sys
from ares_exp.cli.main import main

for words in json.loads(sys.stdin.read()):
    sys.argv[:] = ["ares-exp", *words, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            code = main()
        except SystemExit as end:
            code = end.code or 0
    assert code == 0, words
    sys.stdout.write(json.dumps(said.getvalue()) + "\\n")
"""


def _helps() -> dict[tuple[str, ...], str]:
    """What `--help` prints, as it is printed where `ares-exp` is typed; all by one process."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    asked = [*_all_words()]
    done = subprocess.run(
        [sys.executable, "-c", _PRINT],
        env=environment,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    texts = map(json.loads, done.stdout.splitlines())
    return {
        words: "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"
        for words, text in zip(asked, texts, strict=True)
    }
