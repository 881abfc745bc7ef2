"""A job that a node has no room for is refused before anything is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.checkpoint import runs
from zeroshard.memory import budget
from zeroshard.optim import AdamW8bit

MAKERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "8-bit": lambda model: AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256),
}


def refusals(folder):
    """The messages on a node without memory and without space on its disk, by optimizer."""
    config = {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": str(folder)}}
    messages = {}
    for name, make in MAKERS.items():
        with (
            mock.patch.object(budget, "host_bytes_free", return_value=1000),
            mock.patch.object(budget.shutil, "disk_usage", return_value=SimpleNamespace(free=5000)),
            pytest.raises(RuntimeError, match=r".") as caught,
        ):
            runs.start(config, make)
        messages[name] = str(caught.value)
    return messages


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_needed_what_there_is_and_what_needs_less_are_told_on_all_ranks(ranks, tmp_path, num_ranks):
    for messages in ranks(num_ranks, refusals, tmp_path):
        for message in messages.values():
            assert "of host memory on this node, got 1000 B free" in message
            assert "buffers for the units in files: " in message
            assert f"on each of {num_ranks} rank(s)" in message
            assert f"on the disk of {tmp_path} for {num_ranks} rank(s), got 4.9 KiB free" in message
            assert 'precision.main_dtype="bf16"' in message
        assert not list(tmp_path.rglob("*.swap"))
