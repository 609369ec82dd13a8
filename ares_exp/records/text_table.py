"""Tables on a terminal, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

COLUMN_GAP = 3


def columns_that_fit(
    columns: Mapping[str, Sequence[str]], width: int, *, leave_out: Sequence[str]
) -> dict[str, Sequence[str]]:
    """Selects the cells of a table, by column name, for which `width` characters suffice.

    Args:
        columns: All there are.
        width: Of the terminal.
        leave_out: What a terminal too narrow for all goes without, one after the other.
    """
    fitting = dict(columns)
    widths = {name: max(map(len, (name, *cells))) + COLUMN_GAP for name, cells in columns.items()}
    for name in leave_out:
        if sum(widths.values()) > width:
            del fitting[name], widths[name]
    return fitting


def make_table(columns: Mapping[str, Sequence[str]], *, texts: Collection[str]) -> Table:
    """Makes a table of printable cells. Columns that are `texts` are wrapped, the others are aligned right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        if name in texts:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table
