"""Engines come and go in one process: nothing of them is left, and those that stay are not disturbed."""

import gc
import threading
import time
import warnings
import weakref
from itertools import product
from unittest import mock

import psutil
import torch.distributed as dist

from tests.distributed.models import tiny
from tests.distributed.training import differences, finish, square_loss, start, take_steps
from tests.ranks import on_ranks
from zeroshard.checkpoint import save as saving

# ---------------------------------------------------------------------------------- nothing is left of them


def held():
    """What this process holds: file descriptors, threads, process groups.

    The system sees a thread a moment longer than Python.
    """
    process = psutil.Process()
    return process.num_fds(), process.num_threads(), len(dist.distributed_c10d._world.pg_map)


def once(number, folder, closes):
    """One engine, used and dropped; another kind each time, and some save in the background."""
    kind = number % 6
    group = {"shard_group_size": 1} if kind == 4 else {}
    engine, _ = start(tiny(), stage=3 if group else kind % 4, **group)
    take_steps(engine, [0])
    if kind == 5:
        engine.save_checkpoint(folder, "last", blocking=False)
    if closes:
        engine.close(restore=bool(kind % 2))
    runtime = engine._runtime if not closes else engine
    return [weakref.ref(it) for it in (engine, runtime, engine.module)]


def _let_threads_end():
    """The threads of saves in the background."""
    while any("checkpoint" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)


@on_ranks(2)
def test_engines_that_are_dropped_or_closed_leave_nothing(tmp_path):
    for number in range(6):
        once(number, tmp_path, closes=number % 2)
    gc.collect()
    _let_threads_end()
    before, memory = held(), psutil.Process().memory_info().rss
    for number, closes in product(range(6), (False, True)):
        references = once(number, tmp_path, closes)
        if not closes:
            gc.collect()
        assert not any(reference() for reference in references)
    deadline = time.monotonic() + 20
    while (more := [now > then for now, then in zip(held(), before, strict=True)]) != [False] * 3:
        assert time.monotonic() < deadline, (more, held(), before)
        time.sleep(0.01)
    assert psutil.Process().memory_info().rss - memory < 20 * 2**20


# ------------------------------------------------------------------------------------ those that stay alive


@on_ranks(2)
def test_live_engines_over_the_same_and_overlapping_groups_do_not_disturb_each_other():
    """Two engines by turns, against the same two one after the other."""
    found = []
    for groups in ((None, None), (2, 1)):
        alone, together = (
            [start(tiny(depth), stage=3, shard_group_size=size)[0] for depth, size in enumerate(groups, 2)]
            for _ in range(2)
        )
        for engine in alone:
            take_steps(engine, range(2))
        for number in range(2):
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
def test_a_background_save_that_fails_when_its_engine_is_gone_warns(tmp_path):
    engine, _ = start(tiny(), stage=3)
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
