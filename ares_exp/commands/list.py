"""The command `list`: lists the available options, plugins and tasks, and where they come from."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import yaml

from ares_exp.commands.cli.run_command import add_config_dir
from ares_exp.config.options import BUILT_IN, Option, find_options, installed_plugins, print_problems
from ares_exp.config.targets import explain_target
from ares_exp.environments.source import make_source
from ares_exp.errors import ConfigError, PresetError, UserError, close_matches
from ares_exp.records.terminal_text import make_console, one_line, print_table, print_warning
from ares_exp.tasks.task_contract import Task

GROUP_OF: Mapping[str, str] = {
    "envs": "env",
    "agents": "agent",
    "containers": "container",
    "policies": "policy",
    "wrappers": "wrapper",
    "collectors": "collector",
    "trackers": "tracker",
    "snapshots": "snapshot",
    "executors": "executor",
    "scorers": "scorer",
    "experiments": "experiment",
}
"""Sections of the list that contain options, and the config group of each section."""
WITHOUT_TARGET = ("experiment", "scorer")
"""Config groups whose options need no `_target_`, because they do not create an object."""
PLUGINS = "plugins"
COUNT_TIMEOUT_SEC = 10.0
"""Time limit, in seconds, for counting the tasks of one environment, because a plugin can hang."""

Row = dict[str, Any]

TEXTS = ("name", "description", "from", "package", "file", "image", "agent", "verifier")
LEAVE_OUT = ("file", "verifier", "memory", "cpus", "image")
UNKNOWN = "?"
CELL_CHARS = 200

TASKS = "tasks"
SECTIONS = (*GROUP_OF, PLUGINS, TASKS)
HELP = f"""\
Lists the available options, each with a description and its origin: built in, a plugin, or your own folder. For each
environment it also prints the number of tasks, or `?` if the number is not known without network access.
[arguments]
Examples:
  %(prog)s                    everything
  %(prog)s envs               the environments, which are also the presets of `ares_exp.make`
  %(prog)s policies --json
  %(prog)s tasks env=harbor env.path=path/to/tasks 'env.tasks=fix-*'

Sections: {", ".join(SECTIONS)}.
Exit codes: 0 listed; 2 the command line is wrong, or the tasks cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("section", nargs="?", metavar="SECTION", help="what to list; everything but tasks by default")
    parser.add_argument("overrides", nargs="*", metavar="env=…", help="for `tasks`: overrides, as for a run")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    add_config_dir(parser)


def run(arguments: argparse.Namespace) -> None:
    asked = arguments.section
    name = next((plural for plural, group in GROUP_OF.items() if group == asked), asked)
    if name is not None and name not in SECTIONS:
        raise ConfigError(
            f"Expected one of {', '.join(SECTIONS)}, got {asked!r}.{close_matches(asked, [*SECTIONS])} To list the "
            "tasks of an environment, use `ares-exp list tasks env=…`."
        )
    if arguments.overrides and name != TASKS:
        raise ConfigError(f"Expected overrides only after `tasks`, got {' '.join(arguments.overrides)} after `{name}`.")
    folders = [folder.absolute() for folder in arguments.config_dir]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"There is no folder {folder}. Set `--config-dir` to a folder of options.")
    print_problems(folders)
    with redirect_stdout(sys.stderr):  # a plugin may print
        if name == TASKS:
            sections = {TASKS: _task_rows(arguments.overrides, folders)}
        else:
            chosen = [name] if name is not None else [one for one in SECTIONS if one != TASKS]
            sections = {one: _plugins() if one == PLUGINS else _options(GROUP_OF[one], folders) for one in chosen}
    if arguments.json:
        sys.stdout.write(f"{json.dumps(sections, indent=2)}\n")
    else:
        _print_tables(sections)


def _options(group: str, config_dirs: Sequence[Path]) -> list[Row]:
    rows: list[Row] = []
    for option in find_options(group, config_dirs):
        problem = None if option.origin == BUILT_IN else _problem_of(option)
        if problem is not None:
            print_warning(f"`{group}={option.name}` ({option.origin}) cannot be used: {problem}")
        row: Row = {"name": option.name}
        if group == "env":
            row["tasks"] = _count_tasks(option, config_dirs) if problem is None else None
        rows.append(row | {"description": option.description, "from": option.origin, "file": str(option.path)})
    return rows


