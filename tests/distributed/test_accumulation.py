"""Micro-batches of one step.

Stages 0 and 1, and every stage under no_sync, add up locally and reduce once, as DDP's no_sync does: the
same bits. Stages 2 and 3 reduce each micro-batch and add the shards: their additions have another order,
so gradients are within 1e-6 of a tensor's norm, and the two agree with each other to the bit.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn

from tests.distributed.training import (
    ALL_STAGES,
    build,
    differences,
    distances,
    finish,
    flat_gradients,
    full_gradients,
    replicate,
    square_loss,
    start,
    token_loss,
    unequal,
)

NUM_STEPS, K = 3, 3


def in_ddp(model):
    replica, losses = replicate(model), []
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3)
    for number in range(NUM_STEPS * K):
        is_last = number % K == K - 1
        with contextlib.nullcontext() if is_last else replica.no_sync():
            loss = token_loss(replica, number)
            (loss / K).backward()
        losses.append(loss.item())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return finish(replica, losses)


def by_engine(model, stage, changed):
    """Through engine.backward and engine.step; `changed` takes what step() returns."""
    engine, _ = start(copy.deepcopy(model), stage=stage, gradient_accumulation_steps=K)
    losses = []
    for number in range(NUM_STEPS * K):
        loss = token_loss(engine, number)
        engine.backward(loss)
        losses.append(loss.item())
        changed.append((engine.step(), engine.global_step))
    return finish(engine, losses)


def under_no_sync(model, stage):
    engine, optimizer = start(copy.deepcopy(model), stage=stage)
    losses = []
    for number in range(NUM_STEPS * K):
        is_last = number % K == K - 1
        with contextlib.nullcontext() if is_last else engine.no_sync():
            loss = token_loss(engine, number)
            (loss / K).backward()
        losses.append(loss.item())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return finish(engine, losses)


def accumulate(kind):
    """(differences from DDP and between stages, what step() returned)"""
    model = build(kind)
    want, changed, found = in_ddp(model), [], []
    runs = [by_engine(model, stage, changed) for stage in ALL_STAGES]
    for stage in (0, 1):
        found += differences(f"stage {stage}", runs[stage], want)
    found += differences("stage 3 and 2", runs[3], runs[2])
    for stage in ALL_STAGES:
        found += differences(f"stage {stage}, no_sync", under_no_sync(model, stage), want)
    return found, changed


@pytest.mark.long_where(kind=["Llama"])
@pytest.mark.parametrize("kind", ["tied GPT", "Llama"])
def test_micro_batches_add_up_as_under_no_sync_of_ddp_and_only_the_last_one_steps(ranks, kind):
    steps = [(last, number + last) for number in range(NUM_STEPS) for last in (False, False, True)]
    assert ranks(2, accumulate, kind) == [([], 4 * steps)] * 2


def stages_alike(kind):
    runs = [by_engine(build(kind), stage, []) for stage in ALL_STAGES]
    return differences("0 and 1", runs[0], runs[1]) + differences("2 and 3", runs[2], runs[3])


@pytest.mark.long
def test_stages_that_add_in_the_same_order_agree_to_the_bit_on_three_ranks(ranks):
    assert ranks(3, stages_alike, "tied GPT") == [[]] * 3


def small_run(stage, micro_batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 9))
    engine, _ = start(model, "SGD", stage=stage, gradient_accumulation_steps=micro_batches)
    for number in range(4 * micro_batches):
        engine.backward(square_loss(engine, number))
        engine.step()
    return torch.cat([engine.full_parameter(name).flatten() for name, _ in engine.named_parameters()])


def pairs_of_stages():
    one, two = ([small_run(stage, number) for stage in ALL_STAGES] for number in (1, 2))
    assert all(torch.equal(run, one[0]) for run in one)
    assert torch.equal(two[0], two[1])
    assert torch.equal(two[2], two[3])
    torch.testing.assert_close(two[2], two[0])
    return len(one), len(two)


def test_all_stages_agree_to_the_bit_with_one_micro_batch_and_two_pairs_of_stages_with_several(ranks):
    assert ranks(2, pairs_of_stages) == [(4, 4)] * 2


# -------------------------------------------------------------------------------------- gradients on the way


def in_one_backward(model, numbers, scale):
    """DDP's gradients of several batches: forward and backward of each, the last one synchronized."""
    replica = replicate(model)
    for number in numbers:
        with contextlib.nullcontext() if number == numbers[-1] else replica.no_sync():
            (token_loss(replica, number) * scale).backward()
    return flat_gradients(replica)


