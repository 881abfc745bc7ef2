"""Blocks from which random models are put together: [batch, length, width] -> the same.

Between blocks everything has one dtype; inside, a block computes in its own. Which layers a `Gate` or
`Experts` runs depends on the data, and so on the rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    """x + change(x), where `change` is in the dtype of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(x.to(self.dtype)).to(x.dtype)

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Mlp(Residual):
    def __init__(self, width: int, hidden: int, *, bias: bool, dropout: float, unused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=bias)
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Linear(width, 3) if unused else None

    def change(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Attention(Residual):
    """The mask is a buffer, which is not saved."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.register_buffer("mask", torch.ones(length, length).tril().bool(), persistent=False)

    def change(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2).flatten(2)
        )


class TorchAttention(Residual):
    """torch's own, which reads the weights of a layer inside it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def change(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Conv(Residual):
    """BatchNorm's running statistics are buffers; they stay in float32."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2)
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.gain = nn.Parameter(torch.full((width, 1), 0.5))

    def change(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.transpose(1, 2)).float()).to(x.dtype)
        return torch.tanh(y * self.gain).transpose(1, 2)


class Recurrent(Residual):
    """A GRU keeps a list of its weights besides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def change(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class Scale(Residual):
    """Parameters of its own, of odd shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.full((), 0.3)), nn.Parameter(torch.zeros(1))
        self.lanes = nn.Parameter(torch.ones(1, 1, width))
        self.spare = nn.Parameter(torch.ones(3, 1, 5))
        self.empty = nn.Parameter(torch.ones(0, 2))

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.lanes * self.gain) + self.shift


class Gate(nn.Module):
    """Leaves its inside out, returning the input or cutting off the gradient, on ranks whose data says so."""

    def __init__(self, inside: nn.Module, *, cuts: bool) -> None:
        super().__init__()
        self.inside, self.cuts = inside, cuts

    def forward(self, x: Tensor) -> Tensor:
        if says_yes(x):
            return self.inside(x)
        return x.detach() if self.cuts else x


class Experts(Residual):
    """Each batch goes to one of the experts."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(number))

    def change(self, x: Tensor) -> Tensor:
        return self.experts[_digest(x) % len(self.experts)](x)


class Nested(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = call(part, x)
        return x


class Checkpointed(nn.Module):
    """What a user does to save activations."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inside(x)
        return checkpoint(self.inside, x, use_reentrant=False)


class KeywordOnly(nn.Module):
    """A dict in, a dict out, with something else in it."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *, states: Tensor) -> dict[str, Any]:
        x = call(self.inside, states)
        return {"extra": (x.mean(), None, "text"), "states": x}


def call(block: nn.Module, x: Tensor) -> Tensor:
    """A block's output, whatever its signature."""
    return block(states=x)["states"] if isinstance(block, KeywordOnly) else block(x)


def says_yes(x: Tensor) -> bool:
    return _digest(x) % 3 > 0


def _digest(x: Tensor) -> int:
    """A number that depends on every bit, but not on the training of many steps."""
    return int(x.detach().double().abs().sum().item() * 1000)
