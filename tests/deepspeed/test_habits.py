"""An engine has the names of DeepSpeed's, and the attributes of its model."""

import pytest
import torch
from torch import nn

import zeroshard
from tests.distributed.training import caught, numbers


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


def values(stage):
    """What the engine answers under DeepSpeed's names, in a step of two micro-batches."""
    engine = start(stage, gradient_accumulation_steps=2, micro_batch_size=3, clip_grad_norm=0.5)
    boundaries = []
    for number in range(2):
        engine.backward(engine(numbers(number, 5, 7)).square().mean())
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    return {
        "boundaries": boundaries,
        "device": engine.device.type,
        "ranks": (engine.global_rank, engine.world_size, engine.dp_world_size),
        "steps": (engine.gradient_accumulation_steps(), engine.skipped_steps, engine.get_lr()),
    }


def test_scripts_of_deepspeed_find_its_names(ranks):
    for rank, got in enumerate(ranks(2, values, 3)):
        assert got == {
            "boundaries": [False, True],
            "device": "cpu",
            "ranks": (rank, 2, 2),
            "steps": (2, 0, [0.1]),
        }


def accumulate(stage):
    """The difference to plain PyTorch after steps of three micro-batches, whose end the script tells."""
    engine, plain = start(stage, gradient_accumulation_steps=2), Net()
    with engine.unsharded():
        plain.load_state_dict(engine.module.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    taken = []
    for number in range(6):
        engine.set_gradient_accumulation_boundary(number % 3 == 2)
        engine.backward(engine(numbers(number, 5, 7)).square().mean() / 3, scale_wrt_gas=False)
        everyone = torch.cat([numbers(number, 5, 7, rank=rank) for rank in range(2)])
        (plain(everyone).square().mean() / 3).backward()
        taken.append(engine.step())
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"train_batch\(\) counts"):
        engine.train_batch(1)
    engine.set_gradient_accumulation_boundary(None)
    with engine.unsharded():
        differences = [
            (mine - theirs).abs().max().item()
            for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True)
        ]
    return taken, engine.is_gradient_accumulation_boundary(), max(differences)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_script_may_tell_where_a_step_ends_and_divide_the_loss_itself(ranks, stage):
    for taken, counts_two, difference in ranks(2, accumulate, stage):
        assert taken == [False, False, True] * 2
        assert not counts_two
        assert difference < 1e-6


def attributes():
    """What the engine has of its model's; and the errors of what neither has."""
    engine = start(3)
    facts = [engine.hidden_size == 8, engine.describe() == "a net", engine.layer is engine.module.layer]
    facts += [not hasattr(engine, "vocabulary"), engine.module.config == {"pad_token_id": 5}]
    return facts, [
        caught(lambda: engine.config.pad_token_id),
        caught(lambda: engine.vocabulary),
        caught(engine.encode, numbers(0, 5, 7)),
    ]


def test_any_other_name_is_the_models_and_its_methods_do_not_compute_with_slices(ranks):
    for facts, (config, missing, computing) in ranks(2, attributes):
        assert all(facts)
        assert "'Config' object has no attribute 'pad_token_id'" in config
        assert "'vocabulary'" in missing
        assert "'layer.weight'" in computing
        assert "register_forward_method" in computing
