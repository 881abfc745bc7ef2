"""Values in files: saved, loaded on any tier, built there, given back."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.checkpoint import runs
from tests.distributed.training import numbers
from tests.stores.tiers import FILES, OPTIMIZERS, offload

BEFORE, AFTER = range(3), range(3, 6)


@runs.without_numba
def convert(folder):
    """States of 32 bits become ones of 8 bits and back: from files on the device, and from there in files."""
    found, tiers = [], ({"stage": 1}, {"stage": 3, **offload(folder, **FILES)})
    for first, second in (("AdamW", "8-bit"), ("8-bit", "AdamW")):
        ends = []
        for before, after in (tiers, tiers[::-1]):
            engine = runs.start(before, lambda model, first=first: plain(first, model))
            runs.train(engine, BEFORE)
            engine.save_checkpoint(folder / "saved", "one", blocking=False)
            engine._saver.finish()
            engine = runs.start(after, lambda model, second=second: plain(second, model), seed=1)
            engine.load_checkpoint(folder / "saved", "one", convert_states=first != second)
            ends.append(runs.state(engine, runs.train(engine, AFTER)))
        found += runs.differences(*ends)
        assert ends[0].losses == ends[1].losses
    return found


def plain(name, model):
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zeroshard.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256)


def test_what_one_tier_saved_goes_on_in_another_also_with_another_number_of_bits(ranks, tmp_path):
    for found in ranks(2, convert, tmp_path):
        assert not found


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


def adapt(folder):
    """Where a run with the base in files differs; the bytes of the files."""
    ends, sizes = [], []
    for tier in ({}, offload(folder, optimizer="none", **FILES), offload(folder, **FILES)):
        config = {"stage": 3, "checkpoint": {"frozen": False}, **tier}
        engine = runs.start(config, OPTIMIZERS["AdamW"], model=Adapted())
        losses = runs.train(engine, BEFORE, lambda m, n: m(numbers(n, 5, 7)).square().mean())
        engine.save_checkpoint(folder / "saved", str(len(ends)))
        engine.load_checkpoint(folder / "saved", "0")
        ends.append(runs.state(engine, losses))
        memory = engine._runtime.context.memory
        sizes.append(sum(memory.is_in_files(p.detach()) for p in engine.parameters() if not p.requires_grad))
    found = [text for end in ends[1:] for text in runs.differences(end, ends[0])]
    return found, [end.losses == ends[0].losses for end in ends], sizes


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_frozen_base_lies_in_files(ranks, tmp_path, num_ranks):
    for found, are_equal, (none, *others) in ranks(num_ranks, adapt, tmp_path):
        assert not found
        assert all(are_equal)
        assert none == 0
        assert min(others) > 0


# ---------------------------------------------------------------------------------------------------- files


def swap_files(folder):
    return sorted(str(path) for path in Path(folder).rglob("*.swap"))


def two_engines(folder):
    """The files beside two engines, one closed, one dropped; and whether the second one went on."""
    config = {"stage": 3, **offload(folder)}
    first, second = (runs.start(config, OPTIMIZERS["AdamW"]) for _ in range(2))
    losses = [runs.train(engine, range(2)) for engine in (first, second)]
    runs.from_all(None)
    numbers_of_files = [len(swap_files(folder))]
    first.close()
    del first
    gc.collect()
    runs.from_all(None)
    numbers_of_files.append(len(swap_files(folder)))
    losses.append(runs.train(second, range(2, 4)))
    del second
    gc.collect()
    runs.from_all(None)
    end = time.monotonic() + 20
    while (num := len(swap_files(folder))) and time.monotonic() < end:
        time.sleep(0.01)  # a read ahead of the next step may be under way
    return [*numbers_of_files, num], losses[0] == losses[1]


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_files_of_an_engine_go_with_it(ranks, tmp_path, num_ranks):
    for num_files, is_equal in ranks(num_ranks, two_engines, tmp_path):
        assert num_files == [2 * num_ranks, num_ranks, 0]
        assert is_equal
