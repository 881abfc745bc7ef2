"""Collectives give torch's results, sums in rank order to the bit, and exact counts."""

import itertools

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import KINDS, Counter
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.watch.status import REDUCE
from zeroshard.memory.report import measure_traffic

CPU = torch.device("cpu")
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
WORLDS = [2, 4]


def world(timeout_s=20.0):
    return Axis(dist.group.WORLD, device=CPU, counter=Counter(), timeout_s=timeout_s)


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


# ------------------------------------------------------------------------------------------ all-gather

GATHERS = list(itertools.product((FP32, BF16, FP64), (True, False)))


def all_gathers(size):
    axis, results = world(), []
    for tag, (dtype, in_place) in enumerate(GATHERS):
        own = values_of(axis.rank, size, dtype)
        flat = torch.full((axis.size * size,), -1.0, dtype=dtype)
        part = flat.chunk(axis.size)[axis.rank].copy_(own)
        axis.all_gather(flat, part if in_place else own, tag=tag, label="test").wait()
        expected = torch.empty_like(flat)
        dist.all_gather_into_tensor(expected, own)
        results.append((flat, expected))
    return results


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_an_all_gather_brings_what_torchs_own_brings(ranks, num_ranks):
    for results in ranks(num_ranks, all_gathers, 1027):
        for (dtype, _), (flat, expected) in zip(GATHERS, results, strict=True):
            assert_same_bits(flat, expected)
            assert_same_bits(flat, torch.cat([values_of(rank, 1027, dtype) for rank in range(num_ranks)]))


# -------------------------------------------------------------------------------------- reduce-scatter

REDUCTIONS = [  # dtype on the wire and of the result, whether that is this rank's part of the input
    (FP32, FP32, False),
    (FP32, FP32, True),
    (BF16, BF16, False),
    (BF16, BF16, True),
    (BF16, FP32, False),
    (FP16, FP32, False),
    (FP64, FP64, True),
]


def reduce_scatters(size):
    axis, pool, results = world(), BufferPool(CPU), []
    for tag, (wire, dtype, in_place) in enumerate(REDUCTIONS):
        flat = values_of(axis.rank, axis.size * size, wire)
        out = flat.chunk(axis.size)[axis.rank] if in_place else torch.empty(size, dtype=dtype)
        axis.reduce_scatter(flat, out, pool, tag=tag, label="test").wait()
        results.append(out.clone())
    return results


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_a_reduce_scatter_adds_in_rank_order_to_the_bit(ranks, num_ranks):
    size = 513
    results = ranks(num_ranks, reduce_scatters, size)
    for number, (wire, dtype, _) in enumerate(REDUCTIONS):
        inputs = [values_of(rank, num_ranks * size, wire) for rank in range(num_ranks)]
        expected = sum_in_order(inputs, dtype)
        for outs, part in zip(results, expected.chunk(num_ranks), strict=True):
            assert_same_bits(outs[number], part)
        if num_ranks >= 3 and dtype == wire:  # the test would notice another order
            assert not torch.equal(sum_in_order(inputs[::-1], dtype), expected)


def use_the_backends_collectives(size):
    """As on accelerators: gathers and reductions over two groups, the host waits for neither."""
    axis, pool = world(), BufferPool(CPU)
    axis.exchanges = False
    axis.groups[REDUCE] = dist.new_group()
    own = values_of(axis.rank, size, FP32)
    flat, again = torch.empty(axis.size * size), torch.empty(axis.size * size)
    axis.all_gather(flat, own, tag=0, label="test").wait()
    axis.all_gather(again, own, tag=0, label="test", channel=REDUCE).wait()
    sums = []
    for wire, dtype in ((FP32, FP32), (BF16, FP32)):
        ones = torch.full((axis.size * size,), axis.rank + 1.0, dtype=wire)
        out = torch.empty(size, dtype=dtype)
        handle = axis.reduce_scatter(ones, out, pool, tag=1, label="test")
        handle.wait()
        handle.wait()
        sums.append(out)
    word = torch.tensor(float(axis.rank))
    axis.broadcast(word, "test")
    return flat, again, sums, word.item(), axis.sum(torch.tensor(10.0**axis.rank), "test").item()


