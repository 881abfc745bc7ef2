"""Micro-batches of one step.

Stages 0 and 1, and every stage under no_sync, add up locally and reduce once, as DDP's no_sync does: the
same bits. Stages 2 and 3 reduce each micro-batch and add the shards: their additions have another order,
so gradients are within 1e-6 of a tensor's norm, and the two agree with each other to the bit.
"""

import contextlib
import copy

from tests.distributed.training import (
    ALL_STAGES,
    build,
    differences,
    distances,
    finish,
    flat_gradients,
    full_gradients,
    replicate,
    start,
    token_loss,
)
from tests.ranks import on_ranks

NUM_STEPS, K = 3, 3


# -------------------------------------------------------------------------------------- gradients on the way


def in_one_backward(model, numbers, scale):
    """DDP's gradients of several batches: forward and backward of each, the last one synchronized."""
    replica = replicate(model)
    for number in numbers:
        with contextlib.nullcontext() if number == numbers[-1] else replica.no_sync():
            (token_loss(replica, number) * scale).backward()
    return flat_gradients(replica)


@on_ranks(2)
def test_accumulated_gradients_are_those_of_ddp():
    model, found = build("tied GPT"), {}
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
    assert max(found.values()) <= 1e-6, found


# -------------------------------------------------------------------------------------------------- zero_grad


@on_ranks(2)
def test_zero_grad_forgets_local_sums_and_starts_the_count_again():
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
