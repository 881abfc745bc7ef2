"""Small models with shapes that nobody rounds to anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 509
WIDTH = 84


class Block(nn.Module):
    """Attention and a feed-forward layer, with biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_split_heads(part, self.heads) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(_join_heads(mixed))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Learned positions, a one-element parameter, head perhaps tied to the embedding; tokens -> logits."""

    def __init__(self, *, tied: bool, num_blocks: int = 3, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.gain)


class LlamaBlock(nn.Module):
    """Rotary, grouped-query attention and SwiGLU, without biases."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, size = heads, kv_heads, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * size, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, *, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor]:
        y = self.norm_1(x)
        q = _rotate(_split_heads(self.q_proj(y), self.heads), *rotary)
        k = _rotate(_split_heads(self.k_proj(y), self.kv_heads), *rotary)
        v = _split_heads(self.v_proj(y), self.kv_heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(_join_heads(mixed))
        y = self.norm_2(x)
        return (x + self.down(F.silu(self.gate(y)) * self.up(y)),)


class Llama(nn.Module):
    """Blocks take keywords and return tuples, the model returns a dict; rotary tables are buffers."""

    def __init__(self, *, tied: bool, num_blocks: int = 2, width: int = WIDTH, heads: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, 2, 217) for _ in range(num_blocks))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(64.0), 10_000 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x, length = self.embed(tokens), tokens.shape[1]
        rotary = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.layers:
            (x,) = layer(x, rotary=rotary)
        return {"logits": self.lm_head(self.norm(x))}


LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "use_cache": False,
}
"""The sizes of a small one of transformers."""


def small_llama(**options: Any) -> nn.Module:
    """One of transformers with these sizes, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA | options))


class Tiny(nn.Module):
    """`num_blocks` blocks of a few hundred elements; [n, 7] -> [n, 3]."""

    def __init__(self, num_blocks: int = 1) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 10)) for _ in range(num_blocks)
        )
        self.outer = nn.Linear(10, 3)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outer(x) * self.gain


def tiny(num_blocks: int = 2) -> Tiny:
    """The same on every rank."""
    torch.manual_seed(0)
    return Tiny(num_blocks)


class Layered(nn.Module):
    """A frozen layer, `num_blocks` blocks, a table whose rows are added, an idle layer; [n, 7] -> [n, 7].

    The same on every rank; not each element count fills a block of a buffer.
    """

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 90), nn.Tanh(), nn.Linear(90, 7)) for _ in range(num_blocks)
        )
        self.table = nn.Parameter(torch.linspace(-1, 1, 21).view(3, 7))
        self.frozen, self.idle = nn.Linear(7, 7).requires_grad_(False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        for block in self.blocks:
            x = block(x)
        return x + self.table.sum(0)


class Ordered(nn.Module):
    """Calls its blocks in an order that is given."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(num_blocks)])

    def forward(self, x: Tensor, order: Iterable[int]) -> Tensor:
        for number in order:
            x = torch.tanh(self.blocks[number](x)) + x
        return x


class Told(nn.Module):
    """Linear in its parameters, so their gradients are those that `gradient(name, step, shape)` gives."""

    def __init__(self, prefix: str, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.prefix = prefix
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, step: int, gradient: Callable[[str, int, torch.Size], Tensor | None]) -> Tensor:
        total = torch.zeros(())
        for name, p in self._parameters.items():
            if (given := gradient(f"{self.prefix}{name}", step, p.shape)) is not None:
                total = total + (p * given.to(p.dtype)).sum()
        return total


class Recomputed(nn.Module):
    """An activation checkpoint around a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Residual(nn.Module):
    """A block of `Stemmed`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Stemmed(nn.Module):
    """Blocks between a stem, and a norm and a head; the same on every rank; [n, 7] -> [n, 7]."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(7, 7), nn.ModuleList(Residual() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 7)
        if tied:
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
