"""A model with matrices of all forms. Gradients are given by name, so the same at any number of ranks."""

import zlib

import torch
from torch import nn

from tests.optim.known import is_used

FUSED = (30, 10, 11)


class Layer(nn.Module):
    """A unit with matrices of all forms, and parameters that are none."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(40, 33)
        self.tall = nn.Linear(24, 70, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 20, 16) / 4)
        self.fused = nn.Parameter(torch.randn(sum(FUSED), 24) / 4)
        self.sometimes = nn.Parameter(torch.randn(13, 21) / 4)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x


class Net(nn.Module):
    """At four ranks, most of the parameters are in one rank's hands or two."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.row = nn.Parameter(torch.randn(1, 300) / 4)
        self.unused = nn.Parameter(torch.randn(20, 20))
        self.frozen = nn.Parameter(torch.randn(20, 30), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.lm_head = nn.Linear(16, 50, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build():
    torch.manual_seed(0)
    return Net()


def gradient(name, step, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator)


def step_plainly(model, optimizer, steps):
    for step in steps:
        for name, p in model.named_parameters():
            p.grad = gradient(name, step, p.shape).to(p.dtype) if is_used(name, step) else None
        optimizer.step()


def give_gradients(engine, step):
    for name, p in list(engine.named_parameters()):
        if p.requires_grad and is_used(name, step):
            engine.set_full_gradient(name, gradient(name, step, p.full_shape))


def step_sharded(engine, optimizer, steps):
    for step in steps:
        give_gradients(engine, step)
        optimizer.step()
        optimizer.zero_grad()


def unequal(got, want):
    """Names under which bits differ; on rank 0, where there are whole values."""
    return [name for name in want if got and not torch.equal(got[name], want[name])]
