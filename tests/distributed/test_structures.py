"""Models of many structures train as in DDP to the bit on two ranks, at every stage."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.distributed.models import VOCABULARY
from tests.distributed.training import (
    OPTIMIZERS,
    STAGES,
    differences,
    numbers,
    same_as_replicated,
    square_loss,
    start,
    tokens,
    train,
    unequal,
)
from tests.ranks import on_ranks

WIDTH = 12


# -------------------------------------------------------------------------------------- of transformers


def t5():
    """One weight is the embedding of the encoder, that of the decoder, and the head."""
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=24,
            d_kv=8,
            d_ff=37,
            num_layers=3,
            num_heads=3,
            relative_attention_num_buckets=8,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            tie_word_embeddings=True,
        )
    )
    embeddings = model.encoder.embed_tokens.weight, model.decoder.embed_tokens.weight, model.lm_head.weight
    assert all(weight is model.shared.weight for weight in embeddings)
    return model.train()


def t5_loss(model, number):
    batch = tokens(number)
    return model(input_ids=batch[:, :9], labels=batch[:, 9:].contiguous()).loss


@on_ranks(2, timeout=120)
def test_encoder_decoders_train_as_in_ddp_to_the_bit():
    torch.manual_seed(0)
    model = t5()
    found = same_as_replicated(model, num_steps=3, loss=t5_loss)
    tied = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    names = start(model)[0].full_state_dict().keys()
    assert tied <= names or dist.get_rank()
    return found


# ------------------------------------------------------------------------------------------- odd structures


class Nested(nn.Module):
    """Lists of lists of blocks; parameters of the root itself, one without dims; names with tricks."""

    def __init__(self):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(WIDTH, 7)), nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_parameter("absent", None)
        self.stages = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(2)
            )
            for _ in range(2)
        )
        self.by_name = nn.ModuleDict({"a-b": nn.Linear(WIDTH, WIDTH), "weight": nn.LayerNorm(WIDTH)})

    def forward(self, x):
        x = F.linear(x, self.weight) * self.gain
        for stage in self.stages:
            for block in stage:
                x = x + block(x)
        return self.by_name["weight"](self.by_name["a-b"](x)) + self.nothing.sum()


class Collections(nn.Module):
    """Parameters in lists and dicts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ListAndDict() for _ in range(2))
        self.scales = nn.ParameterList([torch.randn(7), torch.randn(7)])

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        for block in self.blocks:
            x = x + block(x)
        return x


class ListAndDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(7, 5), torch.randn(5, 7)])
        self.named = nn.ParameterDict({"scale": torch.randn(7), "popped": torch.randn(7)})
        self.inner = nn.Identity()

    def forward(self, x):
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return self.inner(x * self.named["scale"] + self.named["popped"])


class Shared(nn.Module):
    """One module in two blocks, one block in two places, and one layer under two names in a block."""

    def __init__(self):
        super().__init__()
        common = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh(), common) for _ in range(3))
        self.blocks.append(self.blocks[0])
        self.again = self.blocks[1]
        self.last = nn.Linear(7, 7)
        self.blocks[2].append(self.last)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.again(x))


class Recurrent(nn.Module):
    """torch's recurrent layers and its attention."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(RecurrentBlock() for _ in range(2))

    def forward(self, x):
        x = x[None]
        for block in self.blocks:
            x = x + block(x)
        return x


class RecurrentBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(7, 8, num_layers=2, proj_size=5, bidirectional=True)
        self.gru, self.attention = nn.GRU(10, 8), nn.MultiheadAttention(8, 2, kdim=10, vdim=10)
        self.last = nn.Linear(8, 7)

    def forward(self, x):
        y, _ = self.lstm(x)
        query, _ = self.gru(y)
        return self.last(self.attention(query, y, y)[0])


STRUCTURES = {
    "nested lists": Nested,
    "lists and dicts of parameters": Collections,
    "shared modules": Shared,
    "recurrent": Recurrent,
}


def is_linear(module):
    return isinstance(module, nn.Linear)


@on_ranks(2)
def test_odd_structures_train_as_in_ddp_to_the_bit():
    found = []
    for name, make in STRUCTURES.items():
        for config in ({}, {"units": is_linear}) if name in ("nested lists", "shared modules") else ({},):
            torch.manual_seed(0)
            lines = same_as_replicated(make(), num_steps=2, loss=square_loss, **config)
            found += [f"{name}, {config}: {line}" for line in lines]
    return found


# ------------------------------------------------------------------------------------------------ buffers


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


class Buffered(nn.Module):
    """Buffers of all kinds; a counter that forward sets and a mean that it changes in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(BufferedBlock() for _ in range(2))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.empty(0, 3))
        self.blocks[1].mean = self.blocks[0].mean  # changed by both

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class BufferedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("rotary", torch.polar(torch.ones(4), torch.rand(4)), persistent=False)
        self.register_buffer("mask", torch.rand(8) < 0.7)
        self.register_buffer("table", torch.randn(8).bfloat16().expand(2, 8).t(), persistent=False)
        self.register_buffer("wide", torch.randn((), dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8, 2)[:, 0])

    def forward(self, x):
        self.steps = self.steps + 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        rotated = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.rotary)
        y = self.linear(rotated.flatten(-2)) * self.mask + self.table[:, 0].float()
        return y * self.wide.float() - self.mean / self.steps


@on_ranks(2)
def test_buffers_of_every_dtype_persistent_or_not_are_as_in_ddp():
    def loss(model, number):
        return model(numbers(number, 5, 8)).square().mean()

    torch.manual_seed(0)
    model, found = Buffered(), []
    replica = DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
    want = train(replica, OPTIMIZERS["AdamW"](replica.parameters()), 3, loss)
    for stage in STAGES:
        engine, optimizer = start(copy.deepcopy(model), stage=stage)
        got = train(engine, optimizer, 3, loss)
        found += differences(f"stage {stage}", got, want)
        found += unequal(f"stage {stage}", buffers_of(engine), buffers_of(replica.module))
        same = {name: b.dtype for name, b in engine.named_buffers()}
        assert same == {name: b.dtype for name, b in model.named_buffers()}
    return found


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.uint8])
@on_ranks(2)
def test_complex_and_integer_parameters_are_refused_by_name_with_what_to_do(dtype):
    model = nn.Sequential(nn.Linear(3, 3), nn.Module())
    model[1].codes = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match="parameter") as caught:
        zeroshard.initialize(model)
    message = str(caught.value)
    assert f"'1.codes' has dtype {dtype}" in message
    assert "register_buffer" in message
