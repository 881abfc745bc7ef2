"""Cases whose layers are divided over tensor ranks: those of the same seeds, on as many times more ranks.

Sums of divided layers are taken in another order than in one process. So these cases compute in float64, and
their values may be a small part apart.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from random import Random

import torch
from torch import nn

from tests.fuzz.blocks import Mlp, Residual
from tests.fuzz.cases import Case, build_case, num_ranks_of
from tests.fuzz.habits import Habits
from tests.fuzz.models import Net

APART = 1e-5
"""The part of its norm by which a value may be off: losses and BatchNorm are in float32, and Adam divides
gradients by their own size."""


def tensor_ranks_of(seed: int, most_ranks: int) -> int:
    """The tensor ranks that a seed draws: half of the cases that have layers and ranks for it have two."""
    is_drawn = Random(f"mesh {seed}").random() < 0.5 and 2 * num_ranks_of(seed) <= most_ranks
    return 2 if is_drawn and divided_case(seed, 2) is not None else 1


def divided_case(seed: int, tp: int) -> Case | None:
    """The case of a seed with divided layers; None if it has no layer that can be divided.

    It has no derivatives of gradients, which divided layers do not have, and none of the calls that show
    whole parameters.
    """
    case = build_case(seed)
    model, config = case.model, dict(case.config)
    _widen(model)
    plan = _plan(Random(f"tensor {seed}"), model, tp, config.get("ignored", ()))
    if not plan:
        return None
    config |= {"precision": {}, "mesh": {"tp": tp}}
    config.pop("checkpoint", None)
    habits: Habits = replace(case.habits, penalty=False, acts=())
    steps = tuple(
        replace(step, edits=False, cuts=tuple(cut for cut in step.cuts for _ in range(tp)))
        for step in case.steps
    )
    optimizer = "AdamW" if case.optimizer == "AdamW8bit" else case.optimizer
    return replace(
        case,
        num_ranks=case.num_ranks * tp,
        tp=tp,
        tp_plan=plan,
        config=config,
        habits=habits,
        steps=steps,
        optimizer=optimizer,
    )


def _widen(model: Net) -> None:
    model.double()
    model.dtype = torch.float64
    for module in model.modules():
        if isinstance(module, Residual):
            module.dtype = torch.float64
        if isinstance(module, nn.BatchNorm1d):
            module.float()


def _plan(random: Random, model: Net, tp: int, ignored: tuple[str, ...]) -> dict[str, str]:
    """Pairs of layers, and single ones whose outputs are gathered."""
    places = Counter(p for m in model.modules() for p in m._parameters.values() if p is not None)
    num_names = Counter(m for _, m in model.named_modules(remove_duplicate=False))
    names = {m: name for name, m in model.named_modules()}

    def may_be_cut(layer: nn.Module) -> bool:
        own = [f"{names[layer]}.{name}" for name in layer._parameters]
        return (
            type(layer) is nn.Linear
            and not layer._forward_pre_hooks  # a hook of the user would see a part, and is refused
            and all(places[p] == 1 for p in layer.parameters())
            and not any(fnmatchcase(name, pattern) for name in own for pattern in ignored)
        )

    plan: dict[str, str] = {}
    for module in model.modules():
        if isinstance(module, Mlp) and all(map(may_be_cut, (module.up, module.down))):
            is_plain = module.dropout.p == 0 and num_names[module.up] == num_names[module.down] == 1
            if is_plain and module.up.out_features % tp == 0 and random.random() < 0.9:
                plan |= {names[module.up]: "colwise", names[module.down]: "rowwise"}
    for layer, name in names.items():
        if name not in plan and may_be_cut(layer) and layer.out_features % tp == 0 and random.random() < 0.5:
            plan[name] = "colwise_gather_output"
    return plan
