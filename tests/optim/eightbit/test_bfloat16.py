"""Steps of bfloat16 parameters against steps in float32 that are rounded afterwards, to the bit."""

import pytest
import torch

from tests.optim.eightbit.cases import (
    ROUNDED,
    RULES,
    begin,
    differences,
    hard_gradients,
    numbers_of,
    step_plainly,
)
from zeroshard.optim.eightbit.rules import SGD
from zeroshard.optim.eightbit.step import take_step
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


@pytest.mark.long_where(kernel=["torch"])
@pytest.mark.long_where(name=[name for name in ROUNDED if name != "SGD"])  # numba compiles others for longer
@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_and_states_have_the_bits_of_a_step_in_float32_rounded_afterwards(name, kernel):
    rule = RULES[name]
    for size, start, is_exact, weight_decay in CASES:
        p, states = begin(rule, size, torch.bfloat16, is_exact=is_exact)
        q, others = begin(rule, size, torch.bfloat16, is_exact=is_exact)
        first = p.clone()
        for step, g in enumerate(hard_gradients(size, torch.bfloat16), 1):
            numbers = numbers_of(name, step, weight_decay=weight_decay)
            bits, before, version = Bits(Rounding(7, step).key(name), start), g.clone(), p._version
            take_step(rule, p, g, states, numbers, bits)
            step_plainly(rule, q, before, others, numbers, bits)
            assert not differences(p, g, states, q, before, others)
            assert p._version > version or not size, "replicated parameters follow changes by it"
        assert not size or (p != first).sum() > size / 2
        assert size < 5000 or 0 < p.isnan().sum() < size


def test_a_gradient_of_float32_is_not_rounded(kernel):
    p, states = begin(SGD, 5003, torch.bfloat16)
    q, others = begin(SGD, 5003, torch.bfloat16)
    numbers, g = numbers_of("SGD", 1), torch.randn(5003)
    take_step(SGD, p, g, states, numbers, Bits(3, 256))
    step_plainly(SGD, q, g, others, numbers, Bits(3, 256))
    assert not differences(p, g, states, q, g, others)
