"""Loops that people write, over a divided model, train as in one process."""

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from tests.parallel.runs import STEPS, Run, check_same, digests, initialize, own_part, plain
from tests.parallel.test_divided import adamw, build, loss_of

TP2 = {"mesh": {"tp": 2}}


class BurnedError(Exception):
    """An error inside a layer."""


def own_loss(engine, number, micro=0, of=1):
    return loss_of(engine, number, own_part(engine._axes.dp, micro, of))


def by_engine(engine, number):
    engine.backward(own_loss(engine, number))
    engine.step()


def by_optimizer(engine, number):
    own_loss(engine, number).backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=number % 2 == 0)


def unsynced(engine, number):
    with engine.no_sync():
        (own_loss(engine, number, 0, 2) / 2).backward()
    (own_loss(engine, number, 1, 2) / 2).backward()
    engine.optimizer.step()
    engine.zero_grad()


def evaluating(engine, number):
    engine.eval()
    with torch.no_grad():
        before = own_loss(engine, number)
    engine.train()
    loss = own_loss(engine, number)
    assert torch.equal(before, loss.detach())
    engine.backward(loss)
    engine.step()


def failing(where):
    def train(engine, number):
        def burn(*_):
            raise BurnedError

        block = engine.module.blocks[1]
        if where == "forward":
            hook = block.down.register_forward_pre_hook(burn)
        else:
            hook = block.second.register_full_backward_pre_hook(burn)
        with suppress(BurnedError):
            engine.backward(own_loss(engine, 9))
        hook.remove()
        engine.zero_grad()
        by_engine(engine, number)

    return train


def in_reference(engine, number):
    """Gradients and values are whole inside of unsharded()."""
    loss = own_loss(engine, number)
    engine.backward(loss)
    total = engine.clip_grad_norm_(1e9)
    assert torch.isfinite(total)
    engine.step()


LOOPS = {
    "engine": by_engine,
    "optimizer": by_optimizer,
    "no_sync": unsynced,
    "evaluation": evaluating,
    "clip_grad_norm_": in_reference,
    "failed forward": failing("forward"),
    "failed backward": failing("backward"),
}


def train(loop, config):
    engine = initialize(build(dist.get_rank()), adamw, config)
    for number in range(STEPS):
        LOOPS[loop](engine, number)
    whole, state = digests(engine), engine.full_state_dict()
    engine.close(restore=False)
    return Run([], [], state, whole)


@pytest.mark.long_where(loop=["engine"])
@pytest.mark.long_where(
    stage=[1, 2, 3], loop=["optimizer", "evaluation", "clip_grad_norm_", "failed forward"]
)
@pytest.mark.long_where(stage=[0, 1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [4])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_as_in_one_process(ranks, loop, num_ranks, stage):
    check(ranks(num_ranks, train, loop, {"stage": stage, **TP2}))


@pytest.mark.long
@pytest.mark.parametrize("loop", ["engine", "no_sync", "failed backward"])
@pytest.mark.parametrize(
    "more",
    [
        {"stage": 1, "shard_group_size": 2},
        {"stage": 2, "shard_group_size": 2},
        {"stage": 3, "shard_group_size": 2},
        {"stage": 3, "reshard_after_forward": 2},
    ],
    ids=str,
)
def test_shard_groups_of_tensor_ranks_train_as_in_one_process(ranks, loop, more):
    check(ranks(8, train, loop, {**TP2, **more}, timeout=120))


def check(runs):
    want = plain(adamw)
    check_same(runs)
    for run in runs:
        for key, value in run.state.items():
            torch.testing.assert_close(value, want.state[key], rtol=0, atol=1e-8, msg=key)


def one_rank_fails(where, stage):
    """The exception of the last rank's backward, which it catches; the others get an error of their own."""
    engine, found = initialize(build(0), adamw, {"stage": stage, "watchdog_s": 10, **TP2}), []
    by_engine(engine, 0)
    before = digests(engine)

    def burn(gradient):
        raise BurnedError

    hook = None
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter = next(p for p in engine.parameters() if p.fqn == where)
        hook = parameter.register_hook(burn)
    try:
        engine.backward(own_loss(engine, 1))
    except BurnedError:
        found.append("burned")
    except RuntimeError as error:
        found.append(str(error))
    if hook is not None:
        hook.remove()
    engine.zero_grad()
    found.append(digests(engine) == before)
    by_engine(engine, 1)
    whole, state = digests(engine), engine.full_state_dict()
    engine.close(restore=False)
    return found, Run([], [], state, whole)


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.long_where(stage=[2])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_backward_that_fails_on_one_tensor_rank_after_its_last_exchange_is_an_error_on_all(
    ranks, num_ranks, stage
):
    results = ranks(num_ranks, one_rank_fails, "tokens.weight", stage)
    want = plain(adamw, steps=2)
    *others, (last, _) = results
    assert last == ["burned", True]
    for (text, is_same), run in others:
        assert "backward of another rank has ended in an exception" in text
        assert is_same
        for key, value in run.state.items():
            torch.testing.assert_close(value, want.state[key], rtol=0, atol=1e-8, msg=key)
    check_same([run for _, run in results])