@pytest.mark.parametrize("num_ranks", [2])
def test_the_collectives_of_a_backend_over_two_groups_give_the_same(ranks, num_ranks):
    everyone = torch.cat([values_of(rank, 100, FP32) for rank in range(num_ranks)])
    for flat, again, sums, word, total in ranks(num_ranks, use_the_backends_collectives, 100):
        assert_same_bits(flat, everyone)
        assert_same_bits(again, everyone)
        for out in sums:
            assert_same_bits(out, torch.full((100,), sum(range(1, num_ranks + 1)), dtype=FP32))
        assert word == 0
        assert total == sum(10.0**rank for rank in range(num_ranks))


# --------------------------------------------------------------------------------- several at the same time


def run_many(num_each):
    """Start many of both kinds and wait for them, each rank in an order of its own."""
    axis, pool = world(), BufferPool(CPU)
    flats, outs, handles = {}, {}, {}
    orders = list(itertools.permutations(range(2 * num_each)))
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
    return [outs.get(tag, flats[tag]) for tag in range(2 * num_each)], starts


@pytest.mark.parametrize("num_ranks", [3])
def test_many_collectives_in_flight_keep_apart_in_any_order_on_any_rank(ranks, num_ranks):
    results = ranks(num_ranks, run_many, 3)
    assert len({starts for _, starts in results}) == num_ranks
    for rank, (tensors, _) in enumerate(results):
        for tag, tensor in enumerate(tensors):
            size = 50 + tag
            if tag % 2:
                expected = torch.cat([values_of(peer, size, FP32, tag) for peer in range(num_ranks)])
            else:
                inputs = [values_of(peer, num_ranks * size, FP32, tag) for peer in range(num_ranks)]
                expected = sum_in_order(inputs, FP32).chunk(num_ranks)[rank]
            assert_same_bits(tensor, expected)


def use_two_axes():
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
    return [flat.unique().tolist() for flat in flats]


def test_axes_with_tags_of_their_own_keep_apart(ranks):
    assert ranks(2, use_two_axes) == [[[0, 1], [10, 11]]] * 2


# ----------------------------------------------------------------------------------------- small messages


def find_any(flags_by_rank):
    axis = world()
    flags = flags_by_rank[axis.rank]
    return axis.any(flags, "test")(), flags


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_a_flag_is_set_where_any_rank_set_it(ranks, num_ranks):
    patterns = list(itertools.product([False, True], repeat=num_ranks))
    flags_by_rank = [list(column) for column in zip(*patterns, strict=True)]
    for found, given in ranks(num_ranks, find_any, flags_by_rank):
        assert found == [any(pattern) for pattern in patterns]
        assert all(type(flag) is bool for flag in found)
        assert given in flags_by_rank


SUMS = [*(((), dtype) for dtype in (FP64, FP32) for _ in range(8)), ((65,), FP32)]


def summands(rank):
    for salt, (shape, dtype) in enumerate(SUMS):
        yield values_of(rank, max(1, sum(shape)), dtype, salt).reshape(shape)


def small_sums():
    axis, results = world(), []
    for value in summands(axis.rank):
        before = value.clone()
        results.append(axis.sum(value, "test"))
        assert torch.equal(value, before)
    return results


@pytest.mark.parametrize("num_ranks", [5])  # from 5 numbers on, torch's own sum takes another order
def test_a_small_sum_is_taken_in_rank_order_to_the_bit(ranks, num_ranks):
    parts = [summands(rank) for rank in range(num_ranks)]
    expected = [sum_in_order(values, values[0].dtype) for values in zip(*parts, strict=True)]
    for totals in ranks(num_ranks, small_sums):
        for total, right in zip(totals, expected, strict=True):
            assert total.shape == right.shape
            assert_same_bits(total.reshape(-1), right.reshape(-1))


DTYPES = [FP64, FP32, FP16, BF16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]


def broadcasts():
    axis = world()
    tensors = [torch.full((3, 2), 1.0 - axis.rank).to(dtype) for dtype in DTYPES]
    tensors.append(torch.tensor(1.0 - axis.rank))
    for tensor in tensors:
        axis.broadcast(tensor, "test")
    return tensors


@pytest.mark.parametrize("num_ranks", [3])
def test_a_broadcast_brings_rank_0s_values(ranks, num_ranks):
    for tensors in ranks(num_ranks, broadcasts):
        for tensor in tensors:
            assert torch.equal(tensor, torch.ones_like(tensor))


