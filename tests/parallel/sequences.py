"""Models whose norms work on parts of the sequence, for the tests of this folder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.distributed.training import seeded
from tests.parallel.runs import Kind

WIDTH, HEAD, VOCABULARY, LENGTH, BATCH = 16, 4, 24, 8, 4
PLAN = {
    "tokens": "rowwise",
    "places": "replicate",
    "blocks.0": "sequence_split",
    "blocks.*.norm": "sequence",
    "blocks.*.second": "sequence_parallel",
    "blocks.*.after": "sequence_parts",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.down": "rowwise",
    "blocks.*.router": "replicate",
    "norm": "sequence",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    """One with a norm after its attention, and a layer that each rank computes of whole values."""

    def __init__(self):
        super().__init__()
        self.norm, self.second, self.after = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 1)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        h = self.norm(x)
        shape = (*h.shape[:2], -1, HEAD)
        q, k, v = (layer(h).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.after(self.out(mixed.transpose(1, 2).flatten(2))))
        h = self.second(x)
        return x + self.drop(self.down(F.gelu(self.up(h)))), self.router(h).square().mean(1, keepdim=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.through(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])

    def through(self, x):
        scale = 1.0
        for block in self.blocks:
            x, routed = block(x)
            scale = scale + routed
        return self.head(self.norm(x)) * scale


class WithoutPlaces(Model):
    def forward(self, tokens):
        return self.through(self.tokens(tokens))


def model_of(cls, seed=0):
    model = seeded(cls, seed=seed).double()
    model.places.requires_grad_(cls is Model)
    return model


def tokens_of(number, own=slice(None), length=LENGTH):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (BATCH, length), generator=generator)[own]


def loss_of(model, number, own=slice(None), length=LENGTH):
    tokens = tokens_of(number, own, length)
    outputs = model(tokens)
    if not isinstance(outputs, torch.Tensor):
        return model(input_ids=tokens, labels=tokens).loss
    return F.cross_entropy(outputs.flatten(0, 1), tokens.roll(-1, 1).flatten())


def adamw(parameters):
    # Adam with a small eps divides the smallest gradients by their own size, and so it enlarges roundings.
    return torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=1e-2, eps=1e-3)


def sharded(model, config, plan):
    return zeroshard.initialize(model, adamw, config | {"clip_grad_norm": 0.5}, tp_plan=plan).engine


def kind_of(make, plan=None):
    """For `runs.plain` and `runs.divided`: a model that a seed makes, with the batches of this module."""
    return Kind(make, loss_of, plan, BATCH)
