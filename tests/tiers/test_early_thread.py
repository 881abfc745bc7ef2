"""Units are stepped by a thread beside the backward: same bits, errors told, no thread left."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from tests.checkpoint import runs
from tests.tiers.test_early import Failing
from zeroshard.stepping import early
from zeroshard.stepping.early import MOST_UNDER_WAY, Worker


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("zeroshard-step")]


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# -- the thread ----------------------------------------------------------------------------------------------


def fail():
    raise KeyError("made to fail")


def test_work_is_done_in_order_and_little_of_it_waits():
    worker, done, gate = Worker(), [], threading.Event()
    worker.give(gate.wait)
    for number in range(MOST_UNDER_WAY - 1):
        worker.give(lambda number=number: done.append(number))
    blocked = threading.Thread(target=worker.give, args=(lambda: done.append("last"),))
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive()
    gate.set()
    blocked.join(20)
    worker.finish()
    assert done == [*range(MOST_UNDER_WAY - 1), "last"]


def test_an_error_comes_back_once_with_its_traceback_and_ends_the_work():
    worker, done = Worker(), []
    wait = worker.give(fail)
    wait()
    with pytest.raises(KeyError, match="made to fail") as caught:
        worker.give(lambda: done.append("after the error"))
    assert "in fail" in "".join(traceback.format_exception(caught.value))
    worker.cancel()
    worker.give(fail)
    worker.give(lambda: done.append("after the error"))
    with pytest.raises(KeyError, match="made to fail"):
        worker.finish()
    worker.give(lambda: done.append("later"))
    worker.finish()
    assert done == ["later"]


def test_work_after_an_interrupted_wait_is_done():
    worker, done, gate = Worker(), [], threading.Event()
    worker.give(gate.wait)
    interrupted = mock.patch.object(early, "wait", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        worker.finish()
    gate.set()
    worker.give(lambda: done.append("later"))
    worker.finish()
    assert done == ["later"]


def test_the_thread_ends_with_its_owner():
    before = set(threads())
    worker = Worker()
    worker.give(lambda: None)
    worker.finish()
    assert len(set(threads()) - before) == 1
    del worker
    gc.collect()
    assert wait_until(lambda: set(threads()) <= before)


# -- steps ---------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Units whose order changes with each forward, if that is wanted."""

    def __init__(self, *, turns=False):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))
        self.turns, self.num_forwards, self.fails = turns, 0, False

    def forward(self, x):
        self.num_forwards += 1
        is_turned = self.turns and self.num_forwards % 2
        x = self.first(x)
        if self.fails:
            x = Failing.apply(x)
        for block in reversed(self.blocks) if is_turned else self.blocks:
            x = block(x)
        return x


def seeded(**options):
    torch.manual_seed(0)
    return Layers(**options)


def loss_of(engine, number):
    return engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().mean()


def start(folder, make, *, in_thread=True, model=None, **config):
    """An engine that steps units in files within the backward; as beside an accelerator, or as on a CPU."""
    files = {"optimizer": "nvme", "nvme_path": str(folder), "step_in_backward": True}
    engine = runs.start({"stage": 3, "offload": files} | config, make, model=model or seeded())
    if in_thread:
        engine._early._worker = Worker()
    return engine


def adamw(model):
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 2e-2}, {"params": others}], lr=1e-2)


def adam_of_bitsandbytes(model):
    from bitsandbytes.optim import Adam8bit

    return Adam8bit(model.parameters(), lr=1e-2, min_8bit_size=1 << 20)


MAKERS = {
    "AdamW": adamw,
    "bitsandbytes": adam_of_bitsandbytes,
}
BF16_MAIN = {"precision": {"param_dtype": "bf16", "main_dtype": "bf16"}}


def watched(engine):
    """Notes of the threads of steps, and of what a tensor hook sees of the optimizer meanwhile."""
    seen, names, parts = set(), set(), engine._early._parts
    own_step, optimizer = parts._own_step, engine.optimizer

    def step(twin):
        names.add(threading.current_thread().name)
        time.sleep(0.002)  # lets the backward look
        own_step(twin)

    def look(module, args, output):
        if output.requires_grad:
            sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
            output.register_hook(lambda _: seen.add((sizes, len(optimizer._optimizer_step_post_hooks))))

    parts._own_step = step
    for block in engine.module.blocks:
        block[0].register_forward_hook(look)
    return seen, names


