"""The options of the groups as rows: name, description, origin; of environments also the number of tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ares_exp.config.options import BUILT_IN, Option, find_options
from ares_exp.config.plugins import installed_plugins
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
    "retries": "retry",
    "budgets": "budget",
    "scorers": "scorer",
    "experiments": "experiment",
}
"""The sections that list a group's options."""
PLUGINS = "plugins"
COUNT_TIMEOUT_SEC = 10.0
"""What counting the tasks of one environment may take: a plugin may do anything."""

Row = dict[str, Any]


def section(name: str, config_dirs: Sequence[Path], report: Callable[[str], None]) -> list[Row]:
    """Makes the rows of a section, JSON-ready.

    Args:
        name: One of `GROUP_OF`, or `plugins`.
        config_dirs: Folders of options of the user's own.
        report: Called with a sentence about environments, not built in, whose tasks cannot be counted.
    """
    return _plugins() if name == PLUGINS else _options(GROUP_OF[name], config_dirs, report)


def _options(group: str, config_dirs: Sequence[Path], report: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for option in find_options(group, config_dirs):
        row: Row = {"name": option.name}
        if group == "env":
            row["tasks"] = count_tasks(option, config_dirs, report)
        rows.append(row | {"description": option.description, "from": option.origin, "file": str(option.path)})
    return rows


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
