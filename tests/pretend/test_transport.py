from __future__ import annotations

import torch
import torch.distributed as dist

from tests.pretend.trace import Trace, TraceMode
from tests.pretend.transport import Transport
from tests.ranks import on_ranks


@on_ranks(3)
def test_collectives_give_what_torch_distributed_gives() -> None:
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
        answers = [exchanged + 0, gathered + torch.cat(parts), part + 0, reduced + 0, sent + 0]
    transport.finish()
    assert not trace.findings
    expected = [[0, 1, 1, 2, 2, 2], [0, 0, 2, 2, 4, 4], [3 * rank + 3], [3, 3, 3], [1, 1]]
    assert [answer.tolist() for answer in answers] == expected
