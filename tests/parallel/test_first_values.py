"""Divided models begin with the values of rank 0, of a recorder or of files; each rank takes its parts."""

import pytest
import torch
import torch.distributed as dist
import transformers

import zeroshard
from tests.parallel.models import GROUPED
from tests.parallel.models import tokens_of as batch
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


def from_files(folder, stage, dtype):
    model = zeroshard.from_pretrained(transformers.AutoModelForCausalLM, folder, dtype=dtype)
    engine = initialize(model.train(), adamw, {"stage": stage, "mesh": {"tp": 2}}, None)
    axis = engine._axes.dp
    tokens = batch(0).chunk(axis.size)[axis.rank]
    loss = engine(input_ids=tokens, labels=tokens).loss
    state = engine.full_state_dict()
    engine.close(restore=False)
    return (axis.sum(loss.detach(), "test") / axis.size).item(), state


@pytest.mark.long_where(dtype=[torch.float64])
@pytest.mark.parametrize(("stage", "dtype"), [(3, torch.float32), (0, torch.float64)])
def test_each_rank_reads_its_parts_of_files(ranks, tmp_path, stage, dtype):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, attention_bias=True))
    model.save_pretrained(tmp_path)
    model, tokens = model.to(dtype), batch(0)
    want = model(input_ids=tokens, labels=tokens).loss.item()
    for loss, state in ranks(4, from_files, str(tmp_path), stage, dtype):
        assert loss == pytest.approx(want, rel=1e-5)  # the loss is in float32
        for name, value in state.items():
            assert torch.equal(value, model.state_dict()[name]), name
