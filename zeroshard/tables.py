"""Tables and time lines for people, as reports print them, and sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

LINE: tuple[str, ...] = ()
"""In the place of a row: a line across the table, above totals."""


_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 1000, 500MB or 2GiB. Raises ValueError for another text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a size such as 5GB, got {text!r}")
    unit = (match["unit"] or "B").upper()
    return int(float(match["number"]) * (1024 if "I" in unit else 1000) ** "BKMGT".index(unit[0]))


def format_bytes(count: float) -> str:
    """A byte count in the unit a person would use, powers of 1024."""
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if abs(count) < 1024:
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def format_count(count: float) -> str:
    """A number of parameters in the unit a person would use, powers of 1000: 7.24 B."""
    for unit in ("", " K", " M"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:,.2f} B" if count < 99.995 else f"{count:,.0f} B"


def render(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain-text table: the first column to the left, all others to the right.

    Args:
        title: the line above the table; "" for none.
        columns: the names of the columns.
        rows: a cell for each column, the first one perhaps of several lines; or LINE.
    """
    cells = [columns, LINE, *rows]
    widths = [max(map(len, "\n".join(own).split("\n"))) for own in zip(*filter(None, cells), strict=True)]
    lines = [title] if title else []
    for row in cells:
        if row:
            first, *more = row[0].split("\n")
            line = "   ".join((f" {first:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])))
            lines += [line.rstrip(), *(f" {line}" for line in more)]
        else:
            lines.append(" " + "─" * (sum(widths) + 3 * (len(widths) - 1)))
    return "\n".join(lines)


def draw(spans: Iterable[tuple[str, str, float, float]], width: int = 72) -> str:
    """Return the time line of a step as text, with a row for each resource or pipeline rank.

    F forward, B backward (I, W its halves), G gather, R reduction, L parameters from the host, S states to
    the device and back, s step. Of micro-batches every second one is in small letters.
    """
    spans, rows = list(spans), dict[str, list[str]]()
    seconds = max(end for *_, end in spans)
    for row, label, start, end in spans:
        cells = rows.setdefault(row, [" "] * width)
        kind = label.lstrip("0123456789")  # an action such as 0F3 begins with its chunk
        letter = kind[0].lower() if kind[-1] in "13579" else kind[0]
        first, last = (int(width * time / seconds) for time in (start, end))
        for cell in range(min(first, width - 1), min(max(last, first + 1), width)):
            cells[cell] = letter
    return "\n".join(f"{row:<8} |{''.join(cells)}|" for row, cells in rows.items())
