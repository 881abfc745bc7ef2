"""Steps of bfloat16 parameters against steps in float32 that are rounded afterwards, to the bit."""

import pytest
import torch

from tests.optim.eightbit.cases import SETTINGS, begin
from zeroshard.optim.eightbit import step as steps
from zeroshard.optim.eightbit.rules import ADAM
from zeroshard.stepping import rounding
from zeroshard.stepping.rounding import Bits, Rounding

CASES = (
    (4096, 0, False, 0.0),
    (5003, 256, False, 0.1),
    (70_001, 1023, False, 0.1),
    (255, 1, False, 0.1),
    (0, 0, False, 0.0),
    (300, 2, True, 0.1),
    (70_001, 5, True, 0.0),
)
"""(elements, place in the whole parameter, True for float32 states, weight decay)."""
RULES = {rule.optimizers[0]: rule for rule in SETTINGS}


def gradients(size):
    """Of all magnitudes; then with a nan and an infinity in blocks of their own, where there are so many."""
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        g = torch.randn(size, generator=generator) * torch.rand(size, generator=generator).mul(-9).exp()
        if step >= 2:
            g[300::1000], g[600::7000], g[601::7000] = float("nan"), float("inf"), -float("inf")
        yield g.bfloat16()


def step_wide(rule, p, g, states, numbers, bits):
    """Step in float32 by torch operations, then round by torch operations."""
    wide = p.float()
    steps.step_in_chunks(rule, wide, g.float(), states, numbers)
    rounding.round_in_chunks(p, wide, *bits)


def words_of(p):
    """The bits of bfloat16; every nan alike, since its payload depends on the processor."""
    return p.view(torch.int16).where(~p.isnan(), 0x7FFF)


def check_equal(p, q, states, others):
    assert torch.equal(words_of(p), words_of(q))
    for state, other in zip(states, others, strict=True):
        for values, wanted in zip(state[:2], other[:2], strict=True):
            if isinstance(values, torch.Tensor):
                torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.long_where(kernel=["torch"])
@pytest.mark.long_where(name=[name for name in RULES if name != "Adam"])
@pytest.mark.parametrize("name", RULES)
def test_parameters_and_states_have_the_bits_of_a_step_in_float32_rounded_afterwards(name, kernel):
    rule = RULES[name]
    for size, start, is_exact, weight_decay in CASES:
        settings = {**SETTINGS[rule], "lr": 1e-2, "weight_decay": weight_decay}
        p, states = begin(rule, size, torch.bfloat16, is_exact=is_exact)
        q, others = begin(rule, size, torch.bfloat16, is_exact=is_exact)
        first = p.clone()
        for step, g in enumerate(gradients(size), 1):
            numbers, bits = rule.numbers(settings, step), Bits(Rounding(7, step).key(name), start)
            before, version = g.clone(), p._version
            steps.take_step(rule, p, g, states, numbers, bits)
            step_wide(rule, q, g, others, numbers, bits)
            check_equal(p, q, states, others)
            assert p._version > version or not size, "replicated parameters follow changes by it"
            assert torch.equal(words_of(g), words_of(before)), "a gradient is not changed"
        assert not size or (p != first).sum() > size / 2
        assert size < 5000 or 0 < p.isnan().sum() < size


def test_a_gradient_of_float32_is_not_rounded(kernel):
    p, states = begin(ADAM, 5003, torch.bfloat16)
    q, others = begin(ADAM, 5003, torch.bfloat16)
    numbers, g = ADAM.numbers({**SETTINGS[ADAM], "lr": 1e-2}, 1), torch.randn(5003)
    steps.take_step(ADAM, p, g, states, numbers, Bits(3, 256))
    step_wide(ADAM, q, g, others, numbers, Bits(3, 256))
    check_equal(p, q, states, others)
