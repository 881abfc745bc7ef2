from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.pretend.findings import Kind
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
