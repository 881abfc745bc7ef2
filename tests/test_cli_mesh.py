"""`zeroshard mesh`: the places of ranks, as a person reads them."""

from __future__ import annotations

import pytest

from tests import commands
from zeroshard.plan.arrangement import Arrangement


@pytest.mark.parametrize(
    ("num_ranks", "pp", "tp", "size"), [(1, 1, 1, None), (32, 4, 4, None), (24, 1, 2, 3), (16, 2, 2, 2)]
)
def test_each_rank_has_a_line_with_its_place_on_each_axis(capsys, num_ranks, pp, tp, size):
    options = () if size is None else ("--shard-group-size", size)
    title, columns, _, *rows = commands.shown(
        capsys, "mesh", "--ranks", num_ranks, "--tp", tp, "--pp", pp, *options
    ).splitlines()
    arrangement = Arrangement(num_ranks, pp, tp, size)
    sizes = arrangement.sizes._asdict()
    assert title.endswith(": " + " x ".join(f"{axis} {number}" for axis, number in sizes.items()))
    assert columns.split() == ["rank", *sizes]
    expected = [[rank, *arrangement.coordinates(rank)] for rank in range(num_ranks)]
    assert [list(map(int, row.split())) for row in rows] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "--ranks"),
        (("--ranks", "many"), "'many'"),
        (("--ranks", 0), "num_ranks: expected at least 1 rank, got 0"),
        (("--ranks", 10**12), "--ranks: expected at most 4,096, got 1,000,000,000,000"),
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
