"""Collectives give torch's results, sums in rank order to the bit, and exact counts."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.training import SendCounter
from tests.ranks import on_ranks
from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import KINDS, Counter
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.watch.status import REDUCE
from zeroshard.memory.report import measure_traffic

CPU = torch.device("cpu")
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def world(timeout_s=20.0):
    return Axis(dist.group.WORLD, device=CPU, timeout_s=timeout_s)


def values_of(rank, size, dtype, salt=0):
    """What a rank brings: of many magnitudes, so that sums depend on the order of additions."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    exponents = torch.randint(-6, 7, (size,), generator=generator)
    return (torch.randn(size, generator=generator, dtype=FP64) * 2.0**exponents).to(dtype)


def sum_in_order(parts, dtype):
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


def assert_same_bits(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# --------------------------------------------------------------------------------------- large tensors


@on_ranks(2, 4)
def test_an_all_gather_brings_what_torchs_own_brings(num_ranks):
    axis, size = world(), 1027
    for tag, (dtype, in_place) in enumerate(itertools.product((FP32, BF16, FP64), (True, False))):
        own = values_of(axis.rank, size, dtype)
        flat = torch.full((axis.size * size,), -1.0, dtype=dtype)
        part = flat.chunk(axis.size)[axis.rank].copy_(own)
        axis.all_gather(flat, part if in_place else own, tag=tag, label="test").wait()
        expected = torch.empty_like(flat)
        dist.all_gather_into_tensor(expected, own)
        assert_same_bits(flat, expected)
        assert_same_bits(flat, torch.cat([values_of(rank, size, dtype) for rank in range(num_ranks)]))


REDUCTIONS = [  # dtype on the wire and of the result, whether that is this rank's part of the input
    (FP32, FP32, False),
    (FP32, FP32, True),
    (BF16, BF16, False),
    (BF16, BF16, True),
    (BF16, FP32, False),
    (FP16, FP32, False),
    (FP64, FP64, True),
]


@on_ranks(2, 4)
def test_a_reduce_scatter_adds_in_rank_order_to_the_bit(num_ranks):
    axis, pool, size = world(), BufferPool(CPU), 513
    for tag, (wire, dtype, in_place) in enumerate(REDUCTIONS):
        flat = values_of(axis.rank, axis.size * size, wire)
        out = flat.chunk(axis.size)[axis.rank] if in_place else torch.empty(size, dtype=dtype)
        axis.reduce_scatter(flat, out, pool, tag=tag, label="test").wait()
        inputs = [values_of(rank, num_ranks * size, wire) for rank in range(num_ranks)]
        expected = sum_in_order(inputs, dtype)
        assert_same_bits(out, expected.chunk(num_ranks)[axis.rank])
        if num_ranks >= 3 and dtype == wire:  # the test would notice another order
            assert not torch.equal(sum_in_order(inputs[::-1], dtype), expected)


@on_ranks(2)
def test_the_collectives_of_a_backend_over_two_groups_give_the_same(num_ranks):
    """As on accelerators: gathers and reductions over two groups, the host waits for neither."""
    axis, pool, size = world(), BufferPool(CPU), 100
    axis.exchanges = False
    axis.groups[REDUCE] = dist.new_group()
    own, flat, again = values_of(axis.rank, size, FP32), torch.empty(2 * size), torch.empty(2 * size)
    axis.all_gather(flat, own, tag=0, label="test").wait()
    axis.all_gather(again, own, tag=0, label="test", channel=REDUCE).wait()
    everyone = torch.cat([values_of(rank, size, FP32) for rank in range(num_ranks)])
    assert_same_bits(flat, everyone)
    assert_same_bits(again, everyone)
    for wire in (FP32, BF16):
        out = torch.empty(size)
        ones = torch.full((2 * size,), axis.rank + 1.0, dtype=wire)
        handle = axis.reduce_scatter(ones, out, pool, tag=1, label="test")
        handle.wait()
        handle.wait()
        assert_same_bits(out, torch.full((size,), 3.0))
    axis.broadcast(word := torch.tensor(float(axis.rank)), "test")
    assert (word.item(), axis.sum(torch.tensor(10.0**axis.rank), "test")().item()) == (0, 11)


@on_ranks(3)
def test_many_collectives_in_flight_keep_apart_in_any_order_on_any_rank(num_ranks):
    """Start many of both kinds and wait for them, each rank in an order of its own."""
    axis, pool, num = world(), BufferPool(CPU), 6
    flats, outs, handles = {}, {}, {}
    orders = list(itertools.permutations(range(num)))
    starts, waits = (orders[(axis.rank * 1009 + salt) % len(orders)] for salt in (7, 400))
    for tag in starts:
        size = 50 + tag
        if tag % 2:
            flats[tag] = torch.empty(axis.size * size)
            own = flats[tag].chunk(axis.size)[axis.rank].copy_(values_of(axis.rank, size, FP32, tag))
            handles[tag] = axis.all_gather(flats[tag], own, tag=tag, label=f"gather {tag}")
        else:
            flats[tag] = values_of(axis.rank, axis.size * size, FP32, tag)
            outs[tag] = torch.empty(size)
            handles[tag] = axis.reduce_scatter(flats[tag], outs[tag], pool, tag=tag, label=f"reduce {tag}")
    for tag in waits:
        handles[tag].wait()
    for tag in range(num):
        size = 50 + tag
        if tag % 2:
            expected = torch.cat([values_of(peer, size, FP32, tag) for peer in range(num_ranks)])
            assert_same_bits(flats[tag], expected)
        else:
            inputs = [values_of(peer, num_ranks * size, FP32, tag) for peer in range(num_ranks)]
            assert_same_bits(outs[tag], sum_in_order(inputs, FP32).chunk(num_ranks)[axis.rank])


@on_ranks(2)
def test_axes_with_tags_of_their_own_keep_apart():
    """Two engines over the same ranks with the same tags, the second started first on rank 1."""
    axes = [world(), world()]
    axes[1].first_tag = 1 << 16
    flats, handles = [torch.empty(axis.size * 10) for axis in axes], {}
    for number in (0, 1) if axes[0].rank else (1, 0):
        axis, flat = axes[number], flats[number]
        own = flat.chunk(axis.size)[axis.rank].fill_(10 * number + axis.rank)
        handles[number] = axis.all_gather(flat, own, tag=3, label="test")
    for number in range(2):
        handles[number].wait()
    assert [flat.unique().tolist() for flat in flats] == [[0, 1], [10, 11]]


# ----------------------------------------------------------------------------------------- small messages


@on_ranks(2, 4)
def test_a_flag_is_set_where_any_rank_set_it(num_ranks):
    axis, patterns = world(), list(itertools.product([False, True], repeat=num_ranks))
    found = axis.any([pattern[axis.rank] for pattern in patterns], "test")()
    assert found == [any(pattern) for pattern in patterns]
    assert all(type(flag) is bool for flag in found)


SUMS = [*(((), dtype) for dtype in (FP64, FP32) for _ in range(8)), ((65,), FP32)]


@on_ranks(5)  # from 5 numbers on, torch's own sum takes another order
def test_a_small_sum_is_taken_in_rank_order_to_the_bit(num_ranks):
    axis = world()
    for salt, (shape, dtype) in enumerate(SUMS):
        parts = [values_of(rank, max(1, sum(shape)), dtype, salt).reshape(shape) for rank in range(num_ranks)]
        total, expected = axis.sum(parts[axis.rank], "test")(), sum_in_order(parts, dtype)
        assert total.shape == expected.shape
        assert_same_bits(total.reshape(-1), expected.reshape(-1))


@on_ranks(3)
def test_a_broadcast_brings_rank_0s_values():
    axis = world()
    dtypes = [FP64, FP32, FP16, BF16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
    tensors = [torch.full((3, 2), 1.0 - axis.rank).to(dtype) for dtype in dtypes]
    for tensor in [*tensors, torch.tensor(1.0 - axis.rank)]:
        axis.broadcast(tensor, "test")
        assert torch.equal(tensor, torch.ones_like(tensor))


# ------------------------------------------------------------------------------------------------ counts


@on_ranks(2, 4)
def test_counts_are_those_of_the_formula_and_of_what_is_sent(num_ranks):
    axis, pool, size = world(), BufferPool(CPU), 768
    for kind, (wire, dtype) in itertools.product(
        ("all_gather", "reduce_scatter"), ((FP32, FP32), (BF16, FP32))
    ):
        axis.ledger.counter = Counter()
        flat = torch.zeros(axis.size * size, dtype=wire)
        own, out = flat.chunk(axis.size)[axis.rank], torch.empty(size, dtype=dtype)
        with mock.patch.object(dist.ProcessGroup, "send", SendCounter()) as counter:
            for _ in range(2):
                if kind == "all_gather":
                    axis.all_gather(flat, own, tag=0, label="test").wait()
                else:
                    axis.reduce_scatter(flat, out, pool, tag=0, label="test").wait()
        report, num = measure_traffic(axis.ledger.counter), 2 * (num_ranks - 1) * size
        assert report.bytes_sent == dict.fromkeys(KINDS, 0) | {kind: num * wire.itemsize}
        assert report.calls == dict.fromkeys(KINDS, 0) | {kind: 2}
        assert counter.elements == num


# ----------------------------------------------------------------------------------------------- one rank


def test_one_rank_alone_exchanges_nothing_and_copies_only_what_it_must():
    axis = Axis(None, device=CPU, timeout_s=1)
    flat, out = torch.arange(4.0), torch.empty(4, dtype=FP64)
    assert (axis.rank, axis.size) == (0, 1)
    axis.all_gather(flat, flat, tag=0, label="test").wait()
    assert flat.tolist() == [0, 1, 2, 3]
    axis.reduce_scatter(flat, out, BufferPool(CPU), tag=0, label="test").wait()
    assert torch.equal(out, flat.double())
    axis.broadcast(flat, "test")
    value = torch.ones(())
    assert axis.sum(value, "test")() is value
    assert axis.any([True, False], "test")() == [True, False]
    assert axis.all_gather_object("x", "test") == ["x"]
    assert not any(axis.ledger.counter.calls.values())


# --------------------------------------------------------------------------------------------- lost ranks


@pytest.mark.parametrize(("what", "kind"), [("stays away", "all_gather"), ("ends", "reduce_scatter")])
@on_ranks(2)
def test_an_exchange_with_a_lost_rank_names_rank_and_label_the_first_time_and_later(what, kind):
    """Rank 1 does not come, or has ended its process group."""
    axis = world(timeout_s=0.3)
    if axis.rank == 1:
        if what == "ends":
            dist.destroy_process_group()
        return
    flat, pool = torch.zeros(2 * axis.size), BufferPool(CPU)

    def exchange(label):
        if kind == "all_gather":
            axis.all_gather(flat, flat[:2], tag=0, label=label).wait()
        else:
            axis.reduce_scatter(flat, flat[:2], pool, tag=0, label=label).wait()

    for label, text in (("first thing", "0.3 s"), ("second thing", "")):
        with pytest.raises(RuntimeError, match=f"(?=.*rank 0 of 2)(?=.*{label})(?=.*{text})"):
            exchange(label)


@on_ranks(2, timeout=20)
def test_closing_an_axis_does_not_wait_for_ever_for_a_rank_that_stays_away():
    axis = world()
    flat = torch.zeros(axis.size * 10)
    if axis.rank == 0:
        axis.all_gather(flat, flat[:10], tag=0, label="test")
    axis.close(drain_s=0.2)
    assert not axis.under_way