def gradients_of_three(kind):
    """By stage and way, the greatest distance from DDP."""
    model, found = build(kind), {}
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
    return found


def test_accumulated_gradients_are_those_of_ddp(ranks):
    for found in ranks(2, gradients_of_three, "tied GPT"):
        assert max(found.values()) <= 1e-6, found


def several_backwards():
    """Two losses a micro-batch, two micro-batches: distance from DDP, and what step() returned."""
    model, found = build("tied GPT"), {}
    want = in_one_backward(model, range(4), 1 / 2)
    for stage in ALL_STAGES:
        engine, _ = start(copy.deepcopy(model), "SGD", stage=stage, gradient_accumulation_steps=2)
        engine.backward(token_loss(engine, 0))
        engine.backward(token_loss(engine, 1))
        first = engine.step()
        engine.backward(token_loss(engine, 2))
        engine.backward(token_loss(engine, 3))
        distance = max(distances(full_gradients(engine), want).values())
        found[stage] = distance, first, engine.step()
    return found


def test_backward_may_be_called_several_times_before_a_step(ranks):
    for found in ranks(2, several_backwards):
        for distance, first, second in found.values():
            assert distance <= 1e-6
            assert (first, second) == (False, True)


def mixed_with_no_sync():
    """Distance from DDP where no_sync and reducing backwards come in any order before a plain step."""
    model, found = build("tied GPT"), {}
    want = in_one_backward(model, range(4), 1.0)
    for stage in ALL_STAGES:
        for name, deferred in {"all": {0, 1, 2, 3}, "last": {2, 3}, "middle": {1, 2}}.items():
            engine, optimizer = start(copy.deepcopy(model), "SGD", stage=stage)
            seen = {}
            optimizer.register_step_pre_hook(lambda *_, s=seen, e=engine: s.update(full_gradients(e)))
            for number in range(4):
                with engine.no_sync() if number in deferred else contextlib.nullcontext():
                    token_loss(engine, number).backward()
            optimizer.step()
            found[stage, name] = max(distances(seen, want).values())
    return found


def test_sums_that_no_sync_left_are_reduced_by_the_next_backward_or_step(ranks):
    for found in ranks(2, mixed_with_no_sync):
        assert max(found.values()) <= 1e-6, found


# -------------------------------------------------------------------------------------------------- zero_grad


def zeroed_in_between():
    """Differences from a run that never had what was forgotten."""
    model, found = build("tied GPT"), []
    for stage in ALL_STAGES:
        runs = []
        for wasted in (0, 1, 2):
            engine, _ = start(copy.deepcopy(model), stage=stage, gradient_accumulation_steps=K)
            for number in range(wasted):
                engine.backward(token_loss(engine, 10 + number))
                engine.step()
            engine.zero_grad()
            held = [p.grad is None for p in engine.parameters()]
            steps = []
            for number in range(K):
                engine.backward(token_loss(engine, number))
                steps.append(engine.step())
            runs.append(finish(engine, []))
            if not all(held) or steps != [False, False, True]:
                found.append((stage, wasted, held, steps))
        for run in runs[1:]:
            found += differences(f"stage {stage}", run, runs[0])
    return found


def test_zero_grad_forgets_local_sums_and_starts_the_count_again(ranks):
    assert ranks(2, zeroed_in_between) == [[], []]


def zeroed_under_no_sync():
    model, found = build("tied GPT"), []
    for stage in ALL_STAGES:
        engine, optimizer = start(copy.deepcopy(model), "SGD", stage=stage)
        token_loss(engine, 0).backward()
        want = full_gradients(engine)
        for forget in (optimizer.zero_grad, engine.zero_grad):
            forget()
            with engine.no_sync():
                token_loss(engine, 1).backward()
            forget()
            token_loss(engine, 0).backward()
            found += unequal(f"stage {stage}", full_gradients(engine), want)
    return found


@pytest.mark.long
def test_zero_grad_of_engine_and_of_optimizer_forget_what_no_sync_left(ranks):
    assert ranks(2, zeroed_under_no_sync) == [[], []]
