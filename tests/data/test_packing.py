"""The arithmetic of held-out documents, pieces and blocks."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from blocks import best_fit, choose_held_out, cut

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=40).map(np.array)


@given(LENGTHS, st.integers(2, 12))
def test_each_token_but_the_first_of_a_document_is_a_label_once(lengths: np.ndarray, seq_len: int) -> None:
    starts = np.cumsum(lengths) - lengths
    pieces = cut(starts, lengths, seq_len)
    labels = [at for start, length in pieces for at in range(start + 1, start + length)]
    firsts = set(starts.tolist())
    assert labels == [at for at in range(lengths.sum()) if at not in firsts]
    assert ((pieces[:, 1] >= 2) & (pieces[:, 1] <= seq_len)).all()


@given(st.lists(st.integers(2, 16), max_size=60).map(lambda values: np.array(values, dtype=np.int64)))
def test_blocks_hold_each_piece_once_and_no_two_blocks_could_be_one(lengths: np.ndarray) -> None:
    packed = best_fit(lengths, 16)
    assert sorted(packed.order.tolist()) == list(range(len(lengths)))
    sums = [
        lengths[packed.order[first:end]].sum()
        for first, end in zip(packed.firsts[:-1], packed.firsts[1:], strict=True)
    ]
    assert all(0 < total <= 16 for total in sums)
    # A new block is begun only for a piece that fits into none, so no two blocks could be one.
    assert all(one + other > 16 for one, other in itertools.pairwise(sorted(sums)))


def test_equal_documents_are_all_held_out_or_none_and_others_do_not_matter_to_the_order() -> None:
    rng = np.random.default_rng(0)
    digests = rng.integers(0, 2**63, 500).astype(np.uint64)
    digests[250:] = digests[:250]
    lengths = rng.integers(10, 100, 250)
    held = choose_held_out(np.append(lengths, lengths), digests, 0.1)
    assert (held[:250] == held[250:]).all()
    assert 0.07 < lengths[held[:250]].sum() / lengths.sum() < 0.14
    shuffled = rng.permutation(500)
    again = choose_held_out(np.append(lengths, lengths)[shuffled], digests[shuffled], 0.1)
    assert set(digests[shuffled][again]) == set(digests[held])


@given(LENGTHS, st.floats(0.01, 0.9), st.integers(1, 5))
def test_whole_documents_are_held_out_up_to_the_share(
    lengths: np.ndarray, share: float, num_digests: int
) -> None:
    lengths = np.append(lengths, [3, 7])
    digests = (np.arange(len(lengths)) * 7 % num_digests).astype(np.uint64)
    held = choose_held_out(lengths, digests, share)
    assert held.any()
    assert not held.all()
