"""The arithmetic of extents: every byte has one place, and disks have equal shares."""

import hypothesis.strategies as st
from hypothesis import given

from zeroshard.stores.files import chunk_size, cut

BLOCK = 4
BLOCKS = st.integers(0, 60).map(lambda count: count * BLOCK)
SIZES = st.integers(1, 9).map(lambda count: count * BLOCK)


@given(st.lists(BLOCKS, min_size=1, max_size=6), SIZES, st.lists(BLOCKS, min_size=1, max_size=4))
def test_extents_cover_their_bytes_once_and_never_each_other(extents, size, starts):
    ends, taken = starts, set()
    for padded in extents:
        chunks = cut(padded, size, ends)
        assert [chunk.start for chunk in chunks] == list(range(0, padded, size))
        assert sum(chunk.num_bytes for chunk in chunks) == padded
        assert all(0 < chunk.num_bytes <= size and chunk.offset % BLOCK == 0 for chunk in chunks)
        places = {(chunk.file, byte) for chunk in chunks for byte in range(chunk.offset, _end(chunk))}
        assert len(places) == padded
        assert not places & taken
        taken |= places
        after = ends_after(chunks, ends)
        assert sum(after) - sum(ends) == padded
        assert all(_end(chunk) <= after[chunk.file] for chunk in chunks)
        ends = after
    assert taken == {(file, byte) for file, end in enumerate(ends) for byte in range(starts[file], end)}


def _end(chunk):
    return chunk.offset + chunk.num_bytes


def ends_after(chunks, ends):
    """The ends of the files after new chunks."""
    after = list(ends)
    for chunk in chunks:
        after[chunk.file] = max(after[chunk.file], _end(chunk))
    return after


@given(st.lists(BLOCKS, min_size=1, max_size=6), SIZES, st.integers(1, 4))
def test_no_disk_gets_more_than_a_chunk_beyond_another(extents, size, num_files):
    ends = [0] * num_files
    for padded in extents:
        ends = ends_after(cut(padded, size, ends), ends)
        assert max(ends) - min(ends) <= size


@given(BLOCKS, st.integers(1, 8), st.integers(1, 3), st.integers(1, 4))
def test_each_thread_gets_a_chunk_where_chunks_are_not_too_small(padded, num_parts, least, factor):
    least, most = least * BLOCK, least * BLOCK * factor
    size = chunk_size(padded, num_parts, least, most)
    assert size % least == 0
    assert least <= size <= most
    num_chunks = -(-padded // size)
    assert num_chunks <= num_parts or size == most
    assert size in (least, most) or (num_chunks - 1) * size < padded <= num_parts * size
