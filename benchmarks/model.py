"""The model that every benchmark trains: a GPT in plain PyTorch, 33.7 M parameters by default."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a GPT; the defaults make the 33.7 M parameter model of the published numbers."""

    dim: int = 512
    """Width of the residual stream."""
    depth: int = 8
    """Number of blocks."""
    heads: int = 8
    """Attention heads per block."""
    vocabulary: int = 8192
    """Number of token ids."""
    sequence: int = 128
    """Tokens per sample that are trained on."""


class Block(nn.Module):
    """Pre-norm causal self-attention and a GELU MLP of four times the width."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.proj = nn.Linear(shape.dim, shape.dim)
        self.norm2 = nn.LayerNorm(shape.dim)
        self.up = nn.Linear(shape.dim, 4 * shape.dim)
        self.down = nn.Linear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, dim) -> (batch, sequence, dim)."""
        batch, sequence, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, sequence, dim))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return hidden


class GPT(nn.Module):
    """Token and position embeddings, `depth` blocks, a norm and an untied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.dim)
        self.positions = nn.Embedding(shape.sequence, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) token ids -> (batch, sequence, vocabulary) logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(shape: Shape, device: torch.device) -> GPT:
    """Return the model with the same weights on every call and on every rank."""
    torch.manual_seed(0)
    model = GPT(shape)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model.to(device)


def build_llama(width: int, layers: int, *, head: int, vocabulary: int, length: int, **others: Any) -> Any:
    """Return a Llama of transformers, with the same weights on every call and on every rank.

    Args:
        width: of the hidden states.
        layers: decoder layers.
        head: the width of a head.
        vocabulary: the number of token ids.
        length: tokens of a sequence.
        others: further fields of `LlamaConfig`, such as `intermediate_size`, which is 8/3 of the width.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // head,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
        **{"intermediate_size": 8 * width // 3} | others,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def build_tokens(shape: Shape, batch: int, rank: int, device: torch.device) -> Tensor:
    """Return a rank's own (batch, sequence + 1) token ids: inputs and, shifted by one, targets."""
    generator = torch.Generator().manual_seed(1 + rank)
    tokens = torch.randint(shape.vocabulary, (batch, shape.sequence + 1), generator=generator)
    return tokens.to(device)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 of (batch, sequence, vocabulary) logits."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each size of the model."""
    group = parser.add_argument_group("model")
    for size in fields(Shape):
        group.add_argument(f"--{size.name}", type=int, default=size.default)


def shape_from(args: argparse.Namespace) -> Shape:
    """The model sizes that `add_shape_arguments` parsed."""
    return Shape(**{size.name: getattr(args, size.name) for size in fields(Shape)})
