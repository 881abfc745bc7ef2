"""A small table for people, as reports print it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO


def format_bytes(count: float) -> str:
    """A byte count in the unit a person would use, powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def render(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], width: int = 100) -> str:
    """A plain-text table: the first column to the left, all others to the right.

    Args:
        title: the line above the table.
        columns: the names of the columns.
        rows: a cell for each column.
        width: the most characters of a line; cells of a wider table are broken into lines.
    """
    # Imported when a report is printed, not with the package.
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title))
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    text = StringIO()
    Console(file=text, width=width, no_color=True).print(table)
    return text.getvalue().rstrip()
