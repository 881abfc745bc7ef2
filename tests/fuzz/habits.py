"""What a user does around the steps; drawn apart from the rest of a case, so that seeds keep their cases."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.acts import Act, draw_acts
from tests.fuzz.blocks import Gate
from tests.fuzz.models import Net
from tests.fuzz.penalties import can_compute


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Drawn once for a case."""

    hooks: bool = False
    """Whether a post-accumulate hook halves each gradient."""
    zeroes_model: bool = False
    """Whether gradients are dropped by the model's zero_grad(), not by the optimizer's or the engine's."""
    norm_type: float | None = None
    """If it is a number, the plain loop clips gradients by this norm."""
    penalty: bool = False
    """Whether a part of the loss is made of derivatives of the model."""
    acts: tuple[Act, ...] = ()
    """What is done beside training."""


def draw_habits(
    seed: int,
    model: Net,
    loop: str,
    config: dict[str, Any],
    num_micro_batches: list[int],
) -> Habits:
    """The habits of a case; the config gets what belongs to them.

    Args:
        seed: of the case.
        model: as it will be trained.
        loop: as `Case` has it.
        config: as it will be, but for `ignored` and `checkpoint`.
        num_micro_batches: of each step.
    """
    random = Random(f"habits {seed}")
    may_clip = loop == "plain" and "clip_grad_norm" not in config
    is_wide = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    may_restart = is_wide and "main_dtype" not in config["precision"]
    draws = [random.random() for _ in range(8)]  # one more than there are, so that seeds keep their cases
    if ignored := _ignore_some(seed, model, config):
        config["ignored"] = ignored
    acts = draw_acts(seed, loop, num_micro_batches, restarts=may_restart and draws[4] < 0.15)
    if Random(f"frozen {seed}").random() < 0.5:
        config["checkpoint"] = {"frozen": False}
    return Habits(
        hooks=draws[0] < 0.2,
        zeroes_model=draws[1] < 0.3,
        norm_type=random.choice((1.0, 2.0, 3.0, float("inf"))) if may_clip and draws[3] < 0.3 else None,
        penalty=loop != "train_batch" and _has_penalty(seed, model, config),
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


def _has_penalty(seed: int, model: Net, config: dict[str, Any]) -> bool:
    random = Random(f"penalty {seed}")
    if random.random() >= 0.2:
        return False
    if config["stage"] == 3 and any(isinstance(module, Gate) and module.cuts for module in model.modules()):
        return False  # where a rank's graph does not come to its inputs, it gathers nothing
    return can_compute(model, config["precision"].get("param_dtype"))


def halve(parameter: Tensor) -> None:
    """A post-accumulate hook."""
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
