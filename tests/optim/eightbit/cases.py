"""The 8-bit optimizers and rules, their settings, gradients and plain steps, for the tests of this folder."""

import torch

from zeroshard.optim import Adam8bit, AdamW8bit, AdEMAMix8bit, LAMB8bit, LARS8bit, Lion8bit, SGD8bit
from zeroshard.optim.eightbit.blocks import Exact, QuantizedState, codebook
from zeroshard.optim.eightbit.step import step_in_chunks
from zeroshard.stepping.rounding import round_in_chunks

KINDS = {kind.__name__: kind for kind in (AdamW8bit, Adam8bit, Lion8bit, SGD8bit, AdEMAMix8bit)}
LAYERWISE = {kind.__name__: kind for kind in (LAMB8bit, LARS8bit)}
OPTIONS = {
    "AdamW8bit": {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "Adam8bit": {"lr": 1e-2, "betas": (0.9, 0.999)},
    "Lion8bit": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.3},
    "SGD8bit": {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.01},
    "AdEMAMix8bit": {"lr": 1e-2, "betas": (0.8, 0.95, 0.99), "alpha": 3.0, "t_alpha": 3, "t_beta3": 3},
    "LAMB8bit": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "LARS8bit": {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.03, "trust_coefficient": 0.1},
}
OF_RULES = {
    kind.rule.optimizers[0]: kind for kind in (AdamW8bit, Lion8bit, SGD8bit, AdEMAMix8bit, LAMB8bit, LARS8bit)
}
RULES = {name: kind.rule for name, kind in OF_RULES.items()}
ROUNDED = [name for name, rule in RULES.items() if not rule.gives_update]


def numbers_of(name, step, lr=1e-2, weight_decay=0.1):
    return RULES[name].numbers(
        {"eps": 1e-6, **OPTIONS[OF_RULES[name].__name__], "lr": lr, "weight_decay": weight_decay}, step
    )


def begin(rule, size, dtype, device="cpu", is_exact=False):
    """Parameter and states before the first step."""
    p = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
    books = [codebook(is_signed, p.device) for is_signed in rule.states.values()]
    if is_exact:
        return p, [Exact(torch.zeros(size, device=device)) for _ in books]
    return p, [QuantizedState.zeros(size, book) for book in books]


def gradients(shape, num_steps, seed=0, zeros=slice(256, 512)):
    """Of all magnitudes, a fifth of them zeros, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        g = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).mul(-6).exp()
        g *= torch.rand(shape, generator=generator) > 0.2
        g.view(-1)[zeros] = 0
        yield g


def hard_gradients(size, dtype):
    """Four of them, with a block of denormals; the last two have nan, infinity and huge numbers, too.

    The last number, the largest of its block, turns: so the block has smaller states after the second step.
    """
    for step, g in enumerate(gradients((size,), 4, seed=1, zeros=slice(512, 768))):
        g[256:512] *= 1e-40
        if step >= 2:
            g[800:1024:100], g[1100:1200:50], g[1700:1710] = float("nan"), -float("inf"), 1e38
        g[-1:] = (2.0, -2.0, 1.0, float("nan"))[step]
        yield g.to(dtype)


def step_plainly(rule, p, g, states, numbers, bits=None):
    """A step by torch operations, in float32; rounded by torch operations where there are bits."""
    if bits is None:
        step_in_chunks(rule, p, g, states, numbers)
        return
    wide = p.float()
    step_in_chunks(rule, wide, g.float(), states, numbers)
    round_in_chunks(p, wide, *bits)


def words(values):
    """The bits of values; every nan alike, since its payload depends on the processor."""
    if values.is_floating_point():
        kind = torch.int16 if values.dtype is torch.bfloat16 else torch.int32
        return values.view(kind).where(~values.isnan(), -1)
    return values


def differences(p, g, states, wanted_p, wanted_g, wanted_states):
    """What differs after a step, with numbers of elements."""
    pairs = [("parameter", p, wanted_p), ("gradient", g, wanted_g)]
    for at, (state, other) in enumerate(zip(states, wanted_states, strict=True)):
        tensors = [(a, b) for a, b in zip(state, other, strict=True) if isinstance(a, torch.Tensor)]
        pairs += [(f"state {at}", *pair) for pair in tensors]
    found = {what: int((words(one.cpu()) != words(other)).sum()) for what, one, other in pairs}
    return [f"{num} of the {what}" for what, num in found.items() if num]


def check_states(state, reference):
    for name, blocks in reference.states.items():
        assert torch.equal(state[name].view(-1), blocks.codes), name
        assert torch.equal(state[f"{name}_absmax"], blocks.absmax), name
