"""Models of [n, 7] whose ranks may go different ways."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from torch import Tensor, nn

WIDTH = 24


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))


class Residual(nn.Module):
    """Residual blocks, called in any order; the outputs of some may be cut off from the loss."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(_block() for _ in range(num_blocks))

    def forward(self, x: Tensor, cut: Collection[int] = (), order: Sequence[int] | None = None) -> Tensor:
        x = self.first(x)
        for number in order if order is not None else range(len(self.blocks)):
            y = self.blocks[number](x)
            x = x + (y.detach() if number in cut else y)
        out: Tensor = self.last(x)
        return out


class PartlyFrozen(Residual):
    """Blocks in the middle are not trained; what goes into them may be cut off."""

    def __init__(self) -> None:
        super().__init__(5)
        for block in self.blocks[1:4]:
            block.requires_grad_(False)

    def forward(self, x: Tensor, is_cut: bool = False) -> Tensor:  # type: ignore[override]
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if is_cut and number == 1:
                x = x.detach()
        out: Tensor = self.last(x)
        return out


class Adapted(Residual):
    """Blocks of frozen weights with small trained layers beside them."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks.requires_grad_(False)
        for block in self.blocks:
            assert isinstance(block, nn.Sequential)
            block.append(nn.Linear(WIDTH, WIDTH))


class _Expert(nn.Module):
    """A block that uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        y: Tensor = self.experts[which](self.common(x).tanh())
        return x + y


class Routed(nn.Module):
    """Blocks of experts; `which` tells the first block's."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(_Expert() for _ in range(num_blocks))

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, (which + number) % 2)
        out: Tensor = self.last(x)
        return out


class Funnel(nn.Module):
    """Blocks of as many sizes as there are blocks, as in a U-Net."""

    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        widths = [7, *(12 * number for number in range(1, num_blocks)), 3]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, b)) for a, b in pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
