"""First words of a command line: a command, or what was probably meant by one that is none."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ares_exp.commands.cli.commands import COMMANDS
from ares_exp.errors import close_matches
from ares_exp.records import exit_codes
from ares_exp.records.terminal_text import print_error

HELP = {"--help", "-h"}
PLAYS = ("run", "start", "play", "eval", "evaluate", "rollout", "exec")
"""What a run is called elsewhere; here it has no name."""
OTHERS_CALL_IT = {
    "help": "--help", "version": "--version", "ls": "list", "log": "show", "logs": "show",
    "upload": "wandb sync", "cleanup": "clean", "prune": "clean", "gc": "snapshots gc", "sweep": "-m",
}  # fmt: skip
"""Commands of other programs, with the words that do the same here."""


def run_word(argv: Sequence[str], program: str) -> int | None:
    """Runs the command that a command line starts with, and returns its exit code; `None` of one that plays.

    `--help COMMAND` is `COMMAND --help`.
    """
    if len(argv) == 2 and argv[0] in HELP and argv[1] in COMMANDS:
        argv = [*reversed(argv)]
    if not _is_word(argv):
        return None
    if argv[0] in COMMANDS:
        return COMMANDS[argv[0]].main(argv[1:], f"{program} {argv[0]}")
    from ares_exp.config.options import OPTION_GROUPS
    from ares_exp.config.schema import KEYS

    if argv[0] in (*OPTION_GROUPS, *KEYS) and HELP & set(argv):
        return None  # the help describes it
    print_error(_explain(argv[0], argv[1:], program))
    return exit_codes.USAGE


def _is_word(argv: Sequence[str]) -> bool:
    """Whether a command line starts with a word: no override (`key=value`, `+key=value`, `~key`) and no flag."""
    return bool(argv) and "=" not in argv[0] and not argv[0].startswith(("-", "+", "~"))


def _explain(word: str, rest: Sequence[str], program: str) -> str:
    """Answers a first word that is no command with what was probably meant."""
    meant = _meant(word, rest, program) or f" Expected one of {', '.join(COMMANDS)}."
    return (
        f"There is no command `{word}`.{meant} "
        f"A first word without `=` is a command, anything else a run: `{program} key=value …`. "
        f"`{program} --help` lists commands and keys."
    )


def _meant(word: str, rest: Sequence[str], program: str) -> str:
    """Returns what was probably meant, as a sentence behind a space; an empty string where nothing comes near."""
    from ares_exp.config.schema import GROUPS, KEYS

    settable = (*KEYS, *GROUPS)
    value = rest[0] if rest and "=" not in rest[0] else "…"
    if word in PLAYS:
        return f" A run needs no word: `{' '.join([program, *map(shlex.quote, rest)])}`."
    if word in OTHERS_CALL_IT:
        return f" It is `{program} {OTHERS_CALL_IT[word]}` here."
    if word in settable:
        return f" What is set has a `=`: `{program} {word}={value}`."
    if Path(word).is_dir():
        return f" To look at a run: `{program} show {word}`; to play tasks in it: `{program} env.path={word}`."
    return close_matches(word, [*COMMANDS, *settable])
