"""States in files leave nothing in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zeroshard


def test_states_that_went_into_files_keep_no_memory_as_the_base_of_a_view(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8))
    config = {"offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    optimizer = zeroshard.optim.AdamW8bit(model.parameters(), lr=1e-3)
    engine = zeroshard.initialize(model, optimizer, config).engine
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    codes = [value for value in states if value.dtype == torch.uint8]
    memory = engine._runtime.context.memory
    assert len(codes) == 2
    assert all(map(memory.is_in_files, states))
    assert all(value._base is None or memory.is_in_files(value._base) for value in states)
    engine.close()
