"""Hyperparameters and counts of one optimizer for another whose states mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.checkpoint.checks import MAX_STEPS
from zeroshard.optim.eightbit.rule import Rule, rule_named

Family = Rule
"""Optimizers with the states of one rule differ in library, number of bits and kind of memory only."""

_NEUTRAL = {"maximize": False, "alpha": 0.0, "eps": 0.0, "t_alpha": None, "t_beta3": None}
"""Hyperparameters that torch or bitsandbytes has for all optimizers, with the value that has no effect."""

family_of = rule_named


def convert_group(
    optimizer: Optimizer, saved: Mapping[str, Any], present: Mapping[str, Any]
) -> dict[str, Any]:
    """Saved hyperparameters under the keys that a present group has for them.

    Raises:
        ValueError: one that changes the steps, and that the optimizer does not have.
    """
    values = {key: value for key, value in saved.items() if key != "names"}
    family = family_of(type(optimizer).__name__)
    if family is None:
        return values
    if "betas" in values and "betas" not in present:
        first, *_ = values.pop("betas")
        values |= {} if family.beta is None else {family.beta: first}
    elif family.beta in values and family.beta not in present and "betas" in present:
        values["betas"] = (values.pop(family.beta), *present["betas"][1:])
    for key, absent in {**_NEUTRAL, **family.neutral}.items():
        if key in present:
            values.setdefault(key, absent)
        elif value := values.pop(key, absent):
            raise ValueError(
                f"the checkpoint has {key}={value!r}, and {type(optimizer).__name__} has no such "
                "hyperparameter: expected an optimizer with it. To keep the present hyperparameters, load "
                "with restore_hyperparameters=False"
            )
    return values


def convert_scalars(optimizer: Optimizer, saved: Mapping[str, Any], global_step: int) -> dict[str, Any]:
    """Return the scalars of a parameter that has a state, with `step` in the form of the present optimizer.

    Torch's optimizers count in a tensor, others in an integer, and SGD and LARS not at all.

    Args:
        optimizer: the present optimizer.
        saved: the scalars in the checkpoint, by name.
        global_step: the count for an optimizer that counts, if the saved one did not.

    Raises:
        ValueError: `step` is no count of steps.
    """
    kind = type(optimizer)
    family = family_of(kind.__name__)
    if family is None:
        return dict(saved)
    scalars = {key: value for key, value in saved.items() if key != "step"}
    step = saved.get("step", global_step)
    if not 0 <= step < MAX_STEPS or step != int(step):
        raise ValueError(f"step: expected a count of steps, got {step!r}")
    if kind in family.without_step:
        return scalars
    if kind.__module__.startswith("torch."):
        return scalars | {
            "step": step if isinstance(step, Tensor) else torch.tensor(float(step), dtype=torch.float32)
        }
    return scalars | {"step": int(step)}
