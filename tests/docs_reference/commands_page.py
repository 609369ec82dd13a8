"""docs/reference/commands.md: the `--help` of every command of the package."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from ares_exp.commands.cli.run_command import COMMANDS, parser_of
from tests.docs_reference.markdown import GENERATED


def commands_page() -> str:
    main_help, *helps = _helps().items()
    parts = [
        GENERATED,
        "# Command reference\n\n"
        "The `--help` of `ares-exp` and of its commands. `python -m ares_exp` is the same as `ares-exp`.\n",
        f"\n## ares-exp\n\n```text\n{_without_groups(main_help[1])}```\n\n(Groups and keys: [config.md](config.md).)\n",
    ]
    for words, text in helps:
        parts.append(f"\n{'#' * (1 + len(words))} {' '.join(words)}\n\n```text\n{text}```\n")
    return "".join(parts)


def comparable(page: str) -> str:
    """A page without what Python versions lay out differently: line breaks, and how a short option is written."""
    return " ".join(re.sub(r"(?m)(-\w) [A-Z]+, --", r"\1, --", page).split())


def _without_groups(text: str) -> str:
    start, end = text.index("Groups (--help"), text.index("Flags:\n")
    return text[:start] + text[end:]


def _all_words() -> Iterator[tuple[str, ...]]:
    """The program, every command, and those below it."""
    yield ()
    for name in COMMANDS:
        yield (name,)
        for below in parser_of(name, "ares-exp").below:
            yield (name, below)


_PRINT = """
import contextlib, io, json, sys
from ares_exp.commands.cli.main import main

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
