"""Tensors side by side in memory become one, so that one kernel serves all of them.

    storage    |--p1.grad--|--p2.grad--|....|--p3.grad--|
    runs       |---------- 1 ----------|    |---- 2 ----|

Padding between two tensors ends a run: nothing here knows that it is zero, and a norm would count it. Most
parameters have a multiple of `layout.BLOCK` elements, so most buffers have padding only at their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def contiguous_runs(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Cover the elements of tensors with as few contiguous tensors as possible; nothing is copied.

    A tensor joins a run if it begins at the end of the run, in the same storage and dtype. A tensor with
    gaps between its strides is a run by itself; an empty one is in none. An element of two tensors is in two
    runs.

    Args:
        tensors: tensors of any shapes and dtypes, on any devices.

    Returns:
        Views, 1-D where tensors were joined. Storages come in the order of their first tensors, whatever
        their addresses are, so that sums over the runs are the same in each execution.
    """
    by_storage: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            key = tensor.untyped_storage().data_ptr(), tensor.dtype
            by_storage.setdefault(key, []).append(tensor)
    return [run for parts in by_storage.values() for run in _join(parts)]


def _join(parts: list[Tensor]) -> Iterator[Tensor]:
    """The runs within one storage."""
    groups: list[list[Tensor]] = []
    end = -1
    for part in sorted(parts, key=Tensor.storage_offset):
        is_dense, start = part.is_contiguous(), int(part.storage_offset())
        if is_dense and start == end:
            groups[-1].append(part)
        else:
            groups.append([part])
        end = start + part.numel() if is_dense else -1
    for group in groups:
        num = sum(part.numel() for part in group)
        yield group[0] if len(group) == 1 else group[0].as_strided((num,), (1,), group[0].storage_offset())
