"""The options of the groups as rows: name, description, origin; of environments also the number of tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ares_exp.config.options import BUILT_IN, Option, find_options
from ares_exp.config.plugins import installed_plugins
from ares_exp.config.targets import explain_target
from ares_exp.errors import PresetError, UserError
from ares_exp.presets.configured_preset import ConfiguredPreset

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
"""The sections that list a group's options."""
WITHOUT_TARGET = ("experiment", "scorer")
"""Groups with options that make nothing themselves."""
PLUGINS = "plugins"
COUNT_TIMEOUT_SEC = 10.0
"""What counting the tasks of one environment may take: a plugin may do anything."""

Row = dict[str, Any]


def section(name: str, config_dirs: Sequence[Path], report: Callable[[str], None]) -> list[Row]:
    """Makes the rows of a section, JSON-ready.

    Args:
        name: One of `GROUP_OF`, or `plugins`.
        config_dirs: Folders of options of the user's own.
        report: Called with a sentence about options, not built in, that cannot be used, and about environments
            whose tasks cannot be counted.
    """
    return _plugins() if name == PLUGINS else _options(GROUP_OF[name], config_dirs, report)


def _options(group: str, config_dirs: Sequence[Path], report: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for option in find_options(group, config_dirs):
        problem = None if option.origin == BUILT_IN else option_problem(option)
        if problem is not None:
            report(f"`{group}={option.name}` ({option.origin}) cannot be used: {problem}")
        row: Row = {"name": option.name}
        if group == "env":
            row["tasks"] = count_tasks(option, config_dirs, report) if problem is None else None
        rows.append(row | {"description": option.description, "from": option.origin, "file": str(option.path)})
    return rows


def option_problem(option: Option) -> str | None:
    """Says what is wrong with the file of an option, so that choosing it would be refused; `None`: nothing is seen.

    What it names is imported, and not made.
    """
    import yaml

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
    return f"{option.path} has no `_target_`: name the class that it makes."


def count_tasks(option: Option, config_dirs: Sequence[Path], report: Callable[[str], None]) -> int | None:
    """Counts the tasks of an environment; `None` when it is not known. A call that fails or hangs is abandoned."""
    preset = ConfiguredPreset(option.name, config_dirs=tuple(config_dirs))
    found: list[int | BaseException | None] = []

    def count() -> None:
        try:
            found.append(preset.count_tasks())
        except PresetError:  # it lacks a value that only its user knows
            found.append(None)
        except BaseException as error:
            found.append(error)

    counting = threading.Thread(target=count, name=f"count {option.name}", daemon=True)
    counting.start()
    counting.join(COUNT_TIMEOUT_SEC)
    result = found[0] if found else TimeoutError(f"it takes longer than {COUNT_TIMEOUT_SEC:g} s")
    if not isinstance(result, BaseException):
        return result
    if option.origin != BUILT_IN:
        kind = "" if isinstance(result, UserError) else f"{type(result).__name__}: "
        said = " ".join(str(result).split())
        report(f"The tasks of `env={option.name}` ({option.origin}) cannot be counted: {kind}{said}")
    return None


def _plugins() -> list[Row]:
    return [
        {"name": plugin.name, "package": plugin.package, "file": str(plugin.folder)}
        for plugin in installed_plugins().plugins
    ]