def _problem_of(option: Option) -> str | None:
    """Checks an option's file, and that its class can be imported. Returns the problem; `None` if there is none."""
    try:
        node = yaml.safe_load(option.path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return f"{option.path}: {' '.join(str(error).split())}"
    if not isinstance(node, Mapping):
        return f"{option.path}: expected `key: value` lines, got {type(node).__name__}."
    target = node.get("_target_")
    if isinstance(target, str):
        why = explain_target(target)
        return None if why is None else f"{option.path}: {why}"
    if option.group in WITHOUT_TARGET or "defaults" in node:
        return None
    return f"{option.path} has no `_target_`. Set `_target_` to the class that the option creates."


def _count_tasks(option: Option, config_dirs: Sequence[Path]) -> int | None:
    """Returns the number of tasks of an environment.

    Returns `None` if counting fails or takes longer than `COUNT_TIMEOUT_SEC`, or if the user has to set a key first.
    """
    from ares_exp.wrappers.registry import ConfiguredPreset

    preset = ConfiguredPreset(option.name, config_dirs=tuple(config_dirs))
    result: int | BaseException | None = TimeoutError(f"counting takes longer than {COUNT_TIMEOUT_SEC:g} s")

    def count() -> None:
        nonlocal result
        try:
            result = preset.count_tasks()
        except PresetError:  # the preset requires a value from the user
            result = None
        except BaseException as error:
            result = error

    counting = threading.Thread(target=count, name=f"count {option.name}", daemon=True)
    counting.start()
    counting.join(COUNT_TIMEOUT_SEC)
    found = result  # the thread may still be running
    if not isinstance(found, BaseException):
        return found
    if option.origin != BUILT_IN:
        kind = "" if isinstance(found, UserError) else f"{type(found).__name__}: "
        said = " ".join(str(found).split())
        print_warning(f"The tasks of `env={option.name}` ({option.origin}) cannot be counted: {kind}{said}")
    return None


def _plugins() -> list[Row]:
    return [
        {"name": plugin.name, "package": plugin.package, "file": str(plugin.folder)}
        for plugin in installed_plugins().plugins
    ]


def _task_rows(overrides: Sequence[str], config_dirs: Sequence[Path]) -> list[Row]:
    """Returns a row per selected task. `index` is the number that selects it (`env.tasks=5`); `None` if unknown."""
    from ares_exp.config.hydra_setup import compose_config

    source = make_source(compose_config(overrides, config_dirs=config_dirs))
    names = source.load(print_warning)
    facts = {task.name: _facts(task) for task in source.tasks}
    return [{"index": source.positions.get(name), "name": name, **facts.get(name, {})} for name in names]


def _facts(task: Task) -> Row:
    """Returns the columns for a task: its stages with their time limits, and its container's image and resources."""
    spec = task.container_spec
    return {
        "stages": [
            {
                "name": stage.name,
                "agent_timeout_sec": stage.agent_timeout_sec,
                "verifier_timeout_sec": stage.verifier_timeout_sec,
            }
            for stage in task.stages
        ],
        "image": spec.docker_image or ("Dockerfile" if spec.context_dir is not None else None),
        "cpus": spec.cpus,
        "memory_mb": spec.memory_mb,
    }


def _print_tables(sections: Mapping[str, Sequence[Row]]) -> None:
    """Prints a table for each section, below its name."""
    console = make_console()
    for name, rows in sections.items():
        console.print(name, style="bold")
        if not rows:
            console.print("  none\n")
            continue
        if name == TASKS:
            columns = _task_columns(rows)
        else:
            shown = [column for column in rows[0] if column != "file" or name == PLUGINS]
            columns = {column: [_cell(row[column]) for row in rows] for column in shown}
        print_table(console, columns, texts=TEXTS, leave_out=LEAVE_OUT)


def _task_columns(rows: Sequence[Row]) -> dict[str, Sequence[str]]:
    columns: dict[str, Sequence[str]] = {
        "index": [_cell(row["index"]) for row in rows],
        "name": [one_line(row["name"]) for row in rows],
    }
    if not any("stages" in row for row in rows):
        return columns
    facts: dict[str, Callable[[Row], str]] = {
        "stages": lambda row: str(len(row["stages"])),
        "agent": lambda row: _limits(row, "agent_timeout_sec"),
        "verifier": lambda row: _limits(row, "verifier_timeout_sec"),
        "image": lambda row: _cell(row["image"]),
        "cpus": lambda row: _cell(row["cpus"]),
        "memory": lambda row: UNKNOWN if row["memory_mb"] is None else f"{row['memory_mb']} MiB",
    }
    for name, fact in facts.items():
        columns[name] = [fact(row) if "stages" in row else UNKNOWN for row in rows]
    return columns


def _limits(row: Row, key: str) -> str:
    """Formats the time limits of the stages, in the order of the stages."""
    return " + ".join("none" if stage[key] is None else f"{stage[key]:g} s" for stage in row["stages"])


def _cell(value: Any) -> str:
    return UNKNOWN if value is None else one_line(f"{value:g}" if isinstance(value, float) else str(value), CELL_CHARS)
