"""Models of [n, 7] whose ranks may go different ways."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
