"""Elements and norms of whole parameters, for code that asks a slice for them.

`numel()` of a slice stays that of the slice: optimizers allocate by it. Code that is known to count a model
gets the elements of the whole parameter. Frames tell a sum over parameters in other code, and a norm outside
an optimizer: the first one of a model gets a warning. `p.grad` and `p.detach()` are plain tensors; a norm of
them is told by the line that reads them, if it says `norm`.
"""

from __future__ import annotations

import linecache
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Warned(Protocol):
    """The warnings that a model has given."""

    has_warned_of_counts: bool
    has_warned_of_norms: bool
    has_warned_of_zeros: bool


class Slice(Protocol):
    """The facts that a sharded parameter knows of the whole."""

    fqn: str
    full_shape: torch.Size
    is_partial: bool
    state: Any


_COUNTERS = frozenset(
    (
        ("transformers.modeling_utils", "num_parameters"),
        ("transformers.trainer", "get_num_trainable_parameters"),
        ("transformers.trainer_pt_utils", "numel"),  # inside of get_model_param_count
        ("peft.peft_model", "get_nb_trainable_parameters"),
        ("peft.mixed_model", "get_nb_trainable_parameters"),
    )
)
"""Functions (module, name) that count the elements of a model and do nothing else."""

_COUNTS = frozenset((Tensor.numel, Tensor.nelement, torch.numel))
_NORMS = frozenset((Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm))
_ZEROES = re.compile(r"grad(\.data|\.detach\(\))?\.zero_\(")
_SAYS_NORM = re.compile(r"norm\(")
_ADDS_UP = re.compile(r"\+=.*(numel|nelement)\(|(\w+) = \2 \+ .*(numel|nelement)\(")
ASKED = _COUNTS | _NORMS | {Tensor.detach}
"""Functions that answer otherwise for a slice than for the whole, without any error.

`p.data` comes as detach().
"""

_OWN_NUMBERS = ("torch", "zeroshard", "bitsandbytes", "deepspeed", "apex")
"""Packages whose code sums elements to allocate memory."""


def count(parameters: Iterable[nn.Parameter], *, only_trainable: bool = False) -> int:
    """Count the elements of whole parameters, and of the weights that codes stand for.

    Args:
        parameters: parameters, sharded or not.
        only_trainable: leave out frozen parameters.
    """
    return sum(
        _shape(parameter).numel() for parameter in parameters if parameter.requires_grad or not only_trainable
    )


def _shape(parameter: nn.Parameter) -> torch.Size:
    coded: torch.Size | None = getattr(getattr(parameter, "quant_state", None), "shape", None)
    coded = coded or getattr(parameter, "coded_shape", None)
    whole: torch.Size = getattr(parameter, "full_shape", parameter.shape)  # of a scalar it is empty, false
    return coded or whole


def answer(parameter: Slice, func: Callable[..., Any], frame: FrameType | None) -> int | None:
    """Return the answer for the whole parameter; None leaves the answer of the slice.

    Args:
        func: a function of ASKED.
        frame: the frame of the caller.
    """
    if not parameter.is_partial or frame is None:
        return None
    if func in _NORMS:
        _warn_of_norm(parameter, frame)
        return None
    if func is Tensor.detach:
        warn_of_line(parameter, frame)
        return None
    is_sum = frame.f_code.co_name in ("<genexpr>", "<listcomp>")
    caller = frame.f_back if is_sum and frame.f_back is not None else frame
    module = str(frame.f_globals.get("__name__", ""))
    if (module, caller.f_code.co_name) in _COUNTERS:
        return parameter.full_shape.numel()
    if parameter.state.has_warned_of_counts or module.partition(".")[0] in _OWN_NUMBERS:
        return None
    if (is_sum or _ADDS_UP.search(_line_of(frame))) and not _is_of_optimizer(caller):
        _warn_of_count(parameter.state)
    return None


def warn_of_line(parameter: Any, frame: FrameType) -> None:
    """Warn once of a line that takes the norm of a slice: of a gradient, or of a slice as a plain tensor.

    Args:
        parameter: a sharded parameter, or a slice in another dtype, which is left alone.
        frame: the frame of the caller.
    """
    if "norm" not in frame.f_code.co_names or not getattr(parameter, "is_partial", False):
        return
    module = str(frame.f_globals.get("__name__", ""))
    is_own = module.partition(".")[0] in _OWN_NUMBERS
    if not is_own and not parameter.state.has_warned_of_norms and _SAYS_NORM.search(_line_of(frame)):
        _warn_of_norm(parameter, frame)


def warn_of_zeros(parameter: Slice, frame: FrameType) -> None:
    """Warn once of a line that zeroes a gradient while sums outside of it wait for a later reduction."""
    if not parameter.state.has_warned_of_zeros and _ZEROES.search(_line_of(frame)):
        parameter.state.has_warned_of_zeros = True
        warnings.warn(
            f"the gradient of '{parameter.fqn}' was zeroed in place, but sums of micro-batches that are not "
            "reduced yet lie elsewhere and stay. To drop these sums too, call zero_grad() of the engine, "
            "the optimizer or the model",
            stacklevel=_level_of(frame),
        )


def _level_of(frame: FrameType) -> int:
    """The `stacklevel` for a warning of the calling function about the line in a frame."""
    return _depth_of(sys._getframe(1)) - _depth_of(frame) + 1


def _depth_of(frame: FrameType) -> int:
    depth, caller = 0, frame.f_back
    while caller is not None:
        depth, caller = depth + 1, caller.f_back
    return depth


def _line_of(frame: FrameType) -> str:
    """The source of the line; empty if there is none."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def _is_of_optimizer(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), Optimizer)


def _warn_of_count(state: Warned) -> None:
    state.has_warned_of_counts = True
    warnings.warn(
        "a sum of numel() over sharded parameters counts this rank's slices only; "
        "engine.num_parameters() counts the model",
        stacklevel=5,
    )


def _warn_of_norm(parameter: Slice, frame: FrameType) -> None:
    if parameter.state.has_warned_of_norms:
        return
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_name == "step" and _is_of_optimizer(caller):
            return
        caller = caller.f_back
    level, caller = _level_of(frame), frame
    while caller is not None and str(caller.f_globals.get("__name__", "")).startswith("torch."):
        level, caller = level + 1, caller.f_back
    parameter.state.has_warned_of_norms = True
    warnings.warn(
        f"norm() of the sharded parameter '{parameter.fqn}', or of its gradient, is the norm of this rank's "
        "slice. Take it under engine.unsharded(module) for the whole parameter or gradient; "
        "engine.clip_grad_norm_() returns the norm of all gradients",
        stacklevel=level,
    )
