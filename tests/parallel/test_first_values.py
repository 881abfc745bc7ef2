"""Divided models begin with the values of rank 0, of a recorder or of files; each rank takes its parts."""

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.parallel.runs import adamw, build, initialize, loss_of, own_part


def values_of(how, stage):
    """The parameters after the first step of a model, and its buffers."""
    if how == "deferred":
        with zeroshard.deferred_init():
            model = build(dist.get_rank())
    else:
        model = build(dist.get_rank())
    model.register_buffer("offset", torch.full((3,), float(dist.get_rank()), dtype=torch.float64))
    engine = initialize(model, adamw, {"stage": stage, "mesh": {"tp": 2}})
    loss = loss_of(engine, 0, own_part(engine._axes.dp))
    engine.backward(loss)
    engine.step()
    offset, state = engine.module.offset.tolist(), engine.full_state_dict()
    engine.close(restore=False)
    return offset, state


@pytest.mark.long_where(how=["deferred"])
@pytest.mark.parametrize(("how", "stage"), [("in memory", 3), ("deferred", 0)])
def test_all_ranks_begin_with_the_values_of_rank_0(ranks, how, stage):
    model = build(0)
    optimizer = adamw(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    for rank, (offset, state) in enumerate(ranks(4, values_of, how, stage)):
        assert offset == [0.0] * 3
        assert rank or state.keys() == model.state_dict().keys() | {"offset"}
        for name, value in model.state_dict().items() if not rank else ():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9, msg=name)
