"""8-bit optimizers over slices: codes, scales and parameters of the single-process reference, to the bit.

The model is linear in its parameters, so their gradients are known. Each rank has other ones, of few bits, so
that their average is exact at 1 to 4 ranks, also times 1/3 in float32.
"""

import torch

import zeroshard
from benchmarks.model import GPT, Shape

# ---------------------------------------------------------------------------------------- memory at rest


def at_rest(sizes):
    """Two bytes an element and two float32 for each 256 of them; two float32 an element under 4096."""
    return sum(2 * n + 8 * -(-n // 256) if n >= 4096 else 8 * n for n in sizes)


def test_states_take_at_most_2_05_bytes_a_parameter_of_the_model_of_the_published_numbers():
    with torch.device("meta"):
        model = GPT(Shape())
    sizes = [p.numel() for p in model.parameters()]
    foretold = zeroshard.estimate(model, 1, optimizer_bits=8)
    assert foretold.optimizer == at_rest(sizes) <= 2.05 * sum(sizes)
