"""A small table for people, as reports print it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

LINE: tuple[str, ...] = ()
"""In the place of a row: a line across the table, above totals."""


def format_bytes(count: float) -> str:
    """A byte count in the unit a person would use, powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def format_count(count: float) -> str:
    """A number of parameters in the unit a person would use, powers of 1000: 7.24 B."""
    for unit in ("", " K", " M"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:,.2f} B" if count < 99.995 else f"{count:,.0f} B"


def render(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], width: int = 100) -> str:
    """A plain-text table: the first column to the left, all others to the right.

    Args:
        title: the line above the table; "" for none.
        columns: the names of the columns.
        rows: a cell for each column; or LINE.
        width: the most characters of a line; cells of a wider table are broken into lines.
    """
    # Imported when a report is printed, not with the package.
    from rich.box import Box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    blank, line = "    \n", " ── \n"
    # rich's lines: top, head, below the head, middle, between sections, above the foot, foot, bottom
    table = Table(box=Box(2 * blank + line + blank + line + 3 * blank), pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if index else "left", overflow="fold")
    for row in rows:
        if row:
            table.add_row(*map(escape, row))
        else:
            table.add_section()
    text = StringIO()
    Console(file=text, width=width, no_color=True).print(table)
    lines = [title, *text.getvalue().splitlines()]
    return "\n".join(line.rstrip() for line in lines if line.strip())
