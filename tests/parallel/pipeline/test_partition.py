"""The partition of blocks into chunks, against a search through all divisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.training import refused
from zeroshard.parallel.pipeline.partition import BlockProfile, partition

BALANCES = ("time", "memory")

profiles = st.lists(
    st.builds(
        BlockProfile,
        time=st.one_of(st.integers(0, 4), st.integers(0, 1 << 40)),
        parameter_bytes=st.integers(0, 5),
    ),
    min_size=1,
    max_size=7,
)


def divisions(num_blocks: int, num_chunks: int) -> Iterator[tuple[range, ...]]:
    for cuts in combinations(range(1, num_blocks), num_chunks - 1):
        yield tuple(range(first, end) for first, end in pairwise((0, *cuts, num_blocks)))


def variance(numbers: Sequence[Fraction]) -> Fraction:
    mean = sum(numbers) / Fraction(len(numbers))
    return sum(((number - mean) ** 2 for number in numbers), Fraction()) / len(numbers)


def measure(blocks: Sequence[BlockProfile], chunks: tuple[range, ...], balance: str) -> tuple[Any, ...]:
    """The value that is to be least, then the rule for divisions with the same value."""
    times = [sum((Fraction(blocks[i].time) for i in chunk), Fraction()) for chunk in chunks]
    sizes = [Fraction(sum(blocks[i].parameter_bytes for i in chunk)) for chunk in chunks]
    measures = {
        "time": (variance(times),),
        "memory": (variance(sizes),),
    }
    return (*measures[balance], [len(chunk) for chunk in chunks])


@given(profiles, st.sampled_from(BALANCES), st.data())
def test_a_search_through_all_divisions_finds_the_same(
    blocks: list[BlockProfile], balance: Any, data: st.DataObject
) -> None:
    num_chunks = data.draw(st.integers(1, len(blocks)))
    expected = min(divisions(len(blocks), num_chunks), key=lambda chunks: measure(blocks, chunks, balance))
    assert partition(blocks, num_chunks, balance) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_chunks": 4}, "expected 1 to 3 chunks, as each has a block or more, got 4"),
        ({"num_chunks": 0}, "expected 1 to 3 chunks, as each has a block or more, got 0"),
    ],
)
def test_an_impossible_partition_is_refused(options: Any, expected: str) -> None:
    assert expected in refused(partition, [BlockProfile(time=1, parameter_bytes=5)] * 3, **options)
