"""Models of many structures train as in DDP to the bit on two ranks, at every stage."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.distributed.models import VOCABULARY
from tests.distributed.training import (
    same_as_replicated,
    square_loss,
    start,
    tokens,
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


STRUCTURES = {
    "nested lists": Nested,
    "lists and dicts of parameters": Collections,
}


def is_linear(module):
    return isinstance(module, nn.Linear)


@on_ranks(2)
def test_odd_structures_train_as_in_ddp_to_the_bit():
    found = []
    for name, make in STRUCTURES.items():
        for config in ({}, {"units": is_linear}) if name == "nested lists" else ({},):
            torch.manual_seed(0)
            lines = same_as_replicated(make(), num_steps=2, loss=square_loss, **config)
            found += [f"{name}, {config}: {line}" for line in lines]
    return found
