"""Engines come and go in one process: nothing of them is left, and those that stay are not disturbed."""

import gc
import os
import threading
import time
import warnings
import weakref
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import differences, finish, square_loss
from tests.ranks import on_ranks
from zeroshard.checkpoint import save as saving


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def start(model=None, **options):
    model = small() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return zeroshard.initialize(model, optimizer, {"units": ["Linear"], "watchdog_s": 20, **options})


def train(engine, steps=1, first=0):
    for number in range(first, first + steps):
        engine.backward(square_loss(engine, number))
        engine.step()


# ---------------------------------------------------------------------------------- nothing is left of them


def held():
    """What this process holds: file descriptors, threads, process groups."""
    process = psutil.Process()
    return process.num_fds(), process.num_threads(), len(dist.distributed_c10d._world.pg_map)


def once(number, folder, closes):
    """One engine, used and dropped; another kind each time, and some save in the background."""
    kind = number % 6
    group = {"shard_group_size": 1} if kind == 4 else {}
    engine = start(stage=3 if group else kind % 4, **group).engine
    train(engine)
    if kind == 5:
        engine.save_checkpoint(folder, "last", blocking=False)
    if closes:
        engine.close(restore=bool(kind % 2))
    runtime = engine._runtime if not closes else engine
    return [weakref.ref(it) for it in (engine, runtime, engine.module)]


def _let_threads_end():
    """The threads of saves in the background, which the system sees a moment longer than Python."""
    while any("checkpoint" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)
    time.sleep(0.2)


@on_ranks(2)
def test_engines_that_are_dropped_or_closed_leave_nothing(tmp_path):
    for closes in (False, True):
        for number in range(6):
            once(number, tmp_path, closes)
        gc.collect()
        _let_threads_end()
        before, memory = held(), psutil.Process().memory_info().rss
        alive = 0
        for number in range(6):
            references = once(number, tmp_path, closes)
            if not closes:
                gc.collect()
            alive += sum(reference() is not None for reference in references)
        _let_threads_end()
        grown = psutil.Process().memory_info().rss - memory
        after, grown = held(), grown / 2**20
        assert after == before
        assert alive == 0
        assert grown < 20


# ------------------------------------------------------------------------------------ those that stay alive


@on_ranks(2)
def test_live_engines_over_the_same_and_overlapping_groups_do_not_disturb_each_other():
    """Two engines by turns, against the same two one after the other."""
    found = []
    for groups in ((None, None), (1, None), (2, 1)):
        alone, together = (
            [start(small(seed), stage=3, shard_group_size=size).engine for seed, size in enumerate(groups)]
            for _ in range(2)
        )
        for engine in alone:
            train(engine, steps=3)
        for number in range(3):
            losses = [square_loss(engine, number) for engine in together]
            for engine, loss in reversed(list(zip(together, losses, strict=True))):
                engine.backward(loss)
            for engine in together:
                engine.step()
        for got, want in zip(together, alone, strict=True):
            found += differences(str(groups), finish(got, []), finish(want, []))
    return found


# ----------------------------------------------------------------------------------- saves in the background


@on_ranks(2)
def test_a_background_save_of_a_dropped_engine_is_written_beside_those_of_others(tmp_path):
    """Two engines save in the background at once, ranks at different speeds; one is dropped meanwhile."""
    first, second = (start(small(seed), stage=3).engine for seed in (0, 1))
    train(first)
    write_part = saving.write_part

    def slow(place, slices, rank, *others):
        time.sleep(0.3 if rank == 0 and "first" in str(place) else 0.01)
        return write_part(place, slices, rank, *others)

    with mock.patch.object(saving, "write_part", slow):
        first.save_checkpoint(tmp_path, "first", blocking=False)
        second.save_checkpoint(tmp_path, "second", blocking=False)
        want = finish(first, [])
        del first
        gc.collect()
        train(second)
        second.save_checkpoint(tmp_path, "third")
        _let_threads_end()
    engine = start(small(2), stage=3).engine
    engine.load_checkpoint(tmp_path, "first")
    assert not differences("loaded", finish(engine, []), want)
    assert {"first", "second", "third"} <= set(os.listdir(tmp_path))


@on_ranks(2)
def test_a_background_save_that_fails_when_its_engine_is_gone_warns(tmp_path):
    engine = start().engine
    is_released = threading.Event()

    def fail(*_):
        is_released.wait()
        raise OSError("the disk is full")

    patched = mock.patch.object(saving, "write_part", fail)
    with patched, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save_checkpoint(tmp_path, "lost", blocking=False)
        del engine
        is_released.set()
        _let_threads_end()
    messages = [str(warning.message) for warning in caught]
    assert any("the disk is full" in message for message in messages), messages
