"""What a user does around the steps; drawn apart from the rest of a case, so that seeds keep their cases."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.blocks import Checkpointed
from tests.fuzz.models import Net, unconditional

BOUND = 0.125
"""Exact in every dtype, so that an edit in a narrow one is the same in a wide one."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Drawn once for a case."""

    edited: tuple[str, ...] = ()
    """Modules whose own parameters are clamped at the beginning of each forward of theirs."""
    hooks: bool = False
    """Whether a post-accumulate hook halves each gradient."""
    zeroes_model: bool = False
    """Whether gradients are dropped by the model's zero_grad(), not by the optimizer's or the engine's."""
    targets: bool = False
    """Whether loss.backward() names all trained parameters as its inputs."""
    norm_type: float | None = None
    """If it is a number, the plain loop clips gradients by this norm."""
    scales: bool = False
    """Whether the engine's loop calls `engine.scale(loss)` and then backward by itself."""
    restarts: tuple[int, ...] = ()
    """Steps after which the engine is closed, and another one is made over the model."""


def draw_habits(
    seed: int, model: Net, loop: str, config: dict[str, Any], num_steps: int, wants_input_gradients: bool
) -> Habits:
    """The habits of a case; a module that is edited gets its hook here."""
    random = Random(f"habits {seed}")
    is_reentrant = any(isinstance(m, Checkpointed) and m.reentrant for m in model.modules())
    edited = _edit_some(random, model) if random.random() < 0.25 else ()
    may_target = loop == "plain" and not wants_input_gradients and not is_reentrant
    may_clip = loop == "plain" and "clip_grad_norm" not in config
    is_wide = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    may_restart = is_wide and "main_dtype" not in config["precision"]
    draws = [random.random() for _ in range(8)]
    if draws[5] < 0.2:
        model.returns = random.choice(("attributes", "namespace"))
    if draws[6] < 0.2 and isinstance(config.get("units"), list):
        _put_together(random, model, config["units"])
    return Habits(
        edited=edited,
        hooks=draws[0] < 0.2,
        zeroes_model=draws[1] < 0.3,
        targets=may_target and draws[2] < 0.2,
        norm_type=random.choice((1.0, 2.0, 3.0, float("inf"))) if may_clip and draws[3] < 0.3 else None,
        scales=loop == "engine" and draws[7] < 0.2,
        restarts=(random.randrange(num_steps),) if may_restart and draws[4] < 0.15 else (),
    )


def _edit_some(random: Random, model: Net) -> tuple[str, ...]:
    """Modules that all ranks call alike, so that the edits are those of a whole model."""
    own = {id(m) for m in unconditional(model) if next(m.parameters(recurse=False), None) is not None}
    names = [name for name, module in model.named_modules() if id(module) in own]
    chosen = tuple(name for name in names if random.random() < 0.5)
    for name in chosen:
        way = random.choice((_clamp_data, _set_data))
        model.get_submodule(name).register_forward_pre_hook(way)
    return chosen


def _put_together(random: Random, model: Net, units: list[Any]) -> None:
    """Make one unit of two modules that are in no unit yet, one of which is not inside the other."""
    allowed = {id(m) for m in unconditional(model) if type(m).__name__ not in units}
    names = [name for name, module in model.named_modules() if id(module) in allowed]
    if len(names) > 1:
        one, other = random.sample(names, 2)
        if not f"{one}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{one}."):
            units.append([one, other])


def _clamp_data(module: nn.Module, args: Any) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.clamp_(-BOUND, BOUND)


def _set_data(module: nn.Module, args: Any) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.clamp(-BOUND, BOUND)


def halve(parameter: Tensor) -> None:
    """A post-accumulate hook."""
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
