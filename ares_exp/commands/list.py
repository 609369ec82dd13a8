"""The command line of `ares-exp list`."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from ares_exp.config.options import print_problems
from ares_exp.errors import ConfigError, close_matches
from ares_exp.listing.choices import GROUP_OF, PLUGINS, Row, section
from ares_exp.listing.tables import print_sections
from ares_exp.listing.task_rows import task_rows
from ares_exp.terminal.run_command import EXIT_OK
from ares_exp.terminal.terminal import printable

TASKS = "tasks"
SECTIONS = (*GROUP_OF, PLUGINS, TASKS)
DESCRIPTION = """\
Lists what can be chosen, with a line on each and where it comes from: built in, from a plugin, or from a folder of your
own. Of environments it says how many tasks they have, where that can be told without a network (else `?`).
"""
EPILOG = f"""\
Examples:
  %(prog)s                    everything
  %(prog)s envs               the environments: presets of `ares_exp.make`, too
  %(prog)s policies --json
  %(prog)s tasks env=harbor env.path=path/to/tasks 'env.tasks=fix-*'

Sections: {", ".join(SECTIONS)}.
Exit codes: 0 listed; 2 the command line is wrong, or the tasks cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("section", nargs="?", metavar="SECTION", help="what to list; everything but tasks by default")
    parser.add_argument("overrides", nargs="*", metavar="env=…", help="for `tasks`: as for a run")
    parser.add_argument("--json", action="store_true", help="everything that is known, as JSON")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="options of your own, as for a run")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    asked = arguments.section
    name = next((plural for plural, group in GROUP_OF.items() if group == asked), asked)
    if name is not None and name not in SECTIONS:
        raise ConfigError(
            f"Expected one of {', '.join(SECTIONS)}, got {asked!r}.{close_matches(asked, [*SECTIONS])} Overrides go "
            f"with `tasks`: ares-exp list tasks env=…"
        )
    if arguments.overrides and name != TASKS:
        raise ConfigError(f"Only `tasks` takes overrides, got {' '.join(arguments.overrides)} for `{name}`.")
    folders = [] if arguments.config_dir is None else [_folder(arguments.config_dir)]
    print_problems(folders)
    with redirect_stdout(sys.stderr):  # a plugin may print
        if name == TASKS:
            sections = {TASKS: task_rows(arguments.overrides, _warn, config_dirs=folders)}
        else:
            chosen = [name] if name is not None else [one for one in SECTIONS if one != TASKS]
            sections = {one: section(one, folders, _warn) for one in chosen}
    _print(sections, as_json=arguments.json)
    return EXIT_OK


def _print(sections: dict[str, list[Row]], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps(sections, indent=2)}\n")
    else:
        print_sections(sections)


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"Expected `--config-dir` to be a folder of options, found no such directory: {path}.")
    return path.absolute()


def _warn(sentence: str) -> None:
    sys.stderr.write(f"warning: {printable(sentence)}\n")
