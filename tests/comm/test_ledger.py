"""Ranks find the first collective that differs, from what each has issued."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from zeroshard.comm.collectives import Axis
from zeroshard.comm.watch.status import (
    GATHER,
    KEPT,
    REDUCE,
    Ledger,
    find_difference,
)

CPU = torch.device("cpu")
A, B, C = (f"all-gather of unit '{name}'" for name in "abc")


def ledger_of(*labels):
    ledger = Ledger()
    for label in labels:
        ledger.note(label, GATHER)
    return ledger


def are_proven(*ledgers):
    """The answer of the first rank, which must be the answer of each."""
    proofs = [ledger.proof() for ledger in ledgers]
    maxima = [max(column) for column in zip(*proofs, strict=True)]
    (answer,) = {maxima == proof for proof in proofs}
    return answer


@pytest.mark.parametrize(
    ("others", "agree"),
    [
        ([(A, B, C)], True),
        ([(A, B, C), (A, B, C)], True),
        ([(A, C, B)], False),
        ([(A, B)], False),
        ([(A, B, C, C)], False),
        ([(A, B, C), (B, A, C)], False),
        ([()], False),
    ],
)
def test_digests_are_proven_equal_by_maxima_only_for_the_same_labels_in_the_same_order(others, agree):
    ledgers = [ledger_of(A, B, C), *(ledger_of(*labels) for labels in others)]
    assert are_proven(*ledgers) is agree


def test_a_difference_long_ago_is_not_forgotten_by_the_digest():
    one, other = ledger_of(A, B), ledger_of(B, A)
    for _ in range(1000):
        one.note(C, GATHER)
        other.note(C, GATHER)
    assert not are_proven(one, other)
    assert find_difference({0: one.entries(), 1: other.entries()}) is None  # no label is kept that long


def test_the_first_difference_is_told_with_number_ranks_and_labels():
    words = find_difference(
        {
            2: ledger_of(A, B, C).entries(),
            0: ledger_of(A, B, A).entries(),
            1: ledger_of(A, C, B).entries(),
        }
    )
    assert words is not None
    assert words.startswith(
        "collective 2 of rank 2 is the all-gather of unit 'b', on rank 1 it is the all-gather of unit 'c': "
    )
    assert "same units in the same order" in words


def test_a_rank_that_is_behind_or_of_another_engine_or_far_ahead_is_no_difference():
    waiting = ledger_of(A, B, C).entries()
    ahead = ledger_of(*[A] * 3, *[B] * KEPT).entries()
    assert find_difference({0: waiting, 1: ledger_of(A).entries()}) is None
    assert find_difference({0: waiting, 1: (65536, ledger_of(B, A).entries()[1])}) is None
    assert find_difference({0: waiting, 1: ahead}) is None
    assert find_difference({0: waiting}) is None


def test_the_order_between_two_communicators_may_differ_and_that_of_one_may_not():
    one, other, swapped = Ledger(), Ledger(), Ledger()
    for ledger, lines in ((one, "grgr"), (other, "ggrr"), (swapped, "ggrr")):
        labels = {"g": iter((A, B)), "r": iter((A, B) if ledger is not swapped else (B, A))}
        for line in lines:
            ledger.note(next(labels[line]), GATHER if line == "g" else REDUCE)
    assert are_proven(one, other)
    assert find_difference({0: one.entries(), 1: other.entries()}) is None
    assert not are_proven(one, swapped)
    assert find_difference({0: one.entries(), 1: swapped.entries()}) is not None


def test_gathers_of_different_shard_groups_are_not_compared():
    ledgers = [ledger_of(A, B), ledger_of(B, A), ledger_of(B, A)]
    for ledger, group in zip(ledgers, (0, 2, 2), strict=True):
        ledger.groups[GATHER] = group
    ledgers[2].note(C, GATHER)
    assert are_proven(*ledgers)
    assert find_difference({rank: ledger.entries() for rank, ledger in enumerate(ledgers)}) is None
    ledgers[1].note(A, GATHER)
    assert find_difference({1: ledgers[1].entries(), 2: ledgers[2].entries()}) is not None


def gather_in_order(order, compares=True):
    """Two gathers in an order of this rank's own, then an agreement; the flags, or the error."""
    axis = Axis(dist.group.WORLD, device=CPU, timeout_s=20.0)
    handles = []
    for name in order[axis.rank]:
        flat, own = torch.empty(axis.size), torch.ones(1)
        handles.append(axis.all_gather(flat, own, tag=ord(name), label=f"all-gather of unit '{name}'"))
    flags = [axis.rank == 1, False]
    try:
        answer = axis.any(flags, "agreement", compares=compares)()
    except RuntimeError as error:
        answer = str(error)
    for handle in handles:
        handle.wait()
    return answer


@on_ranks(3)
def test_an_agreement_compares_what_all_ranks_have_issued():
    same, other = ("ab", "ab", "ab"), ("ab", "ab", "ba")
    for order, compares in ((same, True), (same, False), (other, False)):
        assert gather_in_order(order, compares) == [True, False]
    text = (
        f"rank {dist.get_rank()} of 3: collective 1 of rank 0 is the {A}, on rank 2 it is the {B}: at stage 3"
    )
    assert gather_in_order(other).startswith(text)
