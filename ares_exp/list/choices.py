"""The options of the groups as rows: name, description, origin; of environments also the number of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ares_exp.configured_preset import ConfiguredPreset
from ares_exp.options import find_options
from ares_exp.plugins import installed_plugins

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
    "experiments": "experiment",
}
"""The sections that list a group's options."""
PLUGINS = "plugins"

Row = dict[str, Any]


def section(name: str, config_dirs: Sequence[Path]) -> list[Row]:
    """The rows of a section, JSON-ready.

    Args:
        name: One of `GROUP_OF`, or `plugins`.
        config_dirs: Folders of options of the user's own.
    """
    return _plugins() if name == PLUGINS else _options(GROUP_OF[name], config_dirs)


def _options(group: str, config_dirs: Sequence[Path]) -> list[Row]:
    rows: list[Row] = []
    for option in find_options(group, config_dirs):
        row: Row = {"name": option.name}
        if group == "env":
            row["tasks"] = ConfiguredPreset(option.name, config_dirs=tuple(config_dirs)).get_info().num_tasks
        rows.append(row | {"description": option.description, "from": option.origin, "file": str(option.path)})
    return rows


def _plugins() -> list[Row]:
    return [
        {"name": plugin.name, "package": plugin.package, "file": str(plugin.folder)}
        for plugin in installed_plugins().plugins
    ]
