"""The arithmetic of extents: bytes of a tensor become chunks in files; pure integers.

    padded bytes   |--- 0 ---|--- 1 ---|--- 2 ---|--- 3 ---|- 4 -|
    file 0             0          2         4
    file 1             1          3

A chunk is what one thread reads or writes with one call. Each goes to the file with the least bytes, so files
take turns, and none is ever ahead of another by more than a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """A part of an extent: a range of a file and the same number of bytes in memory."""

    file: int
    """The number of the file."""
    offset: int
    """Bytes from the beginning of the file."""
    start: int
    """Bytes from the beginning of the extent."""
    num_bytes: int


def round_up(num_bytes: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `num_bytes`."""
    return -(-num_bytes // multiple) * multiple


def chunk_size(padded: int, num_parts: int, least: int, most: int) -> int:
    """Return the bytes of the chunks of an extent.

    Args:
        padded: bytes of the extent.
        num_parts: the number of threads that should have something to do.
        least: bytes of the smallest chunk; a multiple of the alignment, as the result is.
        most: bytes of the largest chunk; a multiple of `least`.
    """
    return min(most, max(least, round_up(-(-padded // num_parts), least)))


def cut(padded: int, size: int, ends: Sequence[int]) -> tuple[Chunk, ...]:
    """Cut an extent into chunks behind the present ends of the files.

    Args:
        padded: bytes of the extent.
        size: bytes of a chunk; the last one may be smaller.
        ends: for each file, the offset at which free space begins.
    """
    chunks, offsets = [], list(ends)
    for start in range(0, padded, size):
        file = offsets.index(min(offsets))
        num_bytes = min(size, padded - start)
        chunks.append(Chunk(file, offsets[file], start, num_bytes))
        offsets[file] += num_bytes
    return tuple(chunks)


def ends_after(chunks: Sequence[Chunk], ends: Sequence[int]) -> list[int]:
    """Return the ends of the files after new chunks."""
    after = list(ends)
    for chunk in chunks:
        after[chunk.file] = max(after[chunk.file], chunk.offset + chunk.num_bytes)
    return after
