"""`zeroshard mesh`: the groups of ranks, as a person reads them."""

from __future__ import annotations

import re

import pytest

from tests import commands


def shown(capsys, *arguments: object) -> list[str]:
    """The paragraphs that the command prints."""
    return commands.shown(capsys, "mesh", *arguments).removesuffix("\n").split("\n\n")


def cells(paragraph: str) -> tuple[str, list[str], list[list[str]]]:
    """The title of a table, the names of its columns, and its rows."""
    title, columns, _, *rows = paragraph.splitlines()
    return title, columns.split(), [re.split(r"\s{2,}", row.strip()) for row in rows]


def tables(paragraphs: list[str]) -> dict[str, list[list[int]]]:
    """The groups of each table, by its title."""
    found = {}
    for paragraph in paragraphs:
        if "────" in paragraph:
            title, _, rows = cells(paragraph)
            found[title] = [[int(rank) for rank in row[-1].split(", ")] for row in rows]
    return found


def test_every_group_of_32_ranks_with_tp_4_and_pp_4_is_shown(capsys):
    paragraphs = shown(capsys, "--ranks", 32, "--tp", 4, "--pp", 4)
    assert tables(paragraphs) == {
        "8 tensor groups of 4 consecutive ranks (tp)": [[r, r + 1, r + 2, r + 3] for r in range(0, 32, 4)],
        "16 data groups of 2 ranks, stride 4 (dp_shard)": [[r, r + 4] for r in range(32) if r % 8 < 4],
        "8 pipeline groups of 4 ranks, stride 8 (pp)": [[r, r + 8, r + 16, r + 24] for r in range(8)],
    }
    assert paragraphs[0].splitlines() == [
        "32 ranks, counted along the last axis first: pp 4 x dp_replicate 1 x dp_shard 2 x tp 4",
        "parts of the model, pp x tp: 16; data-parallel ranks of a part: 2",
    ]
    assert paragraphs[-1] == "no groups along axes of 1 rank: dp_replicate"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "--ranks"),
        (("--ranks", "many"), "'many'"),
        (("--ranks", 0), "num_ranks: expected at least 1 rank, got 0"),
        (("--ranks", 10**12), "--ranks: expected at most 65,536, got 1,000,000,000,000"),
        (("--ranks", 8, "--tp", 0), "config key 'mesh.tp': expected an integer >= 1, got 0"),
        (("--ranks", 8, "--pp", -1), "config key 'mesh.pp': expected an integer >= 1, got -1"),
        (("--ranks", 8, "--shard-group-size", 0), "config key 'shard_group_size'"),
        (
            ("--ranks", 32, "--tp", 3, "--pp", 4),
            "32 rank(s) cannot be arranged with mesh.pp=4, mesh.tp=3: expected a multiple of 12",
        ),
        (
            ("--ranks", 32, "--tp", 4, "--shard-group-size", 3),
            "32 rank(s) cannot be arranged with mesh.tp=4, shard_group_size=3: expected a multiple of 12",
        ),
        (
            ("--ranks", 8, "--shard-group-size", 3),
            "8 rank(s) cannot be arranged with shard_group_size=3: expected a multiple of 3",
        ),
    ],
)
def test_a_mesh_that_cannot_be_ends_with_2_and_one_line(capsys, arguments, expected):
    code, err = commands.failure(capsys, "mesh", *arguments)
    assert code == 2
    assert expected in err
