"""A model that is linear in its parameters, so its gradients are known."""

import zlib

import torch
from torch import nn


def gradient(name, step, shape):
    """Multiples of 1/64, which float16 holds."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    values = torch.randint(-99, 99, shape, generator=generator) / 64
    return values * (0 if name.endswith("without_gradient") else 1)


def is_used(name, step):
    """What has a gradient: one parameter never, one in every other step."""
    return not name.endswith(("unused", "frozen")) and not (name.endswith("sometimes") and step % 2)


class Layer(nn.Module):
    """A unit whose output has known gradients."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.randn(33, 40) / 8)
        self.bias = nn.Parameter(torch.zeros(40))
        self.gain = nn.Parameter(torch.ones(()))
        self.sometimes = nn.Parameter(torch.randn(300))

    def forward(self, step):
        named = ((f"{self.name}{key}", p) for key, p in self._parameters.items())
        used = [(name, p) for name, p in named if is_used(name, step)]
        return sum((p * gradient(name, step, p.shape).to(p.dtype)).float().sum() for name, p in used)


class Net(Layer):
    """Parameters of every kind; at four ranks, most of them are in one rank's hands or two."""

    def __init__(self):
        super().__init__("")
        self.layers = nn.ModuleList(Layer(f"layers.{at}.") for at in range(3))
        self.zero = nn.Parameter(torch.zeros(5, 60))
        self.without_gradient = nn.Parameter(torch.randn(7, 50))
        self.unused = nn.Parameter(torch.randn(20))
        self.frozen = nn.Parameter(torch.randn(300), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 4))

    def forward(self, step):
        return super().forward(step) + sum(layer(step) for layer in self.layers)


def build():
    torch.manual_seed(0)
    return Net()
