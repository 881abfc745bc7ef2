"""Facts that only autograd's engine and torch's activation checkpoint know of a backward.

Nothing public offers it. tests/sharding/test_autograd.py notices a change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType

import torch
from torch.utils.checkpoint import checkpoint

_CHECKPOINT = inspect.unwrap(checkpoint).__code__
"""It calls the function that a backward is to run again, reentrant or not."""


def is_in_backward() -> bool:
    """Whether this thread is inside a backward pass (hooks, recomputation)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that runs now has ended; not if it ends in an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def outermost_checkpoint(frame: FrameType | None, until: FrameType | None) -> FrameType | None:
    """The call of `torch.utils.checkpoint.checkpoint` whose second forward will come here again.

    Args:
        frame: where to begin.
        until: the callers from here on are not looked at.

    Returns:
        Its frame, a name of the call as long as that runs; of several, the first that was called.
    """
    found = None
    while frame is not None and frame is not until:
        if frame.f_code is _CHECKPOINT:
            found = frame
        frame = frame.f_back
    return found
