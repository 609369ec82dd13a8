"""The text of `--help`, with the config options and keys from the folders of options and from the schema."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from ares_exp.commands.cli.run_command import COMMANDS
from ares_exp.config.options import (
    BUILT_IN,
    OPTION_GROUPS,
    Option,
    config_dirs_of,
    find_options,
    no_option,
    print_problems,
)
from ares_exp.config.schema import KEYS, MADE_NODES, ExperimentConfig, keys
from ares_exp.config.targets import Argument, arguments_of, arguments_of_node, as_yaml
from ares_exp.errors import close_matches
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import MEANING
from ares_exp.records.terminal_text import print_error

WITHOUT_VALUE = ("--help", "-h", "--multirun", "-m", "--resolve")
"""Flags that have no value. The word after any other flag is the value of that flag."""
HEADER = """\
ares_exp: LLM code agents as reproducible RL experiments.

Usage: {program} [group=option ...] [key=value ...] [-m] [--cfg job] [--config-dir DIR]
       {program} COMMAND ...

Examples:
  {program}                             run the bundled tasks with their reference solutions
  {program} container=docker env.path=path/to/tasks policy=openai policy.model=NAME attempts=8
  {program} -m policy=openai policy.model=NAME policy.temperature=0,0.5 seed=1,2
  {program} resume=outputs/default/2026-01-31_12-00-00

Commands (each has --help):
"""

FOOTER = """
Flags:
  -m, --multirun    sweep: every combination of comma-separated values is a run (hydra/launcher=joblib: in parallel)
  --cfg job         print the composed config and exit (-p GROUP: one part of it)
  --config-dir DIR  custom options: DIR/policy/mine.yaml is policy=mine
  --version, --hydra-help

Exit codes: 0 every episode has a reward; 1 some episodes have no reward, or a reference solution fails (policy=oracle
below reward_threshold); 2 the command line or the config is wrong, or a check before the run failed; 130 interrupted.
"""


def render_help(argv: Sequence[str], program: str) -> str:
    """Returns the help text, or details about the options, groups and keys that are named in `argv`."""
    folders = config_dirs_of(argv)
    found = {f"{group}={one.name}": one for group in OPTION_GROUPS for one in find_options(group, folders)}
    if chosen := [found[argument] for argument in argv if argument in found]:
        return "\n\n".join(map(_render_option, chosen)) + "\n"
    named = [argument.partition("=")[0] for argument in argv]
    if groups := [group for group in OPTION_GROUPS if group in named]:
        listed = {group: [_render_row(one) for one in found.values() if one.group == group] for group in groups}
        return "".join(f"  {group}\n" + "".join(rows) for group, rows in listed.items())
    if nodes := [name for name in KEYS if name in named and _arguments_below(name)]:
        return "\n\n".join("\n".join(_render_arguments(_arguments_below(node))) for node in nodes) + "\n"
    width = max(map(len, COMMANDS))
    options = {group: [one.name for one in found.values() if one.group == group] for group in OPTION_GROUPS}
    lines = [
        *(f"  {name:<{width}}  {about}" for name, about in COMMANDS.items()),
        "",
        "Groups (--help GROUP describes the options, --help GROUP=OPTION lists the arguments of one):",
        *(
            line
            for group, names in options.items()
            for line in textwrap.wrap(f"  {group:<10}  {', '.join(names)}", 120, subsequent_indent=" " * 14)
        ),
        "",
        f"Keys (in place of RUN, {MEANING}):",
        *map(_render_key, (item for item in fields(ExperimentConfig) if item.name in KEYS)),
    ]
    return HEADER.format(program=program) + "\n".join([*lines, FOOTER])


def _render_key(item: Field[Any]) -> str:
    if _arguments_below(item.name):
        shown, prose = f"{item.name}.*", f"{item.metadata['prose']} (--help {item.name})"
    else:
        shown, prose = f"{item.name}={as_yaml(item.default)}", item.metadata["prose"]
    return f"  {shown:<28}  {prose}"


def _arguments_below(name: str) -> list[Argument]:
    if name in MADE_NODES:
        return arguments_of_node(name)
    return [Argument(key.name, as_yaml(key.default), key.prose) for key in keys() if key.name.startswith(f"{name}.")]


def _render_row(option: Option) -> str:
    origin = "" if option.origin == BUILT_IN else f" ({option.origin})"
    return f"    {option.name:<24} {option.description}{origin}\n"


def _render_option(option: Option) -> str:
    lines = [f"{option.group}={option.name}  {option.description}", f"  from {option.path}"]
    return "\n".join([*lines, *_render_arguments(arguments_of(option))])


def _render_arguments(arguments: Iterable[Argument]) -> Iterator[str]:
    for item in arguments:
        yield f"  {item.key}={item.default}"
        if item.prose:
            yield textwrap.fill(item.prose, 118, initial_indent=" " * 6, subsequent_indent=" " * 6)


def print_help(argv: Sequence[str], program: str) -> int:
    """Writes the help text to stdout, or an error about the first unknown word to stderr; returns the exit code."""
    folders = config_dirs_of(argv)
    print_problems(folders)
    words = [word for before, word in pairwise(["", *argv]) if not before.startswith("-") or before in WITHOUT_VALUE]
    for word in words:
        if problem := _problem_of(word, folders):
            print_error(f"{problem} `{program} --help` lists commands, groups and keys.")
            return exit_codes.USAGE
    sys.stdout.write(render_help(argv, program))
    return exit_codes.COMPLETE


def _problem_of(word: str, folders: Sequence[Path]) -> str | None:
    """Returns an error message for a word that is not a group, option or key; `None` for known words and flags."""
    known = (*OPTION_GROUPS, *KEYS, *COMMANDS)
    key, _, value = word.partition("=")
    if key in OPTION_GROUPS and re.fullmatch(r"[\w-]+", value):
        options = [option.name for option in find_options(key, folders)]
        return None if value in options else no_option(value, key, options)
    if word.startswith(("-", "+", "~")) or re.split("[.@/]", key)[0] in (*known, "hydra"):
        return None
    return f"There is no command, group or key `{key}`.{close_matches(key, known)}"
