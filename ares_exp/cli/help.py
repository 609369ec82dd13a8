"""`--help`: what can be chosen and set, read from the config tree and the schema without composing anything."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence

from ares_exp.cli.commands import COMMANDS
from ares_exp.config.option_arguments import arguments_of, as_yaml
from ares_exp.config.options import BUILT_IN, Option, config_dirs_of, find_options, print_problems
from ares_exp.config.plugins import OPTION_GROUPS
from ares_exp.config.schema import keys
from ares_exp.records.latest_run import MEANING

HEADER = """\
ares_exp: LLM code agents as reproducible RL experiments.

Usage: {program} [group=option ...] [key=value ...] [-m] [--cfg job] [--config-dir DIR]
       {program} COMMAND ...

Examples:
  {program}                                            the bundled tasks, played by their own solutions
  {program} container=docker env.path=path/to/tasks    your Harbor tasks on a Docker engine
  {program} policy=openai policy.model=NAME policy.base_url=http://127.0.0.1:8000/v1
  {program} env.tasks='fix-*' attempts=8 concurrency=16
  {program} -m policy=openai policy.model=NAME policy.temperature=0,0.5 seed=1,2
  {program} resume=outputs/default/2026-01-31_12-00-00     go on with a run or a sweep that was ended or killed
  {program} replay=outputs/default/2026-01-31_12-00-00/fix-bug
  {program} branch_from=outputs/default/2026-01-31_12-00-00/fix-bug@3 branches=8 policy.temperature=1.0
"""

FOOTER = """\
Flags:
  -m, --multirun    sweep: every combination of comma-separated values is a run (hydra/launcher=joblib: side by side)
  --cfg job         print the composed config (with -p GROUP one part of it) and leave
  --config-dir DIR  your own options: DIR/policy/mine.yaml is policy=mine
  --version         the version of ares_exp
  --hydra-help      Hydra's own flags

Exit codes: 0 every episode has a reward; 1 some have none, or a task's own solution fails (policy=oracle below
reward_threshold); 2 the command, the config or the preflight is at fault; 130 interrupted.
"""


def render_help(argv: Sequence[str], program: str) -> str:
    """Returns the help text, or what can be set of the options that `argv` chooses (`--help policy=scripted`).

    Of a group that `argv` names (`--help policy`), or of which it chooses an option that there is not, the options.
    Those of plugins, and of a `--config-dir` in `argv`, are listed too.
    """
    folders = config_dirs_of(argv)
    found = {f"{group}={one.name}": one for group in OPTION_GROUPS for one in find_options(group, folders)}
    if chosen := [found[argument] for argument in argv if argument in found]:
        return "\n\n".join(map(_render_option, chosen)) + "\n"
    if groups := [group for group in OPTION_GROUPS if any(one.partition("=")[0] == group for one in argv)]:
        return "".join(f"{line}\n" for group in groups for line in _render_group(group, found.values()))
    lines = [
        HEADER.format(program=program),
        *_render_commands(),
        "",
        "Groups (group=option; the arguments of an option: --help GROUP=OPTION):",
    ]
    for group in OPTION_GROUPS:
        lines += _render_group(group, found.values())
    lines += ["", "Keys (key=value):"]
    for item in keys():
        lines.append(f"  {f'{item.name}={as_yaml(item.default)}':<40} {item.metadata['prose']}")
    return "\n".join([*lines, "", FOOTER])


def _render_commands() -> list[str]:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.about}" for name, command in COMMANDS.items()]
    said = f"In the place of a run directory {MEANING} (also resume=, replay=, branch_from=)."
    return ["Commands (the first word; each has --help):", *rows, said]


def _render_group(group: str, options: Iterable[Option]) -> list[str]:
    return [f"  {group}", *(_render_row(one) for one in options if one.group == group)]


def _render_row(option: Option) -> str:
    origin = "" if option.origin == BUILT_IN else f" ({option.origin})"
    return f"    {option.name:<24} {option.description}{origin}"


def _render_option(option: Option) -> str:
    lines = [f"{option.group}={option.name}  {option.description}", f"  from {option.path}"]
    for item in arguments_of(option):
        said = textwrap.fill(item.prose, 118, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines += [f"  {item.key}={item.default}", *([said] if said else [])]
    return "\n".join(lines)


def print_help(argv: Sequence[str], program: str) -> None:
    """Writes the help text to stdout."""
    print_problems(config_dirs_of(argv))
    sys.stdout.write(render_help(argv, program))
