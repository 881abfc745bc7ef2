"""Saved values that take the place of present ones: of the same kind, told before anything is loaded.

Checksums find accidents. But a file that a person or another program wrote, with checksums that fit, may say
lr="x". An optimizer would find out in the middle of its next step, with the old run gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zeroshard.optim.adopt.bitsandbytes import is_bitsandbytes

MAX_STEPS = 1 << 53
"""Float64 can't count further."""
SMALL = 64
"""Elements of a state that is one value, or a few, for a whole parameter."""
_NONE_IS_A_VALUE = ("t_alpha", "t_beta3")
"""Hyperparameters of AdEMAMix that are numbers or None."""


@contextmanager
def naming_file(file: Path) -> Iterator[None]:
    """Errors of what is made of a file's values name the file.

    Raises:
        ValueError: was raised inside.
        RuntimeError: anything else was: the values are of other kinds than those that are saved.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise RuntimeError(f"{file}: damaged ({type(error).__name__}: {error})") from None


def check_group(number: int, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise ValueError for the first hyperparameter of a group that is of another kind than the present one.

    Args:
        number: of the group.
        saved: under the keys that the present optimizer has for them.
        present: the group that they are for.
    """
    for key, value in saved.items():
        is_absent = value is None and key in _NONE_IS_A_VALUE
        if key in present and not is_absent and (problem := misfit(value, present[key], same_length=True)):
            raise ValueError(
                f"hyperparameter '{key}' of parameter group {number}: {problem}. To keep the present "
                "hyperparameters, load with restore_hyperparameters=False"
            )


def check_schedule(saved: Mapping[Any, Any], scheduler: Any) -> None:
    """Raise ValueError for a value that an LR scheduler of torch can't go on with. Others check their own."""
    if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        return
    present = scheduler.state_dict()
    is_known = type(scheduler).__module__.startswith(("torch.", "zeroshard."))
    for key, value in saved.items():
        if not isinstance(key, str) or (key not in present and _is_in_use(scheduler, key)):
            raise ValueError(f"the LR schedule has {key!r}; expected only keys of the scheduler's state")
        if key not in present or not (is_known or key in _COMMON):
            continue
        problem = misfit(value, present[key])
        if key in _COUNTS and problem is None and (value != int(value) or not -1 <= value < MAX_STEPS):
            problem = f"expected a count of steps, got {value!r}"
        if problem:
            raise ValueError(
                f"'{key}' of the LR schedule: {problem}. To keep the present schedule, load with "
                "restore_hyperparameters=False"
            )
    parts, own = saved.get("_schedulers"), getattr(scheduler, "_schedulers", None)
    if isinstance(parts, list | tuple) and isinstance(own, list | tuple):
        for part, child in zip(parts, own, strict=False):
            check_schedule(part, child)


def _is_in_use(scheduler: Any, name: str) -> bool:
    """True for a method, a property, or an attribute that an LR scheduler keeps out of its state."""
    member = getattr(type(scheduler), name, None)
    return name in vars(scheduler) or callable(member) or hasattr(type(member), "__get__")


_COUNTS = ("last_epoch", "_step_count")
_COMMON = (*_COUNTS, "base_lrs", "_last_lr")
"""The state that all schedulers of torch keep."""


def check_scalars(optimizer: Optimizer, name: str, saved: Mapping[Any, Any]) -> None:
    """Raise ValueError for a state of a parameter that is no value of an optimizer.

    Args:
        optimizer: one that is not torch's, zeroshard's or bitsandbytes' may keep any plain value.
        name: of the parameter.
        saved: what is one value for all of its elements.
    """
    is_known = type(optimizer).__module__.startswith(("torch.", "zeroshard.")) or is_bitsandbytes(optimizer)
    for key, value in saved.items():
        is_value = isinstance(value, Real | Tensor) or value is None
        if isinstance(value, Tensor):
            is_value = _is_small(value)
            value = value.tolist() if is_value and value.numel() > 1 else value
        if not isinstance(key, str) or not (is_value or not (is_known or isinstance(value, Tensor))):
            raise ValueError(f"state {key!r} of '{name}': expected a number, got {_described(value)}")
        if is_known and value is not None and _has_nan(value):
            raise ValueError(f"state '{key}' of '{name}': expected a number, got nan")
        if is_known and key == "step" and not (0 <= value < MAX_STEPS and value == int(value)):
            raise ValueError(f"step count of '{name}': expected an integer >= 0, got {_described(value)}")


def _is_small(value: Tensor) -> bool:
    is_plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
    return is_plain and not value.is_quantized and not value.is_complex() and 0 < value.numel() <= SMALL


def misfit(saved: Any, present: Any, *, same_length: bool = False) -> str | None:
    """Tell in words why a saved value cannot take the place of a present one; None where it can.

    Args:
        saved: a plain value.
        present: where it is None, or of a kind that is not known here, anything can.
        same_length: whether sequences must have as many elements.
    """
    if isinstance(present, Mapping):
        if not isinstance(saved, Mapping):
            return f"expected a dict, got {_described(saved)}"
        pairs = [(saved[key], present[key]) for key in saved if key in present]
    elif isinstance(present, list | tuple):
        if not isinstance(saved, list | tuple) or (same_length and len(saved) != len(present)):
            count = f" of {len(present)}" if same_length else ""
            return f"expected a sequence{count}, got {_described(saved)}"
        fill = present[-1:] * max(0, len(saved) - len(present))
        pairs = list(zip(saved, [*present, *fill], strict=False))
    else:
        return _misfit_of_one(saved, present)
    found = (misfit(one, other, same_length=same_length) for one, other in pairs)
    return next((problem for problem in found if problem is not None), None)


def _misfit_of_one(saved: Any, present: Any) -> str | None:
    if isinstance(present, bool):
        return None if isinstance(saved, bool) else f"expected True or False, got {_described(saved)}"
    if isinstance(present, str):
        return None if isinstance(saved, str) else f"expected a string, got {_described(saved)}"
    if not _is_number(present):
        return None
    if not _is_number(saved) or _has_nan(saved):
        return f"expected a number like the present {_described(present)}, got {_described(saved)}"
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized)
        return is_plain and value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def _has_nan(value: Any) -> bool:
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    return any(math.isnan(float(one)) for one in values)


def _described(value: Any) -> str:
    """A value in an error: what a file says may be long."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
