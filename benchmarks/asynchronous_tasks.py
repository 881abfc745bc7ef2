"""The tasks of benchmarks/asynchronous.py: images of digits, and bytes of Python's own help.

Both networks have eight residual blocks with normalization inside a sample, so that nothing depends on the
size of a micro-batch, and a pipeline of eight ranks has a block on each.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BLOCKS = 8
LENGTH = 32
"""Bytes of a sequence."""
WORDS = 128
"""Bytes of ASCII; others are read as question marks."""
HELD_OUT = 0.2
"""The part of the data that is only evaluated."""


class Residual(nn.Module):
    """An image plus two convolutions of its normalized form."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(
            self.second.weight
        )  # at first a block changes nothing (Goyal et al. 2017, section 5.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(self.first(self.norm(x)).relu())
        return y


class Head(nn.Module):
    """The scores of the classes, from the means over the 16 parts of an image of 8 by 8."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.GroupNorm(4, channels), nn.Linear(16 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(nn.functional.avg_pool2d(self.norm(x).relu(), 2).flatten(1))
        return scores


class Embedding(nn.Module):
    """A vector of each byte, and one of its place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.words(x) + self.places
        return y


class Block(nn.Module):
    """A layer of a transformer, with normalization before its two parts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.project, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.wide = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.wide(x)
        return y


@dataclass(frozen=True)
class Task:
    """A network and its samples."""

    name: str
    rows: int
    """Samples of a micro-batch."""

    def blocks(self, seed: int) -> list[nn.Module]:
        """The blocks of the network; the first one embeds the inputs, the last one gives the outputs."""
        torch.manual_seed(seed)
        if self.name == "digits":
            stem, head = nn.Conv2d(1, 8, 3, padding=1), Head(8, 10)
            middle: list[nn.Module] = [Residual(8) for _ in range(BLOCKS)]
        else:
            stem, head = Embedding(32), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, WORDS))
            middle = [Block(32, 2) for _ in range(BLOCKS)]
        return [nn.Sequential(stem, middle[0]), *middle[1:-1], nn.Sequential(middle[-1], head)]

    def modules(self, seed: int, num_ranks: int) -> list[nn.Module]:
        """The blocks of each rank; each has as many."""
        blocks, size = self.blocks(seed), BLOCKS // num_ranks
        return [nn.Sequential(*blocks[start : start + size]) for start in range(0, BLOCKS, size)]

    def microbatches(self, seed: int, num: int) -> tuple[Tensor, Tensor]:
        """The samples of all micro-batches in the order of a seed: inputs and targets, [num, rows, ...]."""
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = self._samples[0]
        epochs: Iterator[Tensor] = (torch.randperm(len(inputs), generator=generator) for _ in range(num))
        order, needed = torch.empty(0, dtype=torch.long), num * self.rows
        while len(order) < needed:
            order = torch.cat([order, next(epochs)])
        taken = order[:needed].view(num, self.rows)
        return inputs[taken], targets[taken]

    @staticmethod
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy in nats."""
        return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def evaluate(self, modules: list[nn.Module]) -> tuple[float, float]:
        """The loss and the share of right answers on held-out samples."""
        output, targets = self._samples[1]
        for module in modules:
            output = module(output)
        right = (output.argmax(-1) == targets).double().mean()
        return self.loss(output, targets).item(), right.item()

    @property
    def _samples(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return _digits() if self.name == "digits" else _text()


@functools.cache
def _digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits  # only this task needs it

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    targets = torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    least = round(HELD_OUT * len(images))
    tested, trained = order[:least], order[least:]
    return (images[trained], targets[trained]), (images[tested], targets[tested])


@functools.cache
def _text() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    all_bytes = torch.tensor(list(text))
    least = round((1 - HELD_OUT) * len(text))
    trained, tested = all_bytes[:least], all_bytes[least:]
    return _sequences(trained, None), _sequences(tested, 128)


def _sequences(found: Tensor, most: int | None) -> tuple[Tensor, Tensor]:
    """Runs of bytes one behind the other, and the byte that follows each; of many, a few from all places."""
    pieces = found.unfold(0, LENGTH + 1, LENGTH)
    if most is not None:
        pieces = pieces[:: max(1, len(pieces) // most)][:most]
    return pieces[:, :-1], pieces[:, 1:]


TASKS = {"digits": Task("digits", 8), "text": Task("text", 4)}
