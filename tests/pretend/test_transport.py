from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.pretend.findings import Kind
from tests.pretend.orders import Collective, check_orders
from tests.pretend.trace import Trace, TraceMode
from tests.pretend.transport import Transport
from tests.ranks import Ranks


def all_collectives() -> dict[str, list[float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    trace = Trace()
    transport = Transport(trace)
    with TraceMode(trace):
        own = torch.full((2,), float(rank))
        gathered, parts = torch.zeros(2 * size), [torch.zeros(2) for _ in range(size)]
        part, reduced, sent = torch.zeros(1), torch.full((3,), float(rank)), torch.full((2,), float(rank))
        transport.all_gather_into_tensor(gathered, own)
        transport.all_gather(parts, own)
        transport.reduce_scatter_tensor(part, torch.arange(float(size)) + rank)
        transport.all_reduce(reduced)
        transport.broadcast(sent, group_src=1)
        mixed, sizes = torch.full((size * (rank + 1),), float(rank)), [rank + 1] * size
        exchanged = torch.zeros(sum(range(1, size + 1)))
        transport.all_to_all_single(exchanged, mixed, list(range(1, size + 1)), sizes)
        total = gathered + torch.cat(parts)
        answers = {"gathered": total, "part": part + 0, "reduced": reduced + 0, "sent": sent + 0}
        answers["exchanged"] = exchanged + 0
    transport.finish()
    assert not trace.findings
    return {name: answer.tolist() for name, answer in answers.items()}


def test_collectives_give_what_torch_distributed_gives(ranks: Ranks) -> None:
    for rank, answers in enumerate(ranks(3, all_collectives)):
        assert answers["exchanged"] == [0, 1, 1, 2, 2, 2]
        assert answers["gathered"] == [0, 0, 2, 2, 4, 4]
        assert answers["part"] == [3 * rank + 3]
        assert answers["reduced"] == [3, 3, 3]
        assert answers["sent"] == [1, 1]


def kinds_of_read(async_op: bool, is_on_side: bool, waits: bool) -> set[Kind]:
    trace = Trace()
    transport, timeline = Transport(trace), trace.timeline
    with TraceMode(trace):
        flat, own = torch.zeros(4), torch.zeros(2)
        stream = timeline.stream("side") if is_on_side else timeline.stream("other")
        stream.wait_stream(timeline.default)
        if is_on_side:
            with stream:
                work: Any = transport.all_gather_into_tensor(flat, own, async_op=async_op)
            event = stream.record_event()
        else:
            work = transport.all_gather_into_tensor(flat, own, async_op=async_op)
            event = timeline.default.record_event()
        assert (work is None) is not async_op
        if waits:
            timeline.default.wait_event(event)
        flat.sum()
        if work is not None:
            work.wait()
    transport.finish()
    return {finding.kind for finding in trace.findings}


def test_a_collective_runs_on_the_current_stream_unless_it_is_asynchronous(ranks: Ranks) -> None:
    assert ranks(2, kinds_of_read, False, False, False) == [set()] * 2
    assert ranks(2, kinds_of_read, False, True, True) == [set()] * 2
    assert ranks(2, kinds_of_read, False, True, False) == [{Kind.RACE}] * 2


def test_an_asynchronous_collective_is_not_covered_by_an_event_of_the_current_stream(ranks: Ranks) -> None:
    assert ranks(2, kinds_of_read, True, True, True) == [{Kind.RACE}] * 2
    assert ranks(2, kinds_of_read, True, False, True) == [{Kind.RACE}] * 2


def kinds_of_two_streams(waits: bool) -> set[Kind]:
    trace = Trace()
    transport, timeline = Transport(trace), trace.timeline
    with TraceMode(trace):
        first, second = torch.zeros(2), torch.zeros(2)
        side = timeline.stream("side")
        side.wait_stream(timeline.default)
        with side:
            transport.all_reduce(first)
        if waits:
            timeline.default.wait_stream(side)
        transport.all_reduce(second)
    transport.finish()
    return {finding.kind for finding in trace.findings}


def test_collectives_of_one_communicator_on_two_streams_must_be_ordered(ranks: Ranks) -> None:
    assert ranks(2, kinds_of_two_streams, False) == [{Kind.UNORDERED}] * 2
    assert ranks(2, kinds_of_two_streams, True) == [set()] * 2


def other_orders() -> tuple[list[float], list[Collective]]:
    trace = Trace()
    transport = Transport(trace)
    with TraceMode(trace):
        tensors = {"a": torch.full((2,), 1.0), "b": torch.full((2,), 10.0)}
        for label in sorted(tensors, reverse=bool(dist.get_rank())):
            with transport.labelled(label):
                transport.all_reduce(tensors[label])
        values = torch.stack([tensors["a"], tensors["b"]])
    transport.finish()
    return values[:, 0].tolist(), trace.collectives


def test_ranks_whose_orders_differ_get_the_right_values_and_are_found(ranks: Ranks) -> None:
    answers = ranks(2, other_orders)
    assert [values for values, _ in answers] == [[2, 20]] * 2
    found = check_orders([collectives for _, collectives in answers])
    assert {finding.kind for finding in found} == {Kind.ORDER, Kind.CYCLE}


def freed_while_sent() -> list[float]:
    trace = Trace()
    transport = Transport(trace)
    with TraceMode(trace):
        flat, own = torch.zeros(2 * 4096), torch.ones(4096)
        transport.all_gather_into_tensor(flat, own)
        own.zero_()
        kept = flat[4096:4098].clone()
        transport.all_gather_into_tensor(flat, own)
        del flat, own
    transport.finish()
    return kept.tolist()


def test_memory_may_be_changed_and_freed_while_values_travel(ranks: Ranks) -> None:
    assert ranks(2, freed_while_sent) == [[1, 1]] * 2


def kinds_of_agreement() -> tuple[set[Kind], list[str]]:
    trace = Trace()
    transport = Transport(trace)
    control, _ = transport.new_subgroups_by_enumeration([[0, 1]], backend="gloo")
    with TraceMode(trace):
        flags = torch.tensor([dist.get_rank()])
        work: Any = transport.all_reduce(flags, dist.ReduceOp.MAX, group=control, async_op=True)
        work.wait()
        assert flags.max().item() == 1
    transport.finish()
    return {finding.kind for finding in trace.findings}, [c.communicator for c in trace.collectives]


def test_groups_for_cpu_tensors_make_the_host_wait_and_no_stream(ranks: Ranks) -> None:
    first, second = ranks(2, kinds_of_agreement)
    assert first == second
    assert first[0] == set()
    assert len(first[1]) == 1


def one_never_comes() -> list[Collective]:
    trace = Trace()
    transport = Transport(trace)
    with TraceMode(trace):
        transport.all_reduce(torch.zeros(2))
        if dist.get_rank() == 0:
            transport.all_reduce(torch.zeros(2))
    transport.finish()
    return trace.collectives


def test_a_rank_that_does_not_come_is_found_even_if_nobody_needs_the_values(ranks: Ranks) -> None:
    found = check_orders(ranks(2, one_never_comes))
    assert [finding.kind for finding in found] == [Kind.ORDER]
    assert "nothing more on rank 1" in found[0].text
