"""The 8-bit optimizers and rules, their settings, and gradients, for the tests of this folder."""

import torch

from zeroshard.optim import Adam8bit, AdamW8bit, AdEMAMix8bit, Lion8bit, SGD8bit
from zeroshard.optim.eightbit.blocks import Exact, QuantizedState, codebook
from zeroshard.optim.eightbit.rules import ADAGRAD, ADAM, ADEMAMIX, LION, RMSPROP, SGD

KINDS = {kind.__name__: kind for kind in (AdamW8bit, Adam8bit, Lion8bit, SGD8bit, AdEMAMix8bit)}
OPTIONS = {
    "AdamW8bit": {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "Adam8bit": {"lr": 1e-2, "betas": (0.9, 0.999)},
    "Lion8bit": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.3},
    "SGD8bit": {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.01},
    "AdEMAMix8bit": {"lr": 1e-2, "betas": (0.8, 0.95, 0.99), "alpha": 3.0, "t_alpha": 3, "t_beta3": 3},
}
SETTINGS = {
    ADAM: {"betas": (0.8, 0.95), "eps": 1e-6},
    LION: {"betas": (0.9, 0.99)},
    SGD: {"momentum": 0.7},
    RMSPROP: {"alpha": 0.9, "eps": 1e-6},
    ADAGRAD: {"eps": 1e-6},
    ADEMAMIX: {"betas": (0.8, 0.95, 0.99), "eps": 1e-6, "alpha": 3.0, "t_alpha": 3, "t_beta3": 3},
}


def begin(rule, size, dtype, device="cpu", is_exact=False):
    """Parameter and states before the first step."""
    p = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
    books = [codebook(is_signed, p.device) for is_signed in rule.states.values()]
    if is_exact:
        return p, [Exact(torch.zeros(size, device=device)) for _ in books]
    return p, [QuantizedState.zeros(size, book) for book in books]


def gradients(shape, num_steps, seed=0):
    """Of all magnitudes, a fifth of them zeros, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        g = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).mul(-6).exp()
        g *= torch.rand(shape, generator=generator) > 0.2
        g.view(-1)[256:512] = 0
        yield g


def check_states(state, reference):
    for name, blocks in reference.states.items():
        assert torch.equal(state[name].view(-1), blocks.codes), name
        assert torch.equal(state[f"{name}_absmax"], blocks.absmax), name
