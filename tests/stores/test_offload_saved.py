"""Values in files: saved, loaded on any tier, built there, given back."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn

from tests.checkpoint import runs
from tests.distributed.training import numbers
from tests.ranks import on_ranks
from tests.stores.tiers import FILES, OPTIMIZERS, offload, over, swap_files

BEFORE, AFTER = range(3), range(3, 6)
PLAIN = {"AdamW": over(torch.optim.AdamW, lr=1e-2), "8-bit": OPTIMIZERS["8-bit"]}
"""Optimizers whose states become each other's."""


@pytest.mark.parametrize(
    ("first", "second"), [("AdamW", "8-bit"), pytest.param("8-bit", "AdamW", marks=pytest.mark.long)]
)
@on_ranks(2)
@runs.without_numba
def test_what_one_tier_saved_goes_on_in_another_also_with_another_number_of_bits(tmp_path, first, second):
    """From files on the device, and from there in files."""
    ends, tiers = [], ({"stage": 1}, {"stage": 3, **offload(tmp_path, **FILES)})
    for before, after in (tiers, tiers[::-1]):
        engine = runs.start(before, PLAIN[first])
        runs.train(engine, BEFORE)
        engine.save_checkpoint(tmp_path / "saved", "one", blocking=False)
        engine._saver.finish()
        engine = runs.start(after, PLAIN[second], seed=1)
        engine.load_checkpoint(tmp_path / "saved", "one", convert_states=True)
        ends.append(runs.state(engine, runs.train(engine, AFTER)))
    assert ends[0].losses == ends[1].losses
    return runs.differences(*ends)


# ------------------------------------------------------------------------------------------------- building


class Adapted(nn.Module):
    """A frozen base in bfloat16 with trained layers of low rank beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class AdaptedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(7, 7, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x):
        return x + self.base(x.bfloat16()).float() + self.up(self.down(x))


@pytest.mark.long_where(num_ranks=[1])
@on_ranks(1, 2)
def test_a_frozen_base_lies_in_files(tmp_path):
    ends, sizes = [], []
    for tier in ({}, offload(tmp_path, optimizer="none", **FILES), offload(tmp_path, **FILES)):
        config = {"stage": 3, "checkpoint": {"frozen": False}, **tier}
        engine = runs.start(config, OPTIMIZERS["AdamW"], model=Adapted())
        losses = runs.train(engine, BEFORE, lambda m, n: m(numbers(n, 5, 7)).square().mean())
        engine.save_checkpoint(tmp_path / "saved", str(len(ends)))
        engine.load_checkpoint(tmp_path / "saved", "0")
        ends.append(runs.state(engine, losses))
        memory = engine._runtime.context.memory
        sizes.append(sum(memory.is_in_files(p.detach()) for p in engine.parameters() if not p.requires_grad))
    assert not [text for end in ends[1:] for text in runs.differences(end, ends[0])]
    assert all(end.losses == ends[0].losses for end in ends)
    assert sizes[0] == 0
    assert min(sizes[1:]) > 0


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.long_where(num_ranks=[1])
@on_ranks(1, 2)
def test_the_files_of_an_engine_go_with_it(num_ranks, tmp_path):
    """Of two engines one is closed and one dropped, which went on without the other."""
    config = {"stage": 3, **offload(tmp_path)}
    first, second = (runs.start(config, OPTIMIZERS["AdamW"]) for _ in range(2))
    losses = [runs.train(engine, range(2)) for engine in (first, second)]
    assert losses[0] == losses[1]
    runs.from_all(None)
    assert len(swap_files(tmp_path)) == 2
    runs.from_all(None)
    first.close()
    del first
    gc.collect()
    runs.from_all(None)
    assert len(swap_files(tmp_path)) == 1
    runs.train(second, range(2, 4))
    del second
    gc.collect()
    end = time.monotonic() + 20
    while swap_files(tmp_path) and time.monotonic() < end:
        time.sleep(0.01)  # a read ahead of the next step may be under way
    assert not swap_files(tmp_path)
