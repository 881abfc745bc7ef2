"""LAMB and LARS with 8-bit states against their formulas over the reference's quantized states."""

import pytest
import torch
from torch import nn

from tests.optim.eightbit.cases import check_states
from tests.optim.eightbit.reference import Reference
from tests.optim.known import gradient
from zeroshard.optim import LAMB8bit, LARS8bit

KINDS = {"LAMB8bit": LAMB8bit, "LARS8bit": LARS8bit}
OPTIONS = {
    "LAMB8bit": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "LARS8bit": {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.03, "trust_coefficient": 0.1},
}
BIASES = {"weight_decay": 0.0, "trust_ratio": False}
SHAPES = {"weight": (70, 80), "odd": (4099,), "bias": (4200,)}


@pytest.mark.long_where(kernel=["numba"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_follows_the_formula(kind, kernel):
    """Codes and scales to the bit; parameters within 1e-6: trust ratios are sums in another order."""
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    references = {name: Reference(kind, p.detach().flatten()) for name, p in parameters.items()}
    *others, bias = parameters.values()
    optimizer = KINDS[kind]([{"params": others}, {"params": [bias], **BIASES}], **OPTIONS[kind])
    for step in range(4):
        for name, p in parameters.items():
            p.grad = gradient(name, step, p.shape)
            references[name].step(p.grad, **OPTIONS[kind] | (BIASES if name == "bias" else {}))
        optimizer.step()
    for name, p in parameters.items():
        want = references[name].p.double()
        assert (p.detach().flatten().double() - want).norm() <= 1e-6 * want.norm(), name
        check_states(optimizer.state[p], references[name])


@pytest.mark.parametrize("kind", KINDS)
def test_small_parameters_have_float32_states_and_the_threshold_can_be_set_for_a_group(kind):
    small, chosen = (nn.Parameter(torch.ones(n)) for n in (4095, 5000))
    optimizer = KINDS[kind]([{"params": [small]}, {"params": [chosen], "min_8bit_size": 10_000}], lr=0.1)
    for p in (small, chosen):
        p.grad = torch.ones_like(p)
    optimizer.step()
    name = next(iter(optimizer.rule.states))
    assert {optimizer.state[p][name].dtype for p in (small, chosen)} == {torch.float32}
