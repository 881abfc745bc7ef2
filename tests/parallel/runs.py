"""Training of divided models beside that of one process, for the tests of this folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard
from tests.distributed.training import seeded

STEPS = 3
WIDTH, HEAD, VOCABULARY, LENGTH, BATCH = 16, 4, 24, 6, 8
PLAN = {
    "tokens": "rowwise",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.each_head": "replicated_with_grad_allreduce",
    "blocks.*.up": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.each_head = nn.LayerNorm(HEAD)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.each_head(q), self.each_head(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def small_gpt(seed):
    return seeded(Model, seed=seed).double()


adamw = partial(torch.optim.AdamW, lr=1e-2)


def loss_of(model, number, own=slice(None)):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))[own]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Kind(NamedTuple):
    """A model and its batches."""

    build: Callable[[int], nn.Module]
    """Makes the model from a seed."""
    loss_of: Callable[[Any, int, slice], Tensor]
    """The loss of these samples of the batch of this number."""
    plan: dict[str, Any] | None
    batch_size: int


GPT = Kind(small_gpt, loss_of, PLAN, BATCH)


class Run(NamedTuple):
    """The results of a training."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    whole: dict[str, tuple[int, str]]
    """Of each parameter that is not cut: the place in the shard group, and a digest of the values there."""


def initialize(model: nn.Module, make: Any, config: dict[str, Any], plan: Any = PLAN) -> Any:
    return zeroshard.initialize(model, make, config, tp_plan=plan).engine


def own_part(axis: Any, number: int = 0, of: int = 1, batch_size: int = BATCH) -> slice:
    """The samples of this rank in one of the micro-batches of a step."""
    size = batch_size // (axis.size * of)
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


def plain(
    make: Any,
    change: Any = None,
    *,
    kind: Kind = GPT,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    max_norm: float = 1e9,
    num_parts: int = 1,
) -> Run:
    """One process; a loss is the mean over the parts of a batch, as that of routers is of each part."""
    model = kind.build(0).to(dtype)
    if change is not None:
        model = change(model) or model
    optimizer, losses, norms = make(model.parameters()), [], []
    size = kind.batch_size // num_parts
    for number in range(steps):
        parts = [slice(part * size, (part + 1) * size) for part in range(num_parts)]
        loss = sum(kind.loss_of(model, number, part) for part in parts) / num_parts
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, norms, model.state_dict(), {})


def divided(
    config: dict[str, Any],
    make: Any,
    change: Any = None,
    *,
    kind: Kind = GPT,
    steps: int = STEPS,
    plan: Any = None,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """Several ranks; those beside rank 0 begin with other values."""
    model = kind.build(dist.get_rank()).to(dtype)
    if change is not None:
        model = change(model) or model
    engine = initialize(model, make, {"clip_grad_norm": 1e9, **config}, plan or kind.plan)
    axis, losses, norms = engine._axes.dp, [], []
    num = config.get("gradient_accumulation_steps", 1)
    for number in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(num):
            loss = kind.loss_of(engine, number, own_part(axis, micro, num, kind.batch_size))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / num
        norms.append(0.0 if engine.grad_norm is None else engine.grad_norm.item())
        losses.append((axis.sum(total, "test")() / axis.size).item())
    whole, state = digests(engine), engine.full_state_dict()
    engine.close(restore=False)
    return Run(losses, norms, state, whole)


def compare(runs: list[Run], want: Run, *, losses: float, norms: float | None, values: float) -> None:
    """Compare with one process: relative differences of losses and norms, absolute ones of parameters.

    The norm, and the factor of clipping, are rounded to float32.
    """
    check_same(runs)
    for rank, run in enumerate(runs):
        assert run.losses == pytest.approx(want.losses, rel=losses)
        assert norms is None or run.norms == pytest.approx(want.norms, rel=norms)
        assert (run.state == {}) == (rank > 0)
        for name, value in run.state.items():
            torch.testing.assert_close(value, want.state[name], rtol=0, atol=values, msg=name)
