"""What a user does around the steps; drawn apart from the rest of a case, so that seeds keep their cases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.acts import Act, draw_acts
from tests.fuzz.blocks import Checkpointed, Gate
from tests.fuzz.models import Net, unconditional
from tests.fuzz.penalties import PENALTIES, can_compute

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
    penalty: str | None = None
    """A key of PENALTIES: a part of the loss that is made of derivatives of the model."""
    acts: tuple[Act, ...] = ()
    """What is done beside training."""


def draw_habits(
    seed: int,
    model: Net,
    loop: str,
    config: dict[str, Any],
    num_micro_batches: list[int],
    wants_input_gradients: bool,
) -> Habits:
    """The habits of a case; a module that is edited gets its hook here, and the config what belongs to them.

    Args:
        seed: of the case.
        model: as it will be trained.
        loop: as `Case` has it.
        config: as it will be, but for `ignored` and `checkpoint`.
        num_micro_batches: of each step.
        wants_input_gradients: as `Case` has it.
    """
    random = Random(f"habits {seed}")
    is_reentrant = any(isinstance(m, Checkpointed) and m.reentrant for m in model.modules())
    edited = _edit_some(random, model) if random.random() < 0.25 else ()
    may_target = loop == "plain" and not wants_input_gradients and not is_reentrant
    may_clip = loop == "plain" and "clip_grad_norm" not in config
    is_wide = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    may_restart = is_wide and "main_dtype" not in config["precision"]
    draws = [random.random() for _ in range(8)]  # one more than there are, so that seeds keep their cases
    may_derive = not edited and loop != "train_batch"
    if draws[5] < 0.2:
        model.returns = random.choice(("attributes", "namespace"))
    if draws[6] < 0.2 and isinstance(config.get("units"), list):
        _put_together(random, model, config["units"])
    if (ignored := _ignore_some(seed, model, config)) and not edited:
        config["ignored"] = ignored
    acts = draw_acts(seed, loop, num_micro_batches, restarts=may_restart and draws[4] < 0.15)
    if Random(f"frozen {seed}").random() < 0.5:
        config["checkpoint"] = {"frozen": False}
    return Habits(
        edited=edited,
        hooks=draws[0] < 0.2,
        zeroes_model=draws[1] < 0.3,
        targets=may_target and draws[2] < 0.2,
        norm_type=random.choice((1.0, 2.0, 3.0, float("inf"))) if may_clip and draws[3] < 0.3 else None,
        penalty=_penalty(seed, model, config) if may_derive else None,
        acts=acts,
    )


def _ignore_some(seed: int, model: Net, config: dict[str, Any]) -> list[str]:
    """Patterns for `ignored`: names of parameters, and of all that a module has."""
    random, dtype = Random(f"ignored {seed}"), config["precision"].get("param_dtype")
    kept = {id(model.offset)} | {id(p) for p in model.parameters() if dtype not in (None, p.dtype)}
    patterns = [name for name, p in model.named_parameters() if id(p) not in kept]
    for name, module in model.named_modules():
        if (
            name
            and kept.isdisjoint(map(id, module.parameters()))
            and next(module.parameters(), None) is not None
        ):
            patterns.append(f"{name}.*")
    if random.random() >= 0.15 or dtype == torch.float16:
        return []
    return random.sample(patterns, min(len(patterns), random.randint(1, 3)))


def _penalty(seed: int, model: Net, config: dict[str, Any]) -> str | None:
    random = Random(f"penalty {seed}")
    if random.random() >= 0.3:
        return None
    kinds = list(PENALTIES)
    if config["stage"] == 3 and any(isinstance(module, Gate) and module.cuts for module in model.modules()):
        kinds.remove("autograd.grad")  # where a rank's graph does not come to its inputs, it gathers nothing
    random.shuffle(kinds)
    dtype = config["precision"].get("param_dtype")
    return next((kind for kind in kinds if can_compute(kind, model, dtype)), None)


def _edit_some(random: Random, model: Net) -> tuple[str, ...]:
    """Modules that all ranks call alike, so that the edits are those of a whole model.

    A later module must not edit a weight of an earlier one too: a second forward would see the edit.
    """
    own = {id(m) for m in unconditional(model) if next(m.parameters(recurse=False), None) is not None}
    names = [name for name, module in model.named_modules() if id(module) in own]
    holders = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    drawn = [name for name in names if random.random() < 0.5]
    inner = {name: model.get_submodule(name).parameters(recurse=False) for name in drawn}
    chosen = tuple(name for name in drawn if all(holders[id(p)] == 1 for p in inner[name]))
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
