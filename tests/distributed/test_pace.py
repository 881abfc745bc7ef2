"""Steps without gradients, and ranks that come out of step with the others."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import SOME_STAGES, STAGES, numbers, square_loss, start
from tests.ranks import on_ranks


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


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


def before_any_backward(engine):
    return engine.step()


def after_a_step(engine):
    engine.backward(square_loss(engine, 0))
    assert engine.step() is True
    return engine.step()


def after_zero_grad(engine):
    engine.backward(square_loss(engine, 0))
    engine.zero_grad()
    return engine.step()


def after_a_loss_beside_the_model(engine):
    engine.backward(torch.ones((), requires_grad=True) * 2)
    return engine.step()


def with_all_frozen(engine):
    engine.requires_grad_(False)
    engine.backward(engine(numbers(0, 5, 7).requires_grad_()).mean())
    try:
        return engine.step()
    finally:
        engine.requires_grad_(True)


CASES = (
    before_any_backward,
    after_a_step,
    after_zero_grad,
    after_a_loss_beside_the_model,
    with_all_frozen,
)


@on_ranks(2)
def test_a_step_without_a_gradient_warns_and_takes_nothing():
    found = []
    for stage in SOME_STAGES:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        config = {"stage": stage, "clip_grad_norm": 1.0}
        engine, *_ = zeroshard.initialize(model, optimizer, config, lr_scheduler=scheduler)
        steps = 0
        for case in CASES:
            with warned() as texts:
                answer = case(engine)
            steps += case is after_a_step
            got = (answer, engine.global_step, engine.skipped_steps, scheduler.last_epoch)
            if got != (False, steps, 0, steps) or not any("without a gradient" in text for text in texts):
                found.append((stage, case.__name__, got, texts))
        engine.backward(square_loss(engine, 0))
        found += [] if engine.step() else [(stage, "the next step was not taken")]
    return found


@on_ranks(2)
def test_a_step_without_a_gradient_leaves_the_loss_scale_alone():
    """What a step that ends three micro-batches without gradients says, and whether the loss scale stays."""
    precision = {"param_dtype": "fp16"}
    engine, _ = start(build(), "SGD", stage=1, precision=precision, gradient_accumulation_steps=3)
    before = engine.loss_scale
    with warned() as texts:
        taken = [engine.step() for _ in range(3)] != [False] * 3
    assert (taken, engine.loss_scale == before, len(texts)) == (False, True, 1)


@on_ranks(2)
def test_a_loss_of_zero_on_one_rank_is_a_gradient():
    """Rank 1's loss depends on no parameter of ours but through a product with 0, as DDP wants it."""
    found = []
    for stage in SOME_STAGES:
        engine, _ = start(build(), "SGD", stage=stage)
        with warned() as texts:
            loss = square_loss(engine, 0)
            engine.backward(loss * dist.get_rank())
            taken = engine.step()
        if not taken or texts:
            found.append((stage, taken, texts))
    return found


@pytest.mark.parametrize(
    ("accumulation", "every", "backward"), [(4, 1, "plain"), (4, 1, "engine"), (1, 2, "plain")]
)
@on_ranks(2)
def test_a_plain_loop_is_told_once_that_it_accumulates_nothing_where_it_should(accumulation, every, backward):
    for stage in SOME_STAGES:
        engine, optimizer = start(build(), "SGD", stage=stage, gradient_accumulation_steps=accumulation)
        with warned() as texts:
            for number in range(3 * every):
                loss = square_loss(engine, number)
                engine.backward(loss) if backward == "engine" else loss.backward()
                if (number + 1) % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        assert len(texts) == (accumulation > 1)
        assert all("gradient_accumulation_steps=4" in text and "engine.step()" in text for text in texts)


def engine_steps(backward):
    """By stage, the warnings of a loop with two micro-batches, and the gradients before the first step."""
    said, gradients = [], []
    for stage in STAGES:
        engine, _ = start(build(), "SGD", stage=stage, gradient_accumulation_steps=2)
        with warned() as texts:
            for number in range(6):
                backward(engine, square_loss(engine, number))
                if number == 1:
                    gradients.append(engine.full_gradient("0.weight"))
                engine.step()
        said.append(texts)
    return said, gradients


def by_the_loss(engine, loss):
    loss.backward()


def by_the_engine(engine, loss):
    engine.backward(loss)


def of_a_divided_loss(engine, loss):
    engine.backward(loss / 2, scale_wrt_gas=False)


@on_ranks(2)
def test_a_step_with_gradients_that_nobody_divided_is_told_once():
    said, sums = engine_steps(by_the_loss)
    for texts in said:
        assert len(texts) == 1
        assert "gradient_accumulation_steps=2" in texts[0]
        assert "engine.backward(loss)" in texts[0]
        assert "scale_wrt_gas=False" in texts[0]
    for remedy in (by_the_engine, of_a_divided_loss):
        said, means = engine_steps(remedy)
        assert said == [[]] * len(STAGES)
        for got, one in zip(means, sums, strict=True):
            torch.testing.assert_close(2 * got, one)


# ---------------------------------------------------------------------------- ranks that leave out a batch


class StopError(Exception):
    pass


def go_on(stage):
    """Rank 1 leaves out batch 1 because of an exception of its own; warnings and the error of each rank."""
    engine, optimizer = start(build(), "SGD", stage=stage, watchdog_s=20.0)
    num_steps, error = 0, ""
    with warned() as texts:
        for number in range(4):
            try:
                num_steps += one_batch(engine, optimizer, number, fails=(number, dist.get_rank()) == (1, 1))
            except RuntimeError as caught:
                error = str(caught)
                break
            if num_steps == 3:
                break
    return texts, error


def one_batch(engine, optimizer, number, fails):
    """A batch of a loop that goes on after exceptions; whether it came to its step."""
    try:
        square_loss(engine, number).backward()
        if fails:
            raise StopError
        optimizer.step()
    except StopError:
        return False
    finally:
        optimizer.zero_grad()
    return True


@pytest.mark.long_where(stage=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_leaves_out_a_step_is_an_error_on_all_ranks(ranks, stage):
    for _, error in ranks(2, go_on, stage):
        assert error
        assert "step of the optimizer" in error or stage > 0, error
    assert "left out a step" in error or stage == 3, error
