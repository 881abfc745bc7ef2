"""Pieces of tensors that each rank sends to each other rank, together in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.collectives import Axis, Channel
from zeroshard.comm.counter import ALL_TO_ALL
from zeroshard.comm.handles import Pending
from zeroshard.comm.watch.ledger import REDUCE


def all_to_all(
    axis: Axis, sent: Sequence[Sequence[Tensor]], num_received: Sequence[int], *, label: str
) -> list[Tensor]:
    """Send pieces to other ranks and return what they send; collective, on the current stream.

    All pieces go as bytes in one buffer, so they may have any dtypes.

    Args:
        axis: the ranks.
        sent: by rank, 1-D contiguous tensors on the device of the axis; none for this rank.
        num_received: by rank, the bytes that it sends to this one.
        label: the name of the collective in error messages, the same on all ranks.

    Returns:
        By rank, [num_received] uint8: the bytes of its pieces one after another.

    Raises:
        RuntimeError: a rank is lost or too late.
    """
    assert not sent[axis.rank], "a rank sends nothing to itself"
    assert not num_received[axis.rank], "a rank receives nothing from itself"
    pieces = [_bytes_of(piece) for pieces in sent for piece in pieces]
    num_sent = [sum(piece.nbytes for piece in pieces) for pieces in sent]
    out = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=axis.device)
    received = torch.empty(sum(num_received), dtype=torch.uint8, device=axis.device)
    label = axis.note(ALL_TO_ALL, out.numel(), label, REDUCE)
    group, sizes = axis.group(Channel.REDUCE), (list(num_received), num_sent)
    with axis.waits.naming(label):
        work = dist.all_to_all_single(received, out, *sizes, group=group, async_op=axis.exchanges)
    if axis.exchanges:
        Pending(axis.waits, axis.under_way, label, ALL_TO_ALL, [work]).wait()
    else:
        axis.waits.issue(label)
    return list(received.split(sizes[0]))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
