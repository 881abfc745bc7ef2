"""Loops that people write, over a divided model, train as in one process."""

import pytest
import torch.distributed as dist

from tests.parallel.runs import (
    STEPS,
    Run,
    adamw,
    build,
    compare,
    digests,
    initialize,
    loss_of,
    own_part,
    plain,
)

TP2 = {"mesh": {"tp": 2}}


class BurnedError(Exception):
    """An error inside a layer."""


def own_loss(engine, number, micro=0, of=1):
    return loss_of(engine, number, own_part(engine._axes.dp, micro, of))


def by_engine(engine, number):
    engine.backward(own_loss(engine, number))
    engine.step()


def check(runs, steps=STEPS):
    compare(runs, plain(adamw, steps=steps)._replace(losses=[], norms=[]), losses=0, norms=0, values=1e-8)


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
@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 3), (4, 2)])
def test_a_backward_that_fails_on_one_tensor_rank_after_its_last_exchange_is_an_error_on_all(
    ranks, num_ranks, stage
):
    results = ranks(num_ranks, one_rank_fails, "tokens.weight", stage)
    *others, (last, _) = results
    assert last == ["burned", True]
    for (text, is_same), _ in others:
        assert "backward of another rank has ended in an exception" in text
        assert is_same
    check([run for _, run in results], steps=2)