def equal_bits(folder):
    found = []
    for name, make in MAKERS.items():
        for options in ({}, BF16_MAIN) if name == "AdamW" else ({},):
            plain = runs.start({"stage": 3} | options, make, model=seeded(turns=True))
            want = runs.state(plain, runs.train(plain, range(3), loss_of))
            plain.close(restore=False)
            for in_thread in (True, False) if make is adamw else (True,):
                engine = start(folder, make, in_thread=in_thread, model=seeded(turns=True), **options)
                before = [len(group["params"]) for group in engine.optimizer.param_groups]
                seen, names = watched(engine)
                got = runs.state(engine, runs.train(engine, range(3), loss_of))
                what = f"{name}, {options}, thread: {in_thread}"
                found += [f"{what}: {text}" for text in runs.differences(got, want)]
                found += [f"{what}: losses"] * (got.losses != want.losses)
                num_hooks = len(engine.optimizer._optimizer_step_post_hooks)
                found += [f"{what}: a hook saw {seen}"] * (seen != {(tuple(before), num_hooks)})
                is_there = any(thread.startswith("zeroshard-step") for thread in names)
                found += [f"{what}: steps in {names}"] * (is_there is not in_thread)
                engine.close(restore=False)
    return found


def test_a_thread_has_the_bits_of_steps_after_the_backward_and_nobody_sees_its_parts(ranks, tmp_path):
    for found in ranks(2, equal_bits, tmp_path):
        assert not found


def failures(folder):
    """Errors of the thread and of a backward beside it; then training goes on from a checkpoint."""
    engine = start(folder, adamw)
    engine.save_checkpoint(folder / "saved")
    own_step, steps = engine._early._parts._own_step, []

    def failing(twin):
        steps.append(len(steps))
        if len(steps) == 2:
            raise OSError("made to fail")
        own_step(twin)

    found = []
    engine._early._parts._own_step = failing
    with pytest.raises(OSError, match="made to fail") as caught:
        engine.backward(loss_of(engine, 0))
    found += ["no traceback"] * ("in failing" not in "".join(traceback.format_exception(caught.value)))
    found += [f"{len(steps)} steps"] * (len(steps) != 2)
    engine._early._parts._own_step = own_step
    with pytest.raises(RuntimeError, match="Load the last checkpoint"):
        engine.backward(loss_of(engine, 1))
    engine.zero_grad()
    engine.load_checkpoint(folder / "saved")
    engine.module.fails = True
    with pytest.raises(KeyError, match="made to fail"):
        engine.backward(loss_of(engine, 0))
    engine.module.fails = False
    with pytest.raises(RuntimeError, match="Load the last checkpoint"):
        engine.step()
    engine.load_checkpoint(folder / "saved")
    got = runs.state(engine, runs.train(engine, range(3), loss_of))
    plain = runs.start(3, adamw, model=seeded())
    found += runs.differences(got, runs.state(plain, runs.train(plain, range(3), loss_of)))
    found += [f"{len(threads())} threads"] * (len(threads()) != 1)
    alive = weakref.ref(engine)
    del engine, plain, caught
    gc.collect()
    found += ["the engine lives on"] * (alive() is not None)
    found += [f"left: {threads()}"] * (not wait_until(lambda: not threads()))
    closed = start(folder, adamw)
    runs.train(closed, range(1), loss_of)
    closed.close(restore=False)
    return found + [f"left by close: {threads()}"] * (not wait_until(lambda: not threads()))


def test_errors_of_the_thread_are_told_and_no_thread_is_left(ranks, tmp_path):
    assert ranks(1, failures, tmp_path) == [[]]


def threads_of_steps(folder):
    before, seen, others = torch.get_num_threads(), [], []
    files = {"optimizer": "nvme", "nvme_path": str(folder), "step_in_backward": True}
    engine = start(folder, adamw, offload=files)
    engine._early._parts._num_threads = before + 2  # as with a GPU: the cores of the rank
    own_step = engine._early._parts._own_step

    def step(twin):
        seen.append(torch.get_num_threads())
        own_step(twin)

    engine._early._parts._own_step = step
    engine.module.first.register_full_backward_hook(lambda *_: others.append(torch.get_num_threads()))
    engine.backward(loss_of(engine, 0))
    engine.close(restore=False)
    return seen, [before + 2] * 7, others, [before]


def test_the_thread_has_its_own_number_of_threads(ranks, tmp_path):
    [(seen, expected, others, before)] = ranks(1, threads_of_steps, tmp_path)
    assert seen == expected
    assert others == before


def read_ahead(folder):
    """For each way: the units whose values were there, or on their way, before their turn came."""
    found = {}
    for in_thread in (True, False):
        engine = start(folder, adamw, in_thread=in_thread)
        runs.train(engine, range(2), loss_of)
        tier = engine._early._parts._homes[0]
        fetch, ahead = tier._fetch, []

        def fetched(blocks, fetch=fetch, tier=tier, ahead=ahead):
            ahead.append(tier._ahead is not None and tier._ahead[0] == blocks)
            return fetch(blocks)

        tier._fetch = fetched
        engine.backward(loss_of(engine, 2))
        found[in_thread] = list(ahead)
        engine.step()
        engine.close(restore=False)
    return found


def test_files_are_read_ahead_of_the_steps_in_a_backward(ranks, tmp_path):
    [found] = ranks(1, read_ahead, tmp_path)
    assert found == {True: [True] * 7, False: [True] * 7}
