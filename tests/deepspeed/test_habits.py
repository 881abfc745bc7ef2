"""An engine has the names of DeepSpeed's, and the attributes of its model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import caught, numbers
from tests.ranks import on_ranks


class Net(nn.Module):
    hidden_size = 8

    def __init__(self):
        super().__init__()
        self.layer, self.config = nn.Linear(7, 3), {"pad_token_id": 5}

    def forward(self, inputs):
        return self.layer(inputs)

    def describe(self):
        return "a net"

    def encode(self, inputs):
        return self.layer(inputs)


def start(stage, **config):
    model = Net()
    return zeroshard.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": stage, **config}
    ).engine


@on_ranks(2)
def test_scripts_of_deepspeed_find_its_names():
    engine = start(3, gradient_accumulation_steps=2, micro_batch_size=3, clip_grad_norm=0.5)
    for number in range(2):
        engine.backward(engine(numbers(number, 5, 7)).square().mean())
        assert engine.is_gradient_accumulation_boundary() == (number == 1)
        engine.step()
    assert engine.device.type == "cpu"
    assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (dist.get_rank(), 2, 2)
    assert (engine.gradient_accumulation_steps(), engine.skipped_steps, engine.get_lr()) == (2, 0, [0.1])


@on_ranks(1)
def test_a_script_may_tell_where_a_step_ends_and_divide_the_loss_itself():
    """tests/integrations compares such steps with those of DDP."""
    engine = start(3, gradient_accumulation_steps=2)
    for number in range(3):
        engine.set_gradient_accumulation_boundary(number == 2)
        engine.backward(engine(numbers(number, 5, 7)).square().mean() / 3, scale_wrt_gas=False)
        assert engine.step() == (number == 2)
    with pytest.raises(RuntimeError, match=r"train_batch\(\) counts"):
        engine.train_batch(1)
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary()


@on_ranks(2)
def test_any_other_name_is_the_models_and_its_methods_do_not_compute_with_slices():
    engine = start(3)
    assert (engine.hidden_size, engine.describe(), engine.layer) == (8, "a net", engine.module.layer)
    assert engine.module.config == {"pad_token_id": 5}
    assert not hasattr(engine, "vocabulary")
    assert "'Config' object has no attribute 'pad_token_id'" in caught(lambda: engine.config.pad_token_id)
    assert "'vocabulary'" in caught(lambda: engine.vocabulary)
    computing = caught(engine.encode, numbers(0, 5, 7))
    assert "'layer.weight'" in computing
    assert "register_forward_method" in computing
