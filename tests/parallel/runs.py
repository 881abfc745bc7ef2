"""Training of a divided model beside that of one process, for the tests of this folder."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.parallel.test_divided import BATCH, PLAN, build, loss_of

STEPS = 4


class Run(NamedTuple):
    """The results of a training."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    whole: dict[str, tuple[int, str]]
    """Of each parameter that is not cut: the place in the shard group, and a digest of the values there."""


def initialize(model: nn.Module, make: Any, config: dict[str, Any], plan: Any = PLAN) -> Any:
    return zeroshard.initialize(model, make, config, tp_plan=plan).engine


def own_part(axis: Any, number: int = 0, of: int = 1) -> slice:
    """The samples of this rank in one of the micro-batches of a step."""
    size = BATCH // (axis.size * of)
    start = (number * axis.size + axis.rank) * size
    return slice(start, start + size)


def digests(engine: Any) -> dict[str, tuple[int, str]]:
    place = engine._axes.dp_shard.rank
    return {
        p.fqn: (place, hashlib.sha256(p.detach().cpu().view(torch.uint8).numpy().tobytes()).hexdigest())
        for p in engine.parameters()
        if getattr(p, "fqn", None) is not None and p.cut is None
    }


def check_same(runs: list[Run]) -> None:
    """Parameters that several ranks hold are the same bits on all of them."""
    for name in runs[0].whole:
        found: dict[int, set[str]] = {}
        for run in runs:
            place, digest = run.whole[name]
            found.setdefault(place, set()).add(digest)
        assert all(len(values) == 1 for values in found.values()), name


def plain(make: Any, change: Any = None, *, steps: int = STEPS, dtype: torch.dtype = torch.float64) -> Run:
    """One process."""
    model = build(0).to(dtype)
    if change is not None:
        model = change(model) or model
    optimizer, losses, norms = make(model.parameters()), [], []
    for number in range(steps):
        loss = loss_of(model, number)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, norms, model.state_dict(), {})


def divided(
    config: dict[str, Any],
    make: Any,
    change: Any = None,
    *,
    steps: int = STEPS,
    plan: Any = PLAN,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """Several ranks; those beside rank 0 begin with other values."""
    model = build(dist.get_rank()).to(dtype)
    if change is not None:
        model = change(model) or model
    engine = initialize(model, make, {"clip_grad_norm": 1e9, **config}, plan)
    axis, losses, norms = engine._axes.dp, [], []
    num = config.get("gradient_accumulation_steps", 1)
    for number in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(num):
            loss = loss_of(engine, number, own_part(axis, micro, num))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / num
        norms.append(0.0 if engine.grad_norm is None else engine.grad_norm.item())
        losses.append((axis.sum(total, "test") / axis.size).item())
    whole, state = digests(engine), engine.full_state_dict()
    engine.close(restore=False)
    return Run(losses, norms, state, whole)
