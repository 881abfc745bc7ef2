from __future__ import annotations

import pytest

from zeroshard.memory.activations import typical_sizes
from zeroshard.plan.layout import BLOCK
from zeroshard.plan.pieces import LEAST_BYTES, are_cut, cut

MB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([900], []),
        ([1, 100, 100, 100, 250, 0], [4]),
        ([100, 100, 124], []),  # saves too little
        ([100, 800, 100], []),  # most bytes would not go through buffers
        ([300, 100, 100, 100, 100, 100, 100, 300], [0, 7]),
    ],
)
def test_units_that_are_larger_than_those_with_half_of_all_bytes_are_cut(
    sizes: list[int], expected: list[int]
) -> None:
    assert [n for n, is_cut in enumerate(are_cut([size * MB for size in sizes])) if is_cut] == expected


def test_small_units_are_never_cut() -> None:
    assert are_cut([LEAST_BYTES, 1, 1, LEAST_BYTES]) == [False] * 4


@pytest.mark.parametrize("num_params", [1e9, 7e9, 13e9, 30e9])
def test_embedding_and_head_of_a_typical_model_are_cut_and_no_block_is(num_params: float) -> None:
    sizes = typical_sizes(int(num_params))
    tables = [sizes.embedding] * (1 if sizes.is_tied else 2)
    assert are_cut([2 * size for size in (*tables, *sizes.blocks)]) == [
        *(True for _ in tables),
        *(False for _ in sizes.blocks),
    ]


@pytest.mark.parametrize("sizes", [[5000], [0, 1, 256, 257, 0], [1024, 1024, 1024], [3000, 10, 10, 4096]])
@pytest.mark.parametrize("most", [256, 1024, 10_000])
def test_pieces_hold_each_element_once_and_begin_on_blocks(sizes: list[int], most: int) -> None:
    together = cut(sizes, most)
    for index, size in enumerate(sizes):
        own = [piece for part in together for piece in part if piece.parameter == index]
        assert [piece.start for piece in own] == [0, *(piece.stop for piece in own[:-1])]
        assert own[-1].stop == size
        assert all(piece.start % BLOCK == 0 for piece in own)
    assert all(sum(p.stop - p.start for p in part) <= most + BLOCK for part in together)
    assert all(len({p.parameter for p in part}) == len(part) for part in together)
