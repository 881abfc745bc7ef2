"""Steps without gradients, and ranks that come out of step with the others, or call units in other orders."""

import contextlib
import time
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.distributed.models import Ordered, tiny
from tests.distributed.training import caught, numbers, square_loss, start
from tests.ranks import on_ranks
from zeroshard.comm.watch import watchdog


@contextlib.contextmanager
def warned():
    """The texts of the warnings of ours, as Python shows them: each once for a line."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield texts
    texts += [
        str(one.message) for one in caught if "engine" in str(one.message) or "rank" in str(one.message)
    ]


# --------------------------------------------------------------------------------- steps without gradients


def backward(engine, loss=None):
    engine.backward(square_loss(engine, 0) if loss is None else loss)


def with_all_frozen(engine):
    engine.requires_grad_(False)
    backward(engine, engine(numbers(0, 5, 7).requires_grad_()).mean())


BEFORE = {
    "no backward": lambda engine: None,
    "a step": lambda engine: (backward(engine), engine.step()),
    "zero_grad": lambda engine: (backward(engine), engine.zero_grad()),
    "a loss beside the model": lambda engine: backward(engine, torch.ones((), requires_grad=True) * 2),
    "all frozen": with_all_frozen,
}


@on_ranks(2)
def test_a_step_without_a_gradient_warns_and_takes_nothing():
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = {"stage": 3, "clip_grad_norm": 1.0}
    engine, *_ = zeroshard.initialize(model, optimizer, config, lr_scheduler=scheduler)
    steps = 0
    for name, act in BEFORE.items():
        with warned() as texts:
            act(engine)
            answer = engine.step()
        engine.requires_grad_(True)
        steps += name == "a step"
        got = (answer, engine.global_step, engine.skipped_steps, scheduler.last_epoch)
        assert got == (False, steps, 0, steps), name
        assert any("without a gradient" in text for text in texts), name
    backward(engine)
    assert engine.step()


# ------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize(("accumulation", "every", "by_engine"), [(4, 1, False), (4, 1, True), (1, 2, False)])
@on_ranks(2)
def test_a_plain_loop_is_told_once_that_it_accumulates_nothing_where_it_should(
    accumulation, every, by_engine
):
    engine, optimizer = start(tiny(), "SGD", gradient_accumulation_steps=accumulation)
    with warned() as texts:
        for number in range(3 * every):
            loss = square_loss(engine, number)
            engine.backward(loss) if by_engine else loss.backward()
            if (number + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert len(texts) == (accumulation > 1)
    assert all("gradient_accumulation_steps=4" in text and "engine.step()" in text for text in texts)


@on_ranks(2)
def test_a_step_with_gradients_that_nobody_divided_is_told_once():
    ways = (
        lambda engine, loss: loss.backward(),
        lambda engine, loss: engine.backward(loss),
        lambda engine, loss: engine.backward(loss / 2, scale_wrt_gas=False),
    )
    said, gradients = [], []
    for way in ways:
        engine, _ = start(tiny(), "SGD", gradient_accumulation_steps=2)
        with warned() as texts:
            for number in range(6):
                way(engine, square_loss(engine, number))
                if number == 1:
                    gradients.append(engine.full_gradient("inner.weight"))
                engine.step()
        said.append(texts)
    assert [len(texts) for texts in said] == [1, 0, 0]
    for words in ("gradient_accumulation_steps=2", "engine.backward(loss)", "scale_wrt_gas=False"):
        assert words in said[0][0]
    torch.testing.assert_close(2 * gradients[1], gradients[0])
    torch.testing.assert_close(2 * gradients[2], gradients[0])


# ---------------------------------------------------------------------------- ranks that leave out a batch


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_rank_that_leaves_out_a_step_is_an_error_on_all_ranks(stage):
    """Rank 1 leaves out batch 1, as one does after an exception that was caught."""
    engine, optimizer = start(tiny(), "SGD", stage=stage, watchdog_s=20.0)

    def run():
        for number in range(4):
            square_loss(engine, number).backward()
            if (number, dist.get_rank()) != (1, 1):
                optimizer.step()
            optimizer.zero_grad()

    error = caught(run)
    assert error != "nothing was raised"
    assert "step of the optimizer" in error or stage > 0, error
    assert "left out a step" in error or stage == 3 or dist.get_rank() == 0, error


CONFIG = {"stage": 3, "units": ["Linear"], "watchdog_s": 60.0}


TOLD = (
    r"collective \d+ of rank \d is the all-gather of unit 'blocks\.\d', "
    r"on rank \d it is the all-gather of unit 'blocks\.\d': at stage 3 all ranks must call.*"
    r"list in units= the class of the module that holds them"
)


@pytest.mark.long  # of seconds; tests/comm/test_ledger.py compares orders
@on_ranks(2, process_group=False)
def test_ranks_that_call_blocks_in_different_orders_raise_an_error_that_names_the_first():
    torch.manual_seed(0)
    with mock.patch.object(watchdog, "_MAX_PAUSE_S", 0.2):  # between heartbeats, and so before ranks compare
        engine, *_ = zeroshard.initialize(Ordered(8, 5), partial(torch.optim.SGD, lr=0.1), CONFIG)
    begun = time.monotonic()

    def train(*orders):
        for order in orders:
            engine.backward(engine(torch.ones(2, 8), order).square().mean())
            engine.step()

    other = [0, 3, 2, 1, 4] if dist.get_rank() else range(5)
    train(range(5))
    with pytest.raises(RuntimeError, match=TOLD):
        train(other, other)
    assert time.monotonic() - begun < CONFIG["watchdog_s"] / 2
