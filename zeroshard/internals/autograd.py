"""Facts that only torch's autograd engine, activation checkpoint, transforms and tracers know.

torch has no public way to these facts. tests/internals/test_autograd.py notices a change.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _get_dispatch_mode, _is_tracing, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointFunction, checkpoint

_CHECKPOINT = inspect.unwrap(checkpoint).__code__
"""The code that calls a checkpointed function, reentrant or not; a backward is to run it again."""

_REENTRANT = CheckpointFunction.forward.__code__
"""The code that a reentrant checkpoint alone runs."""


_TRACERS = (_TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL, _TorchDispatchModeKey.FAKE)
"""The modes in which an operation computes no values, or is recorded for later."""


backward_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward that runs in this thread, the innermost one; -1 if there is none."""


def is_in_backward() -> bool:
    """True if this thread is inside a backward pass (hooks, recomputation)."""
    return backward_task() != -1


def at_end_of_backward(callback: Callable[[], None]) -> Callable[[], object]:
    """Call a function when the backward pass that runs now has ended, unless it ends in an exception.

    Args:
        callback: a function that nobody else holds: autograd drops it at the end, of whatever kind.

    Returns:
        A function that returns None once the backward has ended, in an exception or not.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)


def will_accumulate(parameters: Iterable[nn.Parameter]) -> bool:
    """True if the backward that runs now may give gradients to parameters; `torch.autograd.grad` gives none.

    Args:
        parameters: leaves. They are looked at only in a backward to chosen inputs.
    """
    if torch.autograd._is_checkpoint_valid():
        return True
    return any(_is_run(get_gradient_edge(one).node) for one in parameters if one.requires_grad)


def _is_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad returns the gradient of this very parameter
        return False


next_node: Callable[[], int] = torch.autograd._get_sequence_nr
"""Returns the number of the node that this thread makes next; a backward runs the highest number first."""


def hook_if_made(tensor: Tensor, since: int, hook: Callable[[Tensor], object]) -> bool:
    """Register a hook of a tensor's gradient that runs before those that are there.

    Args:
        tensor: any tensor.
        since: the hook is registered only if a node made the tensor after `next_node` gave this number.
        hook: the hook.

    Returns:
        True if it is registered.
    """
    if tensor.grad_fn is None or tensor.grad_fn._sequence_nr() < since:
        return False
    tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    for key in tuple(hooks)[:-1]:  # they run in the order of the dictionary
        hooks[key] = hooks.pop(key)
    return True


def is_inside(module: nn.Module) -> bool:
    """True if a call of a module runs around its present call. KeyboardInterrupt ends one without hooks."""
    frames = (frame for frame, _ in walk_stack(None) if frame.f_code is nn.Module._call_impl.__code__)
    return sum(frame.f_locals["self"] is module for frame in frames) > 1


def outermost_checkpoint() -> FrameType | None:
    """Find the call of `torch.utils.checkpoint.checkpoint` whose second forward will come here again.

    Returns:
        The frame of the call, which names it as long as it runs; of several calls, the outermost.

    Raises:
        RuntimeError: the checkpoint is reentrant.
    """
    found, frame = None, sys._getframe().f_back
    while frame is not None:
        if frame.f_code is _REENTRANT:
            raise reentrant_error()
        if frame.f_code is _CHECKPOINT:
            found = frame
        frame = frame.f_back
    return found


def reentrant_error() -> RuntimeError:
    """Return the error for a reentrant checkpoint around a part of a sharded model."""
    return RuntimeError(
        "a part of a sharded model runs in a reentrant activation checkpoint, whose backward is hidden from "
        "outside: pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or to "
        'gradient_checkpointing_enable({"use_reentrant": False}), or set recompute="unit" in the Config'
    )


def is_recorded() -> bool:
    """True if a tracer records operations now, or a transform of torch.func runs."""
    if _is_tracing() or peek_interpreter_stack() is not None:
        return True
    if not _len_torch_dispatch_stack():
        return False
    ours = any(hasattr(mode, "records_for") for mode in _get_current_dispatch_mode_stack())
    return ours or any(_get_dispatch_mode(mode) is not None for mode in _TRACERS)
