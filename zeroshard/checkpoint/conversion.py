"""Optimizers whose states mean the same, and what the hyperparameters of one are in another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from zeroshard.checkpoint.checks import MAX_STEPS
from zeroshard.optim.eightbit import rules
from zeroshard.optim.eightbit.rules import Rule
from zeroshard.optim.layerwise import LARS


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """The states of optimizers that differ in library, number of bits and kind of memory only."""

    states: Mapping[str, bool]
    """By name, whether it can be negative: which values its codes stand for."""
    beta: str | None = None
    """The name in other libraries of the first of bitsandbytes' `betas`, where the second has no effect."""

    @staticmethod
    def of(rule: Rule, beta: str | None = None) -> Family:
        """Return the family of zeroshard's own optimizers with a rule."""
        return Family(dict(zip(rule.states, rule.is_signed, strict=True)), beta)


_ADAM = Family.of(rules.ADAM)
_FAMILIES = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "AdEMAMix": Family.of(rules.ADEMAMIX),
    "LAMB": Family.of(rules.LAMB),
    "LARS": Family.of(rules.LARS),
    "Lion": Family.of(rules.LION),
    "SGD": Family.of(rules.MOMENTUM, "momentum"),
    "Adagrad": Family.of(rules.ADAGRAD),
    "RMSprop": Family.of(rules.RMSPROP, "alpha"),
}

_ABSENT = {
    **dict.fromkeys(("amsgrad", "maximize", "nesterov", "centered"), False),
    **dict.fromkeys(("momentum", "dampening", "lr_decay", "alpha", "eps"), 0.0),
    "initial_accumulator_value": 0.0,
    **dict.fromkeys(("t_alpha", "t_beta3")),
}
"""The value of a hyperparameter that equals not having it."""


def family_of(name: str | None) -> Family | None:
    """The family of an optimizer's class; None: its states are nobody else's."""
    base = (name or "").removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
    return _FAMILIES.get(base)


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
    for key, absent in _ABSENT.items():
        if key in present:
            values.setdefault(key, absent)
        elif value := values.pop(key, absent):
            raise ValueError(
                f"the checkpoint has {key}={value!r}, which {type(optimizer).__name__} does not have: "
                "expected an optimizer that has it, or restore_hyperparameters=False to keep the present ones"
            )
    return values


def convert_scalars(optimizer: Optimizer, saved: Mapping[str, Any], global_step: int) -> dict[str, Any]:
    """The saved scalars of a parameter that has a state, `step` as the optimizer counts it.

    Torch's optimizers count in a tensor, others in an integer, and SGD and LARS not at all.

    Args:
        global_step: for an optimizer that counts, if the saved one did not.
    """
    kind = type(optimizer)
    if family_of(kind.__name__) is None:
        return dict(saved)
    scalars = {key: value for key, value in saved.items() if key != "step"}
    step = saved.get("step", global_step)
    if not 0 <= step < MAX_STEPS or step != int(step):
        raise ValueError(f"step: expected a count of steps, came {step!r}")
    if kind in (SGD, LARS):
        return scalars
    if kind.__module__.startswith("torch."):
        return scalars | {
            "step": step if isinstance(step, Tensor) else torch.tensor(float(step), dtype=torch.float32)
        }
    return scalars | {"step": int(step)}
