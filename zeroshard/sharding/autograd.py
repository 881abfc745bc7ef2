"""The two things that only autograd's engine knows. Private to torch; nothing public offers them.

tests/sharding/test_autograd.py notices a change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def is_in_backward() -> bool:
    """Whether this thread is inside a backward pass (hooks, recomputation)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that runs now has ended; not if it ends in an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def find_tensors(value: Any) -> tuple[list[Tensor], bool]:
    """All tensors in nested containers and dataclasses.

    Returns:
        The tensors, and whether something was found that cannot be looked into and may hide more.
    """
    tensors: list[Tensor] = []
    is_opaque = False
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found, opaque = find_tensors([getattr(leaf, field.name) for field in fields(leaf)])
            tensors += found
            is_opaque |= opaque
        elif not isinstance(leaf, _PLAIN):
            is_opaque = True
    return tensors, is_opaque
