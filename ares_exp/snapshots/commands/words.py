"""Parts of a snapshot in words that a terminal can show."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.terminal.terminal import one_line


def moment(snapshot: EnvironmentSnapshot) -> str:
    """Returns when it was taken."""
    return f"{datetime.fromisoformat(snapshot.created_at):%Y-%m-%d %H:%M:%S UTC}"


def task_name(snapshot: EnvironmentSnapshot) -> str:
    """Returns the name of the task, as far as the snapshot says."""
    return one_line(str(snapshot.task_data.get("name", "–")))


def came_from(snapshot: EnvironmentSnapshot) -> str:
    """Returns its parent and branch; `–` for an episode played from its beginning."""
    parent, branch = snapshot.lineage.get("parent"), snapshot.lineage.get("branch")
    if parent is None:
        return "–"
    return one_line(f"{parent}{'' if branch is None else f' #{branch}'}")


def pairs(data: Any) -> str:
    """Returns a mapping on one line."""
    return "  ".join(f"{one_line(str(name))}={one_line(str(value))}" for name, value in data.items())
