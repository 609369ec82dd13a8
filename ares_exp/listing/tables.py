"""The sections as tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ares_exp.listing.choices import Row
from ares_exp.terminal.table import columns_that_fit, make_table
from ares_exp.terminal.terminal import make_console, one_line

TEXTS = ("name", "description", "from", "package", "file", "image", "agent", "verifier")
LEAVE_OUT = ("file", "verifier", "memory", "cpus", "image")
UNKNOWN = "?"
CELL_CHARS = 200


def print_sections(sections: Mapping[str, Sequence[Row]]) -> None:
    """Prints each section under its name."""
    console = make_console()
    for name, rows in sections.items():
        console.print(name, style="bold")
        if not rows:
            console.print("  none\n")
            continue
        columns = _task_columns(rows) if name == "tasks" else _option_columns(rows)
        optional = [column for column in LEAVE_OUT if column in columns]
        console.print(make_table(columns_that_fit(columns, console.width, leave_out=optional), texts=TEXTS))


def _option_columns(rows: Sequence[Row]) -> dict[str, Sequence[str]]:
    shown = [name for name in rows[0] if name != "file" or "package" in rows[0]]
    return {name: [_cell(row[name]) for row in rows] for name in shown}


def _task_columns(rows: Sequence[Row]) -> dict[str, Sequence[str]]:
    columns: dict[str, Sequence[str]] = {
        "index": [str(row["index"]) for row in rows],
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
    """Formats the time limits of the stages, in their order."""
    return " + ".join("none" if stage[key] is None else f"{stage[key]:g} s" for stage in row["stages"])


def _cell(value: Any) -> str:
    return UNKNOWN if value is None else one_line(f"{value:g}" if isinstance(value, float) else str(value), CELL_CHARS)
