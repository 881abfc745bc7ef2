"""A model with parameters of all forms that is linear in them, so its gradients are known by their names."""

import zlib

import torch
from torch import nn

from tests.distributed.training import seeded

FUSED = (30, 10, 11)


def gradient(name, step, shape):
    """Multiples of 1/64, which float16 holds."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    values = torch.randint(-99, 99, shape, generator=generator) / 64
    return values * (0 if name.endswith("without_gradient") else 1)


def is_used(name, step):
    """What has a gradient: one parameter never, one in every other step."""
    return not name.endswith(("unused", "frozen")) and not (name.endswith("sometimes") and step % 2)


def linear(named, step):
    """A sum with these gradients."""
    used = [(name, p) for name, p in named if is_used(name, step)]
    return sum((p * gradient(name, step, p.shape).to(p.dtype)).float().sum() for name, p in used)


class Layer(nn.Module):
    """A unit with matrices of all forms, and parameters that are none."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.wide = nn.Linear(40, 33)
        self.tall = nn.Linear(24, 70, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 20, 16) / 4)
        self.fused = nn.Parameter(torch.randn(sum(FUSED), 24) / 4)
        self.sometimes = nn.Parameter(torch.randn(13, 21) / 4)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, step):
        return linear([(self.name + name, p) for name, p in self.named_parameters()], step)


class Net(nn.Module):
    """At four ranks, most of the parameters are in one rank's hands or two."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Layer(f"layers.{at}.") for at in range(2))
        self.row = nn.Parameter(torch.randn(1, 300) / 4)
        self.unused = nn.Parameter(torch.randn(20, 20))
        self.frozen = nn.Parameter(torch.randn(20, 30), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.lm_head = nn.Linear(16, 50, bias=False)

    def forward(self, step):
        own = [(name, p) for name, p in self.named_parameters() if not name.startswith("layers.")]
        return linear(own, step) + sum(layer(step) for layer in self.layers)


def net_with_zeros():
    """The model with parameters whose values or gradients are 0."""
    model = seeded(Net)
    model.zero = nn.Parameter(torch.zeros(5, 60))
    model.without_gradient = nn.Parameter(torch.randn(7, 50))
    return model


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
