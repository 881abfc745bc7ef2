"""Tables that reports print."""

import pytest

from zeroshard.tables import LINE, format_count, render


def test_a_line_stands_above_totals_and_no_line_ends_in_blanks():
    rows = [("first", "1 B"), LINE, ("total", "1 B")]
    lines = render("title", ("kind", "bytes"), rows).splitlines()
    assert [line.strip("─ ") for line in lines] == [
        "title",
        "kind    bytes",
        "",
        "first     1 B",
        "",
        "total     1 B",
    ]
    assert not [line for line in lines if line != line.rstrip()]


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (62_500_000, "62.5 M"), (999_600_000, "1.00 B"), (405 * 10**9, "405 B")]
)
def test_counts_are_written_in_powers_of_1000(count, text):
    assert format_count(count) == text
