"""A job that a node has no room for is refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.checkpoint import runs
from tests.ranks import on_ranks
from zeroshard.memory import budget
from zeroshard.optim import AdamW8bit


@on_ranks(pytest.param(1, marks=pytest.mark.long), 2)
def test_what_is_needed_what_there_is_and_what_needs_less_are_told_on_all_ranks(
    tmp_path: Path, num_ranks: int
) -> None:
    config = {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda model: AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256),
    ):
        with (
            mock.patch.object(budget, "host_bytes_free", return_value=1000),
            mock.patch.object(budget.shutil, "disk_usage", return_value=SimpleNamespace(free=5000)),
            pytest.raises(RuntimeError, match="of host memory on this node, got 1000 B free") as caught,
        ):
            runs.start(config, make)
        message = str(caught.value)
        assert "buffers for the units in files: " in message
        assert f"on each of {num_ranks} rank(s)" in message
        assert f"on the disk of {tmp_path} for {num_ranks} rank(s), got 4.9 KiB free" in message
        assert 'precision.main_dtype="bf16"' in message
    assert not list(tmp_path.rglob("*.swap"))
