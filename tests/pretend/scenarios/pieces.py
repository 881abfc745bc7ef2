"""Units in files that are stepped in pieces; all values are as without offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pretend.scenario import Bench, add
from tests.pretend.scenarios.plain import BF16
from zeroshard.plan import pieces


def _trained(bench: Bench, **config: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    engine = bench.start(bench.gpt(3), **config)
    bench.train(3)
    with bench.trace.syncs_allowed():
        return [value.clone() for value in engine.full_state_dict().values()]


def _in_pieces(bench: Bench, offload: dict[str, Any]) -> None:
    folder = {"nvme_path": str(bench.folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pieces, "are_cut", lambda sizes: [size > 0 and n % 2 == 0 for n, size in enumerate(sizes)]
        )
        patch.setattr(pieces, "PIECE_BYTES", 2048)
        moved = _trained(bench, stage=3, precision=BF16, offload=offload | folder)
    plain = _trained(bench, stage=3, precision=BF16)
    with bench.trace.syncs_allowed():
        assert all(torch.equal(one, other) for one, other in zip(moved, plain, strict=True))


add("pieces", lambda bench: _in_pieces(bench, {"optimizer": "nvme"}))
add(
    "pieces_in_backward",
    lambda bench: _in_pieces(bench, {"optimizer": "nvme", "parameters": "cpu", "step_in_backward": True}),
)
