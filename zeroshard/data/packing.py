"""The arithmetic of blocks: documents that are held out, pieces of documents, pieces in blocks.

With seq_len 4, documents a (6 tokens), b (2) and c (3), and one token of padding:

    documents   a0 a1 a2 a3 a4 a5 | b0 b1 | c0 c1 c2
    pieces      a0 a1 a2 a3   a3 a4 a5   b0 b1   c0 c1 c2
    blocks      a0 a1 a2 a3 | a3 a4 a5 . | c0 c1 c2 . | b0 b1 . .

Pieces of a document overlap by one token, which is a label in the first of them only. So each token but the
first of a document is a label once, at any seq_len.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"

WINDOW = 1 << 16
"""Pieces that are packed together: bounds the memory of the search, and keeps padding as low as for all."""


class Packed(NamedTuple):
    """The pieces of each block."""

    order: Ints
    """[num_pieces], indices of pieces."""
    firsts: Ints
    """[num_blocks + 1]: block b has the pieces order[firsts[b]:firsts[b + 1]]."""


def choose_held_out(lengths: Ints, digests: npt.NDArray[np.uint64], share: float) -> npt.NDArray[np.bool_]:
    """Choose documents to hold out: in the order of their digests, up to a share of their tokens.

    At least one document is held out, and at least one is not. Equal documents go together if that leaves
    any to train on. A document longer than the whole share is held out only if there is no shorter one.

    Args:
        lengths: [num_documents], tokens; at least 2 documents.
        digests: [num_documents], of the contents.
        share: above 0, below 1.

    Returns:
        [num_documents], True for those that are held out.
    """
    fits = np.flatnonzero(lengths <= max(share * lengths.sum(), lengths.min()))
    order = fits[np.argsort(digests[fits], kind="stable")]
    left = share * lengths[order].sum()
    chosen: list[int] = []
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if length <= left or not chosen:  # one that is too long leaves room for shorter ones
            chosen.append(document)
            left -= length
    taken = np.array(chosen)
    held: npt.NDArray[np.bool_] = np.isin(digests, digests[taken])
    if held.all():
        held[:] = False
        held[taken] = True
    return held


def cut(starts: Ints, lengths: Ints, seq_len: int) -> Ints:
    """Cut documents into pieces of at most `seq_len` tokens; a document below 2 tokens has nothing to learn.

    Returns:
        [num_pieces, 2], start and length of each.
    """
    step = seq_len - 1
    nums = -(-np.maximum(lengths - 1, 0) // step)
    document = np.repeat(np.arange(len(lengths)), nums)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(nums) - nums, nums)) * step
    return np.stack([starts[document] + offset, np.minimum(seq_len, lengths[document] - offset)], axis=1)


def best_fit(lengths: Ints, seq_len: int) -> Packed:
    """Pack pieces, the longest first, each into the fullest block that has room for it.

    Best-fit decreasing cuts no document that fits into a block, unlike filling blocks in order (Ding et al.,
    Fewer Truncations Improve Language Modeling, 2024). `WINDOW` pieces are packed at a time.
    """
    order: list[Ints] = []
    sizes: list[Ints] = []
    for begin in range(0, len(lengths), WINDOW):
        blocks = _best_fit(lengths[begin : begin + WINDOW], seq_len)
        order += [begin + np.array(pieces, dtype=np.int64) for pieces in blocks]
        sizes.append(np.array([len(pieces) for pieces in blocks], dtype=np.int64))
    empty = np.zeros(0, dtype=np.int64)
    firsts = np.append(np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate([empty, *sizes])))
    return Packed(np.concatenate([empty, *order]), firsts)


def one_by_one(lengths: Ints) -> Packed:
    """Give each piece a block of its own."""
    return Packed(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def _best_fit(lengths: Ints, seq_len: int) -> list[list[int]]:
    blocks: list[list[int]] = []
    rooms: list[int] = []  # the different numbers of free tokens, sorted
    with_room: dict[int, list[int]] = {}
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, block = seq_len, len(blocks)
            blocks.append([])
        else:
            room = rooms[at]
            block = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        blocks[block].append(piece)
        left = with_room.setdefault(room - length, [])
        if not left and room > length:
            insort(rooms, room - length)
        left.append(block)
    return blocks
