"""The two things that only autograd's engine knows. Private to torch; nothing public offers them.

tests/sharding/test_autograd.py notices a change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def is_in_backward() -> bool:
    """Whether this thread is inside a backward pass (hooks, recomputation)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that runs now has ended; not if it ends in an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
