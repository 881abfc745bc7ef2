"""One full parameter, gradient or state by name. The fuzz reads and writes them as in plain PyTorch."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.models import Layered
from tests.distributed.training import square_loss, start
from tests.ranks import on_ranks


def eight_bits(stage):
    torch.manual_seed(0)
    model, whole = nn.Sequential(nn.Linear(80, 80)), nn.Sequential(nn.Linear(80, 80))
    whole.load_state_dict(model.state_dict())
    optimizer = zeroshard.optim.AdamW8bit(model.parameters(), lr=1e-2)
    engine = zeroshard.initialize(model, optimizer, {"stage": stage}).engine
    plain = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    values = torch.randn(4, 80, generator=torch.Generator().manual_seed(1))
    for module in (engine, whole):
        module(values).square().mean().backward()
    optimizer.step()
    plain.step()
    found = engine.full_optimizer_state("0.weight")
    want = plain.state[whole[0].weight]
    for key in ("exp_avg", "exp_avg_sq"):
        assert found[key].dtype == torch.float32
        torch.testing.assert_close(found[key], want[key], rtol=0.1, atol=0.02 * float(want[key].abs().max()))
    assert found["step"] == 1
    engine.set_full_optimizer_state("0.weight", {"exp_avg": found["exp_avg"] * 2, "step": 7})
    again = engine.full_optimizer_state("0.weight")
    bound = 0.01 * float(found["exp_avg"].abs().max())
    torch.testing.assert_close(again["exp_avg"], found["exp_avg"] * 2, rtol=0.05, atol=bound)
    assert torch.equal(again["exp_avg_sq"], found["exp_avg_sq"])
    assert again["step"] == 7
    assert isinstance(again["step"], int)


@pytest.mark.long
@on_ranks(2)
def test_states_of_8_bits_come_back_in_float32():
    for stage in (0, 1, 3):
        eight_bits(stage)


@on_ranks(2)
def test_unknown_names_and_values_that_do_not_fit_are_refused_on_all_ranks():
    (engine, _), rank = start(Layered(), stage=3), dist.get_rank()

    def refused(words, call, *args, kind=ValueError):
        with pytest.raises(kind, match=re.escape(words)):
            call(*args)

    name, whole = "blocks.0.0.weight", torch.zeros(90, 7)
    before = engine.full_parameter(name).clone()
    refused("got 'blocks.0.0.wieght'", engine.full_parameter, "blocks.0.0.wieght")
    refused("got None", engine.full_gradient, None)
    one_name = f"expected one name on all ranks, got ['blocks.1.0.weight', '{name}']"
    refused(one_name, engine.full_parameter, name if rank else "blocks.1.0.weight")
    shape = f"'{name}': expected a full tensor of shape (90, 7), got shape (630,)"
    refused(shape, engine.set_full_parameter, name, torch.zeros(630))
    different = f"ranks 0 and 1 were given different values for '{name}'"
    refused(different, engine.set_full_parameter, name, whole + rank)
    assert torch.equal(engine.full_parameter(name), before)
    refused("'frozen.weight' is frozen", engine.set_full_gradient, "frozen.weight", torch.zeros(7, 7))
    none = f"expected states of '{name}' (none before the first step), got 'exp_avg'"
    refused(none, engine.set_full_optimizer_state, name, {"exp_avg": whole})
    engine.backward(square_loss(engine, 0))
    engine.step()
    after = f"expected states of '{name}' (step, exp_avg, exp_avg_sq), got 'exp_agv'"
    refused(after, engine.set_full_optimizer_state, name, {"exp_agv": whole})
    with engine.unsharded():
        inside = "full_parameter() inside engine.unsharded()"
        refused(inside, engine.full_parameter, name, kind=RuntimeError)
