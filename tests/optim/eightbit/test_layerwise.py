"""LAMB and LARS with 8-bit states against their formulas over the reference's quantized states."""

import zlib

import pytest
import torch
from torch import nn

from tests.optim.eightbit.reference import Reference
from zeroshard.optim import LAMB8bit, LARS8bit

KINDS = {"LAMB8bit": LAMB8bit, "LARS8bit": LARS8bit}
OPTIONS = {
    "LAMB8bit": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "LARS8bit": {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.03, "trust_coefficient": 0.1},
}
NUM_STEPS = 4
BIASES = {"weight_decay": 0.0, "trust_ratio": False}


class Layer(nn.Module):
    """Its gradients are known: it is linear in its parameters."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.randn(70, 80))
        self.odd = nn.Parameter(torch.randn(4099))
        self.bias = nn.Parameter(torch.randn(4200))

    def forward(self, step):
        return sum(
            (p * gradient(f"{self.name}{key}", step, p.shape)).sum() for key, p in self._parameters.items()
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(f"layers.{at}.") for at in range(3))

    def forward(self, step):
        return sum(layer(step) for layer in self.layers)


def gradient(name, step, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randint(-99, 99, shape, generator=generator) / 64


def build():
    torch.manual_seed(0)
    return Net()


def grouped(kind, model):
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return KINDS[kind]([{"params": others}, {"params": biases, **BIASES}], **OPTIONS[kind])


def average(g, num_ranks):
    """Of the same on all ranks: each is multiplied by 1 / N, and they are added in the order of ranks."""
    total = torch.zeros_like(g)
    for _ in range(num_ranks):
        total = total + g * (1 / num_ranks)
    return total


def references(kind, num_ranks=1):
    found = {}
    for name, p in build().named_parameters():
        reference = found[name] = Reference(kind, p.detach().flatten())
        options = {**OPTIONS[kind], **(BIASES if name.endswith("bias") else {})}
        for step in range(NUM_STEPS):
            reference.step(average(gradient(name, step, p.shape), num_ranks), **options)
    return found


def check(name, reference, parameter, states):
    """Codes and scales to the bit; parameters within 1e-6: trust ratios are sums in another order."""
    want = reference.p.double()
    assert (parameter.flatten().double() - want).norm() <= 1e-6 * want.norm(), name
    for key, blocks in reference.states.items():
        assert torch.equal(states[key].flatten(), blocks.codes), (name, key)
        assert torch.equal(states[f"{key}_absmax"], blocks.absmax), (name, key)


@pytest.mark.long_where(kind=["LARS8bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_follows_the_formula(kind):
    model = build()
    optimizer = grouped(kind, model)
    for step in range(NUM_STEPS):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, reference in references(kind).items():
        parameter = model.get_parameter(name)
        check(name, reference, parameter.detach(), optimizer.state[parameter])


@pytest.mark.parametrize("kind", KINDS)
def test_small_parameters_have_float32_states_and_the_threshold_can_be_set_for_a_group(kind):
    small, large, chosen = (nn.Parameter(torch.ones(n)) for n in (4095, 4096, 5000))
    groups = [{"params": [small, large]}, {"params": [chosen], "min_8bit_size": 10_000}]
    optimizer = KINDS[kind](groups, lr=0.1)
    for p in (small, large, chosen):
        p.grad = torch.ones_like(p)
    optimizer.step()
    name = next(iter(optimizer.rule.states))
    dtypes = [optimizer.state[p][name].dtype for p in (small, large, chosen)]
    assert dtypes == [torch.float32, torch.uint8, torch.float32]
