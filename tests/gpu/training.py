"""A model, its data and training loops for the tests on GPUs. All of it runs on CPU ranks too."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.ranks import SHARES_GPU
from zeroshard import Engine

STAGES = (0, 1, 2, 3)
BF16 = {"param_dtype": "bf16"}


def gpus(num: int, *, own: bool = False) -> list[pytest.MarkDecorator]:
    """The marks of a test that needs so many GPUs, or one that ranks share where ZEROSHARD_SHARED_GPU=1.

    Args:
        num: ranks.
        own: True for a test that says nothing if ranks share a GPU.
    """
    present = torch.cuda.device_count()
    if SHARES_GPU and not own and present:
        present = num
    return [pytest.mark.gpu, pytest.mark.skipif(present < num, reason=f"needs {num} CUDA devices")]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Logits [batch, 256] of a class for each input [batch, width]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(width: int = 256, depth: int = 4) -> Model:
    torch.manual_seed(0)
    return Model(width, depth)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def start(model: nn.Module, stage: int, **config: Any) -> Engine:
    """A copy of the model, sharded."""
    model = copy.deepcopy(model)
    return zeroshard.initialize(model, adamw(model), {"stage": stage, **config}).engine


def batch(width: int, number: int, device: torch.device, size: int = 64) -> tuple[Tensor, Tensor]:
    """This rank's data of a step."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
    inputs = torch.randn(size, width, generator=generator)
    return inputs.to(device), torch.randint(256, (size,), generator=generator).to(device)


def train(engine: Engine, numbers: range, size: int = 64) -> list[float]:
    """Losses of this rank."""
    losses = []
    for number in numbers:
        inputs, targets = batch(engine.module.width, number, engine.device, size)
        loss = F.cross_entropy(engine(inputs).float(), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_replicated(model: nn.Module, device: torch.device, numbers: range, bf16: bool) -> list[float]:
    """Losses of DistributedDataParallel, or of plain PyTorch on one rank; under autocast for bf16."""
    replica: nn.Module = copy.deepcopy(model).to(device)
    width = model.width
    if dist.get_world_size() > 1:
        replica = DistributedDataParallel(replica)
    optimizer, losses = adamw(replica), []
    for number in numbers:
        inputs, targets = batch(width, number, device)
        precision = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
        with precision:
            logits = replica(inputs)
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
