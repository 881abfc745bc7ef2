"""The profile of a model's blocks: operations, bytes, and a model that stays as it was."""

import random

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from tests.parallel.pipeline.runs import llama
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.profile import (
    SampleBatch,
    SampleSource,
    count_blocks,
    sample_of,
    weigh_blocks,
)


def counted(model, sample):
    return count_blocks(Chunked(model), sample)


def rows(*shape):
    return SampleBatch((torch.randn(*shape, generator=torch.Generator().manual_seed(0)),), {})


# ------------------------------------------------------------------------------------------- operations


def test_the_operations_of_a_block_are_those_of_its_forward_and_backward():
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 16), nn.Linear(16, 2).requires_grad_(False)
    )
    # The input of the first one needs no gradient, nor do the weights of the last one.
    want = [2 * 3 * products for products in (2 * 4 * 8, 0, 3 * 8 * 16, 2 * 16 * 2)]
    assert [block.time for block in counted(model, rows(3, 4))] == want


def test_the_operations_of_a_model_of_transformers_are_those_of_its_products():
    model, num_rows, length = llama(num_key_value_heads=4), 2, 40
    sample = sample_of(model, SampleSource(TensorDataset(torch.zeros(9, length, dtype=torch.long))), num_rows)
    blocks = counted(model, sample._replace(inputs=(), named={"input_ids": sample.inputs[0]}))
    tokens = num_rows * length
    block = 3 * 2 * tokens * (4 * 32 * 32 + 3 * 32 * 48) + 3 * 2 * 2 * num_rows * length**2 * 32
    assert [one.time for one in blocks] == [block, block, block, block + 3 * 2 * tokens * 32 * 40]


def test_a_model_without_products_is_an_error():
    with pytest.raises(RuntimeError, match="expected matrix products, convolutions or attention, got none"):
        counted(nn.Sequential(nn.LayerNorm(4), nn.Tanh()), rows(2, 4))


# ------------------------------------------------------------------------------------------- bytes


def test_parameter_bytes_are_those_of_the_block_and_of_modules_around_the_blocks():
    model = llama()
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    table, norm = 40 * 32, 32
    want = [layer + table, layer, layer, layer + norm + table]
    found = weigh_blocks(Chunked(model))
    assert [block.parameter_bytes for block in found] == [4 * number for number in want]
    assert [block.time for block in found] == want
    blocks = counted(model, sample_of(model, SampleSource(), 1))
    assert [block.parameter_bytes for block in blocks] == [4 * number for number in want]


# ------------------------------------------------------------------------------------------- the model stays


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


class Noisy(Dataset):
    """Samples that are drawn from three generators."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.randn(6) * random.random() * np.random.rand(), torch.tensor(1.0)


def test_a_model_and_the_random_generators_stay_as_they_were():
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(6, 1)
    )
    model[0].weight.grad = torch.ones(6, 6)
    model[4].bias.requires_grad_(False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    generators = random_states()
    attributes = [set(vars(module)) for module in model.modules()]
    sample = sample_of(model, SampleSource(Noisy()), 4)
    counted(model, sample)
    assert random_states() == generators
    assert [set(vars(module)) for module in model.modules()] == attributes
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


# ------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize(
    ("data", "collate_fn", "shapes"),
    [
        (TensorDataset(torch.zeros(9, 5), torch.zeros(9)), None, ([(4, 5)], {})),
        (TensorDataset(torch.zeros(9, 5)), None, ([(4, 5)], {})),
        (TensorDataset(torch.zeros(3, 5)), None, ([(4, 5)], {})),
        ([torch.zeros(5)] * 9, None, ([(4, 5)], {})),
        ([{"x": torch.zeros(5)}] * 9, None, ([], {"x": (4, 5)})),
        ([({"x": torch.zeros(5)}, 1)] * 9, None, ([], {"x": (4, 5)})),
        ([1] * 9, lambda samples: torch.zeros(len(samples), 7), ([(4, 7)], {})),
    ],
)
def test_a_sample_is_a_micro_batch_of_the_data(data, collate_fn, shapes):
    sample = sample_of(nn.Sequential(nn.Linear(5, 5)), SampleSource(data, collate_fn), 4)
    inputs, named = shapes
    assert [value.shape for value in sample.inputs] == inputs
    assert {name: value.shape for name, value in sample.named.items()} == named


@pytest.mark.parametrize(("positions", "length"), [(16, 16), (4096, 128)])
def test_a_model_of_transformers_without_data_gets_random_tokens(positions, length):
    sample = sample_of(llama(max_position_embeddings=positions), SampleSource(), 3)
    assert {name: value.shape for name, value in sample.named.items()} == {"input_ids": (3, length)}
    assert 0 <= sample.named["input_ids"].min() <= sample.named["input_ids"].max() < 40