# ------------------------------------------------------------------------------------------------ counts


COUNTED = list(itertools.product(("all_gather", "reduce_scatter"), ((FP32, FP32), (BF16, FP32))))


def count_traffic(size):
    """What the axis counts, and what isend is really given."""
    axis, pool = world(), BufferPool(CPU)
    sent, results = [], []
    isend = dist.isend

    def counting_isend(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return isend(tensor, *args, **kwargs)

    dist.isend = counting_isend
    try:
        for kind, (wire, dtype) in COUNTED:
            axis.counter.reset()
            sent.clear()
            flat = torch.zeros(axis.size * size, dtype=wire)
            own, out = flat.chunk(axis.size)[axis.rank], torch.empty(size, dtype=dtype)
            for _ in range(2):
                if kind == "all_gather":
                    axis.all_gather(flat, own, tag=0, label="test").wait()
                else:
                    axis.reduce_scatter(flat, out, pool, tag=0, label="test").wait()
            results.append((measure_traffic(axis.counter), sum(sent)))
    finally:
        dist.isend = isend
    return results


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_counts_are_those_of_the_formula_and_of_what_is_sent(ranks, num_ranks):
    size = 768
    for results in ranks(num_ranks, count_traffic, size):
        for (kind, (wire, _)), (report, sent) in zip(COUNTED, results, strict=True):
            num_bytes = 2 * (num_ranks - 1) * size * wire.itemsize
            num_calls = 2 if num_ranks > 1 else 0
            assert report.bytes_sent == dict.fromkeys(KINDS, 0) | {kind: num_bytes}
            assert report.calls == dict.fromkeys(KINDS, 0) | {kind: num_calls}
            assert sent == num_bytes


# ----------------------------------------------------------------------------------------------- one rank


def test_one_rank_alone_exchanges_nothing_and_copies_only_what_it_must():
    axis = Axis(None, device=CPU, counter=Counter(), timeout_s=1)
    flat, out = torch.arange(4.0), torch.empty(4, dtype=FP64)
    assert (axis.rank, axis.size) == (0, 1)
    axis.all_gather(flat, flat, tag=0, label="test").wait()
    assert flat.tolist() == [0, 1, 2, 3]
    axis.reduce_scatter(flat, out, BufferPool(CPU), tag=0, label="test").wait()
    assert torch.equal(out, flat.double())
    axis.broadcast(flat, "test")
    value = torch.ones(())
    assert axis.sum(value, "test") is value
    assert axis.any([True, False], "test")() == [True, False]
    assert axis.all_gather_object("x", "test") == ["x"]
    assert not any(axis.counter.calls.values())


# --------------------------------------------------------------------------------------------- lost ranks


def exchange_with_a_rank_that(what, kind):
    """Rank 0's error: rank 1 does not come, or has ended its process group."""
    axis = world(timeout_s=0.3)
    if axis.rank == 1:
        if what == "ends":
            dist.destroy_process_group()
        return None
    flat = torch.zeros(2 * axis.size)
    errors = []
    for label in ("first thing", "second thing"):
        try:
            if kind == "all_gather":
                axis.all_gather(flat, flat[:2], tag=0, label=label).wait()
            else:
                axis.reduce_scatter(flat, flat[:2], BufferPool(CPU), tag=0, label=label).wait()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize(("what", "kind"), [("stays away", "all_gather"), ("ends", "reduce_scatter")])
def test_an_exchange_with_a_lost_rank_names_rank_and_label_the_first_time_and_later(ranks, what, kind):
    errors = ranks(2, exchange_with_a_rank_that, what, kind)[0]
    assert len(errors) == 2
    for error, label in zip(errors, ("first thing", "second thing"), strict=True):
        assert "rank 0 of 2" in error
        assert label in error
    assert "0.3 s" in errors[0]


def close_with_a_rank_that_stays_away():
    axis = world()
    flat = torch.zeros(axis.size * 10)
    if axis.rank == 0:
        axis.all_gather(flat, flat[:10], tag=0, label="test")
    axis.close(drain_s=0.2)
    return len(axis.under_way)


def test_closing_an_axis_does_not_wait_for_ever_for_a_rank_that_stays_away(ranks):
    assert ranks(2, close_with_a_rank_that_stays_away, timeout=20) == [0, 0]
