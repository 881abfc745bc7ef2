"""Tables that reports print."""

from zeroshard.tables import render


def test_brackets_in_names_are_printed_as_they_are():
    rows = [("experts[0].weight", "[bold]"), ("a[/b]", "x")]
    text = render("tensors [all]", ("name[s]", "kind"), rows)
    for word in ("tensors [all]", "name[s]", "experts[0].weight", "[bold]", "a[/b]"):
        assert word in text
