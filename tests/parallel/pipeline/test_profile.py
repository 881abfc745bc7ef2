"""The profile of a model's blocks: times, bytes, and a model that stays as it was."""

import random
import time
import weakref

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import zeroshard
from zeroshard.parallel.pipeline import profile
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.profile import (
    SampleBatch,
    SampleSource,
    likeness_of,
    measure_blocks,
    sample_of,
    weigh_blocks,
)

CPU = torch.device("cpu")
SLEEP = 0.05


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other on busy cores would make times of small blocks random."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    """A layer whose forward, and whose backward, each take some seconds."""

    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds, self.num_calls = nn.Linear(4, 4), seconds, [0]

    def forward(self, x):
        self.num_calls[0] += 1
        return Pause.apply(self.linear(x), self.seconds)


def measured(model, sample, loss_fn=None, dtype=None):
    return measure_blocks(Chunked(model), sample, loss_fn, device=CPU, dtype=dtype)


def rows(*shape):
    return SampleBatch((torch.randn(*shape, generator=torch.Generator().manual_seed(0)),), {}, None)


def llama(**sizes):
    torch.manual_seed(0)
    usual = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 40}
    config = transformers.LlamaConfig(**{"num_hidden_layers": 4, "num_key_value_heads": 2} | usual | sizes)
    return transformers.LlamaForCausalLM(config)


# ------------------------------------------------------------------------------------------- times


def test_the_time_of_a_block_is_that_of_its_forward_and_backward():
    blocks = measured(nn.Sequential(Slow(0.0), Slow(SLEEP), Slow(0.0)), rows(2, 4))
    assert blocks[1].time >= 2 * SLEEP
    assert max(blocks[0].time, blocks[2].time) < SLEEP


def test_blocks_that_are_alike_are_measured_once():
    model = nn.Sequential(Slow(0.0), Slow(0.001), Slow(0.001), Slow(0.0), Slow(0.001), Slow(0.0))
    blocks = measured(model, rows(2, 4))
    # The input of the first one needs no gradient, which takes less time.
    assert [block.num_calls[0] > 0 for block in model] == [True, True, False, True, False, False]
    assert blocks[1].time == blocks[2].time == blocks[4].time


def test_blocks_of_a_model_of_transformers_are_measured_once():
    calls = []
    model = llama()
    for block in model.model.layers:
        block.mlp.register_forward_hook(lambda module, args, output: calls.append(module))
    blocks = measured(model, sample_of(model, SampleSource(), 2))
    assert set(calls) == {model.model.layers[0].mlp}
    assert blocks[1] == blocks[2]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_of_a_model_of_transformers_are_measured(use_reentrant):
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    checkpointed = measured(model, sample_of(model, SampleSource(), 2))
    model.gradient_checkpointing_disable()
    blocks = measured(model, sample_of(model, SampleSource(), 2))
    assert min(block.time for block in checkpointed) > 0
    assert [one.parameter_bytes for one in checkpointed] == [one.parameter_bytes for one in blocks]


class Checkpointed(nn.Linear):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_a_deferred_block_with_a_checkpoint_inside_is_measured():
    with zeroshard.deferred_init():
        model = nn.Sequential(nn.Linear(4, 4), Checkpointed(4, 4), nn.Linear(4, 4))
    assert min(block.time for block in measured(model, rows(2, 4))) > 0


def test_a_head_over_a_large_vocabulary_counts_in_the_last_block():
    model = llama(vocab_size=20_000)
    blocks = measured(model, sample_of(model, SampleSource(), 1))
    assert blocks[3].time > 2 * blocks[1].time


def test_the_loss_counts_in_the_last_block():
    def loss_fn(output, targets):
        return Pause.apply(output, SLEEP).sum() + targets.sum()

    sample = rows(2, 4)._replace(targets=torch.zeros(2))
    blocks = measured(nn.Sequential(Slow(0.0), Slow(0.0), Slow(0.0)), sample, loss_fn)
    assert blocks[2].time >= 2 * SLEEP
    assert max(blocks[0].time, blocks[1].time) < SLEEP


def test_modules_before_the_blocks_count_in_the_first_block():
    model = llama()
    embed = model.model.embed_tokens.forward

    def slow(tokens):
        time.sleep(SLEEP)
        return embed(tokens)

    model.model.embed_tokens.forward = slow
    blocks = measured(model, sample_of(model, SampleSource(), 1))
    assert blocks[0].time - blocks[1].time > SLEEP / 2
    assert model.model.embed_tokens.forward is slow


# ------------------------------------------------------------------------------------------- bytes


def test_parameter_bytes_are_those_of_the_block_and_of_modules_around_the_blocks():
    model = llama()
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    table, norm = 40 * 32, 32
    want = [layer + table, layer, layer, layer + norm + table]
    found = weigh_blocks(Chunked(model))
    assert [block.parameter_bytes for block in found] == [4 * number for number in want]
    assert [block.time for block in found] == want
    blocks = measured(model, sample_of(model, SampleSource(), 1))
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
    factor = nn.Parameter(torch.ones(()))
    measured(model, sample, lambda output, targets: (output[:, 0] - factor * targets).square().mean())
    assert factor.grad is None
    assert random_states() == generators
    assert [set(vars(module)) for module in model.modules()] == attributes
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


def test_a_model_stays_as_it_was_after_an_error():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(5, 5))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measured(model, rows(2, 6))
    assert not [module for module in model if "forward" in vars(module)]


def test_a_deferred_model_is_measured_and_stays_deferred():
    with zeroshard.deferred_init():
        model = llama()
    blocks = measured(model, sample_of(model, SampleSource(), 1))
    assert min(block.time for block in blocks) > 0
    assert all(parameter.is_meta for parameter in model.parameters())


def test_only_one_block_at_a_time_is_on_the_device(monkeypatch):
    alive, most = [], []
    place = profile.Profiler._place

    def placing(profiler, module):
        most.append(sum(reference() is not None for reference in alive))
        placed = place(profiler, module)
        alive.extend(weakref.ref(value) for value in placed.values())
        return placed

    monkeypatch.setattr(profile.Profiler, "_place", placing)
    with zeroshard.deferred_init():
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 7))
    measured(model, rows(2, 4))
    assert most == [0, 0, 0, 0]
    assert len(alive) == 2 + 2 + 5 + 2


def test_a_forward_that_leaves_out_a_block_is_an_error():
    model = llama()
    model.config.num_hidden_layers = 1
    with pytest.raises(RuntimeError, match=r"expected the model's forward to call 'model\.layers\.1'"):
        measured(model, sample_of(model, SampleSource(), 2))


# ------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize(
    ("data", "collate_fn", "shapes"),
    [
        (TensorDataset(torch.zeros(9, 5), torch.zeros(9)), None, ([(4, 5)], {}, (4,))),
        (TensorDataset(torch.zeros(9, 5)), None, ([(4, 5)], {}, None)),
        (TensorDataset(torch.zeros(3, 5)), None, ([(4, 5)], {}, None)),
        ([torch.zeros(5)] * 9, None, ([(4, 5)], {}, None)),
        ([{"x": torch.zeros(5)}] * 9, None, ([], {"x": (4, 5)}, None)),
        ([({"x": torch.zeros(5)}, 1)] * 9, None, ([], {"x": (4, 5)}, (4,))),
        ([1] * 9, lambda samples: torch.zeros(len(samples), 7), ([(4, 7)], {}, None)),
    ],
)
def test_a_sample_is_a_micro_batch_of_the_data(data, collate_fn, shapes):
    sample = sample_of(nn.Sequential(nn.Linear(5, 5)), SampleSource(data, collate_fn), 4)
    inputs, named, targets = shapes
    assert [value.shape for value in sample.inputs] == inputs
    assert {name: value.shape for name, value in sample.named.items()} == named
    assert (sample.targets is None) == (targets is None)
    assert targets is None or sample.targets.shape == targets


@pytest.mark.parametrize(("positions", "length"), [(16, 16), (4096, 128)])
def test_a_model_of_transformers_without_data_gets_random_tokens(positions, length):
    sample = sample_of(llama(max_position_embeddings=positions), SampleSource(), 3)
    assert {name: value.shape for name, value in sample.named.items()} == {
        "input_ids": (3, length),
        "labels": (3, length),
    }
    assert 0 <= sample.named["input_ids"].min() <= sample.named["input_ids"].max() < 40


def test_a_sequence_without_data_has_no_sample():
    assert sample_of(nn.Sequential(nn.Linear(5, 5)), SampleSource(), 4) is None


# ------------------------------------------------------------------------------------------- likeness


def with_function(function):
    module = nn.Identity()
    module.function = function
    return module


def frozen(module):
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        (nn.Linear(3, 4), nn.Linear(3, 4), True),
        (nn.Linear(3, 4), nn.Linear(3, 4, bias=False), False),
        (nn.Linear(3, 4), nn.Linear(3, 4).double(), False),
        (nn.Linear(3, 4), frozen(nn.Linear(3, 4)), False),
        (nn.Conv1d(2, 2, 3, stride=1), nn.Conv1d(2, 2, 3, stride=2), False),
        (nn.Dropout(0.1), nn.Dropout(0.1).eval(), False),
        (nn.Sequential(nn.Tanh()), nn.Sequential(nn.ReLU()), False),
        (with_function(torch.tanh), with_function(torch.tanh), True),
        (with_function(lambda x: x), with_function(lambda x: x), False),
        (llama().model.layers[0], llama().model.layers[3], False),  # their configs are two objects
    ],
)
def test_modules_are_alike_if_classes_shapes_and_settings_are_equal(one, other, are_alike):
    assert (likeness_of(one) == likeness_of(other)) is are_alike
