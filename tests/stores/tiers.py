"""Runs whose main parameters and states lie in files, beside runs on the device."""

from __future__ import annotations

import copy
import errno
import os
from contextlib import suppress
from pathlib import Path

import bitsandbytes
import torch
from torch import nn

from tests.checkpoint import runs
from tests.distributed.training import numbers
from zeroshard.optim import LAMB, LARS, AdamW8bit, Muon, muon_groups


def offload(folder, **others):
    return {"offload": {"optimizer": "nvme", "nvme_path": str(folder), **others}}


def swap_files(folder):
    """The sizes of this process's files in a folder, by inode: the files have no names."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            if os.readlink(link).startswith(f"{folder}/") and ".swap" in os.readlink(link):
                found[link.stat().st_ino] = link.stat().st_size
    return found


def refuse_space(*_):
    """In the place of os.posix_fallocate."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Replacing(torch.optim.Optimizer):
    """A class whose states appear with the second step, and that makes new tensors in each step."""

    __module__ = "zeroshard.optim"  # one that nobody knows does not step values in files

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                if state["count"] > 1:
                    state["mean"] = 0.9 * state.get("mean", 0.0) + p.grad
                    p.add_(state["mean"], alpha=-group["lr"] / state["count"])
                if state["count"] == 3:  # one more, and in another dtype
                    state["last"] = p.grad.to(torch.bfloat16)


def in_groups(model):
    """AdamW over three groups, which cut through the units."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": parameters[start::3], "lr": 1e-2 / (start + 1)} for start in range(3)]
    return torch.optim.AdamW(groups)


def over(make, **options):
    return lambda model: make([p for p in model.parameters() if p.requires_grad], **options)


OPTIMIZERS = {
    "AdamW": over(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "fused": over(torch.optim.AdamW, lr=1e-2, fused=True),
    "SGD": over(torch.optim.SGD, lr=0.05, momentum=0.9),
    "8-bit": over(AdamW8bit, lr=1e-2, min_8bit_size=256),
    "replacing": over(Replacing),
    "groups": in_groups,
    "LAMB": over(LAMB, lr=1e-2),
    "LARS": over(LARS, lr=1e-1),
    "Muon": lambda model: Muon(muon_groups(model)),
    "bitsandbytes": over(bitsandbytes.optim.AdamW8bit, lr=1e-2, min_8bit_size=256),
}

BF16 = {"precision": {"param_dtype": "bf16"}}
BF16_MAIN = {"precision": {"main_dtype": "bf16", "param_dtype": "bf16"}}


def losses_of(engine, steps, loss=runs.token_loss):
    return runs.train(engine, steps, loss)


def run(config, make=OPTIMIZERS["AdamW"], *, model=None, num_steps=3, train=losses_of, seed=3):
    """The state after some steps, and the tiers that were used."""
    torch.manual_seed(seed)
    engine = runs.start(config, make, model=runs.build() if model is None else model())
    losses = train(engine, range(num_steps))
    memory = engine._runtime.context.memory
    states = [v for s in engine.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    in_memory = sum(v.nbytes for v in states if v.dim() and v.numel() and not memory.is_in_files(v))
    found = runs.state(engine, losses)
    engine.close(restore=False)
    return found, in_memory


def compare(what, config, folder, *args, tiers=({},), in_files=False, **kwargs):
    """Where runs on the tiers differ from the one on the device, and states that are not in files."""
    want, _ = run(config, *args, **kwargs)
    found = []
    for tier in tiers:
        got, in_memory = run(config | offload(folder, **tier), *args, **kwargs)
        if repr(got.losses) != repr(want.losses):  # some are nan
            found.append(f"{what} {tier}: losses {got.losses}, not {want.losses}")
        found += [f"{what} {tier}: {text}" for text in runs.differences(got, want)]
        if in_memory and in_files:
            found.append(f"{what} {tier}: {in_memory} bytes of states in memory")
    return found[:8]


def micro_batches(engine, steps):
    return [runs.train(engine, (2 * number, 2 * number + 1)) for number in steps]


def edited(engine, steps):
    """Edits of all kinds between steps, and reads of everything."""
    losses = []
    average = {name: p.detach().clone() for name, p in engine.named_parameters()}
    for number in steps:
        losses += runs.train(engine, [number])
        with torch.no_grad():
            for name, p in engine.named_parameters():
                average[name].lerp_(p, 0.5)
                p.mul_(0.99)
        losses += runs.train(engine, [number + 10])
        with torch.no_grad():
            for name, p in engine.named_parameters():
                p.copy_(average[name])
        with engine.unsharded(write_back=True), torch.no_grad():
            for p in engine.module.parameters():
                p.add_(0.01)
        engine.full_state_dict()
        losses += runs.train(engine, [number + 20])
        engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
    return losses


class MixedBlock(nn.Module):
    """A unit with several buffers: a frozen matrix, a norm that keeps its dtype, a layer of another dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.inner, self.norm = nn.Linear(7, 30), nn.BatchNorm1d(30)
        self.outer = nn.Linear(30, 7, dtype=dtype)
        self.inner.weight.requires_grad_(False)

    def forward(self, x):
        hidden = self.norm(self.inner(x).float()).tanh()
        return x + self.outer(hidden.to(self.outer.weight.dtype)).to(x.dtype)


class Mixed(nn.Module):
    """Blocks of several dtypes, and a parameter that one rank owns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(map(MixedBlock, (torch.bfloat16, torch.float64, torch.float32)))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.gain


def mixed(engine, steps):
    return runs.train(engine, steps, lambda model, number: model(numbers(number, 5, 7)).square().mean())


FILES = {"parameters": "nvme"}
EARLY = {"step_in_backward": True}
WAYS = {
    "micro-batches": ({"gradient_accumulation_steps": 2, "clip_grad_norm": 0.1}, {"train": micro_batches}),
    "edits": (BF16_MAIN, {"train": edited, "num_steps": 1}),
    "mixed": ({}, {"model": Mixed, "train": mixed, "tiers": ({}, {"device_fraction": 0.3})}),
}
WAYS_AT_3 = {
    "parameters": ({}, {"tiers": (FILES, FILES | {"device_fraction": 0.3, "optimizer": "cpu"})}),
    "in backward": ({}, {"tiers": (EARLY, FILES | EARLY)}),
}


def num_notes(runtime):
    """The number of buffers whose squares the device has added up."""
    return sum(g.noted_squares() is not None for unit in runtime.units for g in unit.gradients)
