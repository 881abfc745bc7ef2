"""Try an installed zeroshard that has torch alone: import every module, train at each stage.

    python tools/smoke.py
    torchrun --nproc-per-node 2 tools/smoke.py

`tools/package.py` runs it with the Python of a fresh environment. Losses and parameters are compared with
plain PyTorch on the whole batch.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import torch
from torch import nn

import zeroshard

OPTIONAL = {
    *("accelerate", "bitsandbytes", "lightning", "matplotlib", "numba", "peft", "ray", "safetensors"),
    "transformers",
}
"""Packages of extras: none of them is in the environment."""
STEPS, BATCH, WIDTH = 3, 8, 16


def check_environment() -> None:
    """Expect the installed package, and no package of an extra."""
    home = Path(zeroshard.__file__)
    if not home.is_relative_to(sys.prefix):
        raise RuntimeError(f"expected the zeroshard of {sys.prefix}, got {home}")
    if found := sorted(name for name in OPTIONAL if importlib.util.find_spec(name)):
        raise RuntimeError(f"expected an environment without extras, got {', '.join(found)}")


def import_all() -> tuple[int, list[str]]:
    """Import all modules; return the number of these, and the names of those that need an extra."""
    need_extras, num = [], 0
    for module in pkgutil.walk_packages(zeroshard.__path__, "zeroshard."):
        if module.name != "zeroshard.__main__":  # its import runs the command line
            try:
                importlib.import_module(module.name)
                num += 1
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in OPTIONAL | {"llvmlite"}:
                    raise
                need_extras.append(module.name)
    return num, need_extras


def build() -> nn.Module:
    """Return a small model, with the same values each time. One weight is large enough for 8-bit states."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of all ranks together: inputs [BATCH, WIDTH] and targets [BATCH]."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(STEPS)]
    return [(values, values[:, :5].argmax(1)) for values in inputs]


def train_plain(kind: type[torch.optim.Optimizer]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the parameters of plain PyTorch."""
    model, losses = build(), []
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    for inputs, targets in batches():
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def train_sharded(
    kind: type[torch.optim.Optimizer], stage: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the same of zeroshard; each rank trains on its part of a batch."""
    model = build()
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    config = {"stage": stage}
    engine = zeroshard.initialize(model, optimizer, config, loss_fn=nn.functional.cross_entropy).engine
    rank, num = engine.dp_rank, engine.dp_world_size
    losses = [
        engine.train_batch(inputs.chunk(num)[rank], targets.chunk(num)[rank]).item()
        for inputs, targets in batches()
    ]
    parameters = engine.full_state_dict()
    str(engine.memory_report()), str(engine.comm_report())  # their tables need other packages
    engine.close(restore=False)
    return losses, parameters


def main() -> None:
    """Import, train, compare."""
    check_environment()
    num, need_extras = import_all()
    for kind in (torch.optim.AdamW, zeroshard.optim.AdamW8bit):
        losses, parameters = train_plain(kind)
        for stage in range(4):
            sharded_losses, sharded = train_sharded(kind, stage)
            torch.testing.assert_close(sharded_losses, losses)
            if sharded:  # rank 0 has them
                torch.testing.assert_close(sharded, parameters)
    if os.environ.get("RANK", "0") == "0":
        print(f"{num} modules imported; {', '.join(need_extras)} need extras")
        print(f"stages 0 to 3 on {os.environ.get('WORLD_SIZE', '1')} rank(s): as plain PyTorch")


if __name__ == "__main__":
    main()
