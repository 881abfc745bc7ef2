from __future__ import annotations

import pytest

from zeroshard.plan.layout import BLOCK
from zeroshard.plan.pieces import cut


@pytest.mark.parametrize("size", [0, 1, 256, 257, 1024, 3000, 5000])
@pytest.mark.parametrize("most", [256, 1024, 10_000])
def test_pieces_hold_each_element_once_and_begin_on_blocks(size: int, most: int) -> None:
    pieces = cut(size, most)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])][: len(pieces)]
    assert sum(piece.size for piece in pieces) == size
    assert all(piece.start % BLOCK == 0 and piece.size <= most + BLOCK for piece in pieces)
