"""Micro-batches of one step, and all ways to forget gradients, also those that one rank has added up alone.

Stages 0 and 1, and every stage under no_sync, add up locally and reduce once, as DDP's no_sync does: the
same bits. Stages 2 and 3 reduce each micro-batch and add the shards: their additions have another order,
so gradients are within 1e-6 of a tensor's norm, and the two agree with each other to the bit.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.models import Layered
from tests.distributed.training import (
    ALL_STAGES,
    STAGES,
    caught,
    differences,
    distances,
    finish,
    flat_gradients,
    full_gradients,
    numbers,
    plain,
    replicate,
    small_gpt,
    square_loss,
    start,
    take_steps,
    token_loss,
    unequal,
)
from tests.ranks import on_ranks

K = 3


def in_one_backward(model, numbers, scale):
    """DDP's gradients of several batches: forward and backward of each, the last one synchronized."""
    replica = replicate(model)
    for number in numbers:
        with contextlib.nullcontext() if number == numbers[-1] else replica.no_sync():
            (token_loss(replica, number) * scale).backward()
    return flat_gradients(replica)


@on_ranks(2)
def test_accumulated_gradients_are_those_of_ddp():
    model, found = small_gpt(), {}
    want = in_one_backward(model, range(K), 1 / K)
    for stage in ALL_STAGES:
        engine, _ = start(copy.deepcopy(model), "SGD", stage=stage, gradient_accumulation_steps=K)
        for number in range(K):
            engine.backward(token_loss(engine, number))
            if number < K - 1:
                engine.step()
        found[f"stage {stage}"] = max(distances(full_gradients(engine), want).values())

        engine, _ = start(copy.deepcopy(model), "SGD", stage=stage)
        for number in range(K):  # plain PyTorch: every backward reduces
            (token_loss(engine, number) / K).backward()
        found[f"stage {stage}, plain"] = max(distances(full_gradients(engine), want).values())
    assert max(found.values()) <= 1e-6, found


@on_ranks(2)
def test_sums_that_no_sync_left_are_reduced_by_the_next_backward_or_step():
    model, found = small_gpt(), {}
    want = in_one_backward(model, range(4), 1.0)
    for stage in STAGES:
        for name, deferred in {"all": {0, 1, 2, 3}, "last": {2, 3}, "middle": {1, 2}}.items():
            engine, optimizer = start(copy.deepcopy(model), "SGD", stage=stage)
            seen = {}
            optimizer.register_step_pre_hook(lambda *_, s=seen, e=engine: s.update(full_gradients(e)))
            for number in range(4):
                with engine.no_sync() if number in deferred else contextlib.nullcontext():
                    token_loss(engine, number).backward()
            optimizer.step()
            found[stage, name] = max(distances(seen, want).values())
    assert max(found.values()) <= 1e-6, found


@on_ranks(2)
def test_zero_grad_forgets_local_sums_and_starts_the_count_again():
    """As in a run that never had what was forgotten."""
    for stage in STAGES:
        runs = []
        for wasted in (0, 2):
            engine, _ = start(small_gpt(), stage=stage, gradient_accumulation_steps=K)
            take_steps(engine, range(10, 10 + wasted), token_loss)
            engine.zero_grad()
            assert all(p.grad is None for p in engine.parameters())
            for number in range(K):
                engine.backward(token_loss(engine, number))
                assert engine.step() == (number == K - 1)
            runs.append(finish(engine, []))
        for run in runs[1:]:
            assert not differences(f"stage {stage}", run, runs[0])


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))


def loss_of(model, number):
    return model(numbers(number, 4, 7)).float().square().mean()


def pair(*scales):
    """Two engines; a loss scale stands for float16."""
    half = [{"param_dtype": "fp16", "loss_scale": scale} if scale else {} for scale in scales]
    return [start(net(seed), units=["Linear"], precision=precision)[0] for seed, precision in enumerate(half)]


@on_ranks(2)
def test_a_scaled_backward_that_comes_to_another_engine_is_refused():
    for scales in ((2.0**8, None), (2.0**8, 2.0**8)):
        first, second = engines = pair(*scales)
        said = caught(lambda: first.backward(loss_of(first, 0) + loss_of(second, 0)))  # noqa: B023
        assert "of another engine, which does not know the scale" in said
        for engine, alone in zip(engines, pair(*scales), strict=True):
            engine.zero_grad()
            for one in (engine, alone):
                one.backward(loss_of(one, 1))
            assert not list(unequal("", full_gradients(engine), full_gradients(alone)))


