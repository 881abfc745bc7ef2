"""Runs that are stopped and resumed: a model with all that a checkpoint must hold, on the same data."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard
from zeroshard import Engine, optim
from zeroshard.checkpoint.files import TENSORS, VALUES
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.checkpoint.save import Snapshot
from zeroshard.checkpoint.save import write as write_snapshot
from zeroshard.checkpoint.tensors import Stored, TensorReader, TensorSlice
from zeroshard.comm.collectives import Axis
from zeroshard.optim.eightbit import step as steps
from zeroshard.stores.store import TierMemory

VOCABULARY, WIDTH, BATCH = 37, 20, 12
"""12 samples divide over 1, 2, 3 and 4 ranks."""


os.fsync = lambda descriptor: None
"""Checkpoints of the tests outlive no power failure; a save takes a dozen of them."""


def _never() -> bool:
    return False


without_numba = mock.patch.object(steps, "_has_numba", _never)
"""For functions of ranks, which else compile each rule of 8 bits for seconds; the bits are the same."""


class Block(nn.Module):
    """A unit with matrices of more than one block of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Every kind of parameter and buffer: tied, frozen, unused, 3-dimensional, 0-dim, empty, with a slash."""

    def __init__(self, *, dropout: float = 0.0, tied: bool = True, hidden: int = 13) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Parameter(torch.randn(5, WIDTH, hidden) / 8)
        self.unmix = nn.Linear(hidden, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3, 7))
        self.named = nn.ParameterDict({"a/b": torch.randn(3, 7)})
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 5))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.unmix(torch.einsum("btd,kde->bte", x, self.mix)) + self.frozen(x)
        for block in self.blocks:
            x = self.dropout(block(x))
        with torch.no_grad():
            self.count += 1
            self.average.lerp_(x.float().mean((0, 1)).to(self.average.dtype), 0.1)
            self.scratch += 1
        return self.head(x) * self.gain + self.empty.sum()


def build(seed: int = 0, **options: Any) -> Net:
    """The model, the same on every rank."""
    torch.manual_seed(seed)
    return Net(**options)


def batch(number: int) -> Tensor:
    """[BATCH / ranks, 9]: this rank's part of the global batch of a step."""
    generator = torch.Generator().manual_seed(number)
    whole = torch.randint(VOCABULARY, (BATCH, 9), generator=generator)
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def token_loss(engine: nn.Module, number: int) -> Tensor:
    tokens = batch(number)
    return F.cross_entropy(engine(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


Loss = Callable[[nn.Module, int], Tensor]


def square_loss(width: int) -> Loss:
    """Return the loss of models from [4, width], the same on each rank."""

    def loss(engine: nn.Module, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return engine(torch.randn(4, width, generator=generator)).square().mean()

    return loss


Maker = Callable[[nn.Module], torch.optim.Optimizer]


def maker(name: str, **options: Any) -> Maker:
    """Return what makes an optimizer of this name, ours or torch's, from a model."""
    kind = getattr(optim if hasattr(optim, name) else torch.optim, name)
    return lambda model: kind(model.parameters(), **({"lr": 1e-2} | options))


adamw = maker("AdamW")


def start(
    config: Mapping[str, Any] | int = 3,
    optimizer: Maker | None = adamw,
    *,
    model: nn.Module | None = None,
    seed: int = 0,
    **given: Any,
) -> Engine:
    """An engine over the model.

    Args:
        config: or a stage.
        optimizer: what makes one from the model.
        model: instead of Net.
        seed: of the model: another one than that of the run which is resumed shows what was not loaded.
        given: to `initialize`.
    """
    model = build(seed) if model is None else model
    made = None if optimizer is None else optimizer(model)
    config = {"stage": config} if isinstance(config, int) else dict(config)
    return zeroshard.initialize(model, made, config, **given).engine


def train(engine: Engine, numbers: Iterable[int], loss: Loss = token_loss) -> list[float]:
    """The mean losses over all ranks of steps on the global batches of these numbers."""
    losses = []
    for number in numbers:
        value = loss(engine, number)
        engine.backward(value)
        engine.step()
        losses.append(sum(from_all(value.item())) / dist.get_world_size())
    return losses


def saved(
    folder: Path,
    config: Mapping[str, Any] | int = 3,
    optimizer: Maker | None = adamw,
    *,
    numbers: Iterable[int] = range(2),
    loss: Loss = token_loss,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    **given: Any,
) -> Engine:
    """An engine that has trained on the batches of these numbers, and has saved a checkpoint."""
    engine = start(config, optimizer, **given)
    train(engine, numbers, loss)
    engine.save_checkpoint(folder, tag, client_state)
    return engine


def refusal(call: Callable[[], object], kind: type[Exception] = RuntimeError) -> str:
    """The message of the error that a call raises on this rank."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def from_all(value: Any) -> list[Any]:
    """What every rank gives, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


@dataclass
class State:
    """What an engine has come to, put together from all ranks without the code of checkpoints."""

    tensors: dict[str, Tensor]
    """By name parameters and persistent buffers (on rank 0), by (name, key) states of the optimizer, flat."""
    values: dict[str, Any]
    losses: list[float] = field(default_factory=list)


def state(engine: Engine, losses: list[float] | None = None) -> State:
    """The state now; collective."""
    tensors: dict[Any, Tensor] = {}
    values: dict[str, Any] = {
        "steps": (engine.global_step, engine.skipped_steps),
        "loss scale": engine._guard.loss_scale,
    }
    for name, value in engine.full_state_dict().items():
        (tensors if isinstance(value, Tensor) else values)[name] = copy.deepcopy(value)
    if engine.optimizer is not None:
        own = {p.fqn: engine.optimizer.state.get(p, {}) for _, p in engine.named_parameters()}
        everyone = from_all(own)
        holders = everyone[: engine.config.shard_group_size] if engine.config.stage else everyone[:1]
        for name, saved in own.items():
            for key, value in saved.items():
                parts = [holder[name][key] for holder in holders]
                is_sharded = isinstance(value, Tensor) and value.dim()
                tensors[name, key] = torch.cat(parts, -1) if is_sharded else torch.as_tensor(parts[0])
        values["groups"] = [
            {key: value for key, value in group.items() if key != "params"}
            | {"names": [p.fqn for p in group["params"]]}
            for group in engine.optimizer.param_groups
        ]
    if engine.lr_scheduler is not None:
        values["schedule"] = engine.lr_scheduler.state_dict()
    return State(tensors, values, losses or [])


def differences(got: State, want: State) -> list[str]:
    """Where two states differ by a single bit. Losses are not compared."""
    found = [f"only in one: {name}" for name in got.tensors.keys() ^ want.tensors.keys()]
    for name in got.tensors.keys() & want.tensors.keys():
        one, other = got.tensors[name], want.tensors[name]
        if one.dtype != other.dtype or not torch.equal(one, other):
            found.append(f"{name}: {one.dtype} {one.flatten()[:3]}, not {other.dtype} {other.flatten()[:3]}")
    return found + [
        f"{key}: {got.values.get(key)}, not {want.values.get(key)}"
        for key in got.values.keys() | want.values.keys()
        if got.values.get(key) != want.values.get(key)
    ]


def refused(engine: Engine, folder: str | Path, kind: type[Exception] = ValueError, **options: Any) -> str:
    """The message, the same on all ranks, of a checkpoint that does not load and changes nothing."""
    before = state(engine)
    text = refusal(lambda: engine.load_checkpoint(folder, **options), kind)
    assert len(set(from_all(text))) == 1
    assert not differences(state(engine), before)
    return text


def read_whole(stored: Stored) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name."""
    with TensorReader(stored) as reader:
        return {name: reader.read_whole(name) for name in stored.tensors}


def snapshot_of(folder: Path, parts: list[TensorSlice], device: torch.device) -> Snapshot:
    """A checkpoint of these tensors alone."""
    manifest = Manifest(
        written_by={},
        model={},
        config={},
        global_step=0,
        skipped_steps=0,
        loss_scale=None,
        seed=0,
        data=None,
        optimizer=None,
        lr_scheduler=None,
        parameters={},
        buffers=(),
    )
    return Snapshot(
        folder=folder,
        tag="t",
        keep_last=None,
        slices=parts,
        manifest=manifest,
        values={VALUES: b"", TENSORS: b""},
        memory=TierMemory(device, None),
    )


def write(folder: Path, parts: list[TensorSlice]) -> None:
    """Write it without ranks."""
    device = torch.device("cpu")
    axis = Axis(None, device=device, timeout_s=10)
    write_snapshot(snapshot_of(folder, parts, device), axis)
