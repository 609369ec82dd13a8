"""`--help`: what can be chosen and set, read from the config tree and the schema without composing anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ares_exp.conf_dir import conf_dir
from ares_exp.config import keys
from ares_exp.options import BUILT_IN, config_dirs_of, find_options, print_problems
from ares_exp.plugins import OPTION_GROUPS

HEADER = """\
ares_exp: LLM code agents as reproducible RL experiments.

Usage: python -m ares_exp [group=option ...] [key=value ...] [-m] [--cfg job] [--config-dir DIR]

Examples:
  python -m ares_exp                                            the bundled tasks, played by their own solutions
  python -m ares_exp container=docker env.path=path/to/tasks    your Harbor tasks on a Docker engine
  python -m ares_exp policy=chat_completions policy.model=NAME policy.base_url=http://127.0.0.1:8000/v1
  python -m ares_exp env.tasks='fix-*' attempts=8 concurrency=16
  python -m ares_exp -m policy=chat_completions policy.model=NAME policy.temperature=0,0.5 seed=1,2
  python -m ares_exp resume=outputs/default/2026-01-31_12-00-00     go on with a run or a sweep that was ended or killed
  python -m ares_exp replay=outputs/default/2026-01-31_12-00-00/fix-bug
  python -m ares_exp branch_from=outputs/default/2026-01-31_12-00-00/fix-bug@3 branches=8 policy.temperature=1.0
"""

FOOTER = """\
Flags:
  -m, --multirun    sweep: every combination of comma-separated values is a run (hydra/launcher=joblib: side by side)
  --cfg job         print the composed config (with -p GROUP one part of it) and leave
  --config-dir DIR  your own options: DIR/policy/mine.yaml is policy=mine
  --hydra-help      Hydra's own flags

What can be chosen, as tables or JSON: python -m ares_exp.list [envs|agents|policies|…]; the tasks: .list tasks env=…

Of what was played (each with --help): python -m ares_exp.sweeps FOLDER, .compare RUN RUN, .merge OUT SHARD SHARD,
.trajectories, .snapshots, .trackers, .export_job.

Exit codes: 0 every episode has a reward; 1 some have none; 2 the command, the config or the preflight is at fault;
130 interrupted.
"""


def render_help(argv: Sequence[str]) -> str:
    """The help text; options of plugins, and of a `--config-dir` in `argv`, are listed too."""
    folders = config_dirs_of(argv)
    lines = [HEADER, f"Groups (group=option; the arguments of an option: {conf_dir()}/GROUP/OPTION.yaml):"]
    for group in OPTION_GROUPS:
        lines += _render_group(group, folders)
    lines += ["", "Keys (key=value):"]
    for item in keys():
        lines.append(f"  {f'{item.name}={_shown(item.default)}':<40} {item.metadata['prose']}")
    return "\n".join([*lines, "", FOOTER])


def _shown(value: Any) -> str:
    """A default as it is written in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _render_group(group: str, config_dirs: Sequence[Path]) -> list[str]:
    rows = []
    for option in find_options(group, config_dirs):
        origin = "" if option.origin == BUILT_IN else f" ({option.origin})"
        rows.append(f"    {option.name:<24} {option.description}{origin}")
    return [f"  {group}", *rows]


def print_help(argv: Sequence[str]) -> None:
    """Writes the help text to stdout."""
    print_problems(config_dirs_of(argv))
    sys.stdout.write(render_help(argv))