@on_ranks(2)
def test_the_number_of_micro_batches_is_checked_and_kept_within_a_step():
    engine, _ = start(net(), gradient_accumulation_steps=2)
    for value in (0, -1, 1.5, True, None, "2"):
        with pytest.raises((TypeError, ValueError), match="expected an integer >= 1"):
            engine.set_gradient_accumulation_steps(value)
    engine.backward(loss_of(engine, 0))
    for act in (engine.step, engine.zero_grad):
        with pytest.raises(RuntimeError, match="in the middle of a step: its gradients are divided by 2"):
            engine.set_gradient_accumulation_steps(3)
        act()
    engine.set_gradient_accumulation_steps(3)
    assert (engine.gradient_accumulation_steps(), engine.config.gradient_accumulation_steps) == (3, 2)


WAYS = {
    "the model": lambda model: model.zero_grad(),
    "the model, to zeros": lambda model: model.zero_grad(set_to_none=False),
}


def set_none(model):
    for parameter in model.parameters():
        parameter.grad = None


OTHER_WAYS = {
    "a unit": lambda model: model.blocks[0].zero_grad(),
    "a part of a unit, to zeros": lambda model: model.blocks[0][2].zero_grad(set_to_none=False),
    "p.grad = None": set_none,
    "another optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
}


def two_backwards(model, forget):
    """One that sends nothing, and one that does."""
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        (100 * square_loss(model, 0)).backward()
    forget(plain(model))
    square_loss(model, 1).backward()


@pytest.mark.parametrize(
    ("num_ranks", "precision"), [(2, {}), pytest.param(1, {"main_dtype": "bf16"}, marks=pytest.mark.long)]
)
@on_ranks(timeout=120)
def test_gradients_that_were_forgotten_do_not_come_back(precision):
    """1e-6: the sum of two micro-batches is divided by the number of ranks; DDP divides before.

    Where gradients are not those of DDP.
    """
    found = []
    for name, forget in WAYS.items():
        replica = replicate(Layered(), find_unused=True)
        two_backwards(replica, forget)
        want = flat_gradients(replica)
        engine, _ = start(Layered(), "SGD", precision=precision)
        two_backwards(engine, forget)
        far = distances(full_gradients(engine), want)
        found += [(name, p, off) for p, off in far.items() if off > (2e-2 if precision else 1e-6)]
    return found


@on_ranks(2)
def test_other_ways_are_refused_while_sums_wait():
    engine, _ = start(Layered(), "SGD", stage=1)
    with engine.no_sync():
        square_loss(engine, 0).backward()
    for forget in OTHER_WAYS.values():
        with pytest.raises(RuntimeError, match=r"call zero_grad\(\) of the engine"):
            forget(plain(engine))


@on_ranks(2)
def test_a_sharded_model_without_engine_drops_sums_and_is_given_up_with_them():
    """The norm of all gradients; 1e-5: sums of squares in another order."""
    want, engine = replicate(Layered(), find_unused=True), Layered()
    sharded = zeroshard.shard(engine, {"stage": 3})
    two_backwards(want, WAYS["the model"])
    with sharded.no_sync():
        (100 * square_loss(engine, 0)).backward()
    engine.zero_grad()
    square_loss(engine, 1).backward()
    total = sum(p.grad.square().sum() for p in engine.parameters() if p.grad is not None)
    dist.all_reduce(total)
    own = sum(p.grad.square().sum() for p in want.parameters() if p.grad is not None)
    with sharded.no_sync():
        square_loss(engine, 0).backward()
    sharded.close(restore=False)  # also with sums that wait
    torch.testing.assert_close(total, own, rtol=1e-5, atol=0)


@on_ranks(1, 2)
def test_a_gradient_that_lacks_sums_is_not_read(num_ranks):
    engine, _ = start(Layered(), "SGD", stage=3)
    square_loss(engine, 0).backward()
    for hides in (False, True):
        with engine.no_sync() if hides else contextlib.nullcontext():
            square_loss(engine, 1).backward()
        said = caught(lambda: [parameter.grad for parameter in engine.parameters()])
        waits = "lacks gradients of micro-batches that wait for a reduction"
        assert waits in said if hides and num_ranks > 1 else said == "nothing was raised"
