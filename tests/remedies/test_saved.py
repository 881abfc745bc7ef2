"""Remedies in errors about checkpoints and models without memory are followed, and they work."""

import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import zeroshard
from tests.distributed.models import Tiny
from tests.remedies.told import (
    adamw,
    loss_of,
    net,
    same,
    start,
    take_step,
    told,
    trained,
    trains,
    warned,
    whole,
)


def test_a_model_without_memory_is_filled():
    class Plain(nn.Module):
        """It has no `reset_parameters`, as torch.nn.Linear has."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(7, 7))

        def forward(self, x):
            return x @ self.weight

    class Resets(Plain):
        def reset_parameters(self):
            with torch.no_grad():
                self.weight.fill_(1.0)

    with torch.device("meta"):
        model, resets = Plain(), Resets()
    words = "under zeroshard.deferred_init() without device='meta', or give Plain a reset_parameters()"
    with told(words):
        start(model)
    with zeroshard.deferred_init():
        model = Plain()
    trains(start(model), Plain())
    trains(start(resets), Plain())


def test_a_deferred_model_is_initialized_inside_the_block_and_sharded_after():
    with zeroshard.deferred_init():
        model = nn.Linear(7, 7)
        with told("build the model in the block, and call initialize after it"):
            start(model)
    nn.init.ones_(model.weight)
    with told("expected weights to be initialized inside the block"):
        start(model)
    with zeroshard.deferred_init():
        model = nn.Linear(7, 7)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
    want = nn.Linear(7, 7)
    nn.init.ones_(want.weight), nn.init.ones_(want.bias)
    trains(start(model), want)


def test_a_model_without_memory_is_pickled_after_close():
    with zeroshard.deferred_init():
        model = nn.Linear(7, 7)
    with told("pickle it after engine.close(), or save engine.full_state_dict()"):
        pickle.dumps(model)
    engine = start(model)
    saved = whole(engine)
    engine.close()
    same(pickle.loads(pickle.dumps(model)).state_dict(), saved)


def test_a_checkpoint_is_saved_between_steps(tmp_path):
    for end, num_steps in (("step", 1), ("zero_grad", 0)):
        engine = start(gradient_accumulation_steps=2)
        take_step(engine)
        with told("End the step with backward() and step(), or drop it with zero_grad()"):
            engine.save_checkpoint(tmp_path / end)
        take_step(engine) if end == "step" else engine.zero_grad()
        engine.save_checkpoint(tmp_path / end)
        other = start(gradient_accumulation_steps=2)
        other.load_checkpoint(tmp_path / end)
        same(whole(other), trained(losses=[loss_of] * num_steps))


def test_a_checkpoint_of_another_optimizer_is_converted(tmp_path):
    engine = start()
    take_step(engine)
    engine.save_checkpoint(tmp_path)
    other = start(
        optimizer=lambda parameters: zeroshard.optim.AdamW8bit(parameters, lr=1e-2, min_8bit_size=1)
    )
    with told("expected the same optimizer, or convert_states=True"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, convert_states=True)
    same(whole(other), trained())
    states = other.full_optimizer_state("inner.weight")["exp_avg"]
    want = engine.full_optimizer_state("inner.weight")["exp_avg"]
    torch.testing.assert_close(states, want, atol=want.abs().max().item() / 50, rtol=0)


def test_another_schedule_is_kept(tmp_path):
    def scheduled(make):
        optimizer = adamw((model := net()).parameters())
        return zeroshard.initialize(model, optimizer, lr_scheduler=make(optimizer)).engine

    engine = scheduled(lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    take_step(engine)
    engine.save_checkpoint(tmp_path)
    other = scheduled(lambda optimizer: LambdaLR(optimizer, lambda step: 0.1))
    with told(
        "expected the same LR scheduler, or restore_hyperparameters=False to keep the present schedule"
    ):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, restore_hyperparameters=False)
    same(whole(other), trained())
    assert other.get_lr() == pytest.approx([0.001])
    again = scheduled(lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    again.load_checkpoint(tmp_path)
    assert again.get_lr() == [0.005]


def test_a_frozen_base_is_the_same_or_saved(tmp_path):
    def based(seed, frozen):
        torch.manual_seed(seed)
        model = Tiny()
        model.inner.requires_grad_(False)
        return start(model, checkpoint={"frozen": frozen})

    based(0, False).save_checkpoint(tmp_path / "without")
    with told("Build it from the same base, or save with Checkpoint(frozen=True)"):
        based(1, False).load_checkpoint(tmp_path / "without")
    engine = based(0, False)
    engine.load_checkpoint(tmp_path / "without")
    same(whole(engine), net().state_dict())
    based(0, True).save_checkpoint(tmp_path / "with")
    engine = based(1, False)
    engine.load_checkpoint(tmp_path / "with")
    same(whole(engine), net().state_dict())


def test_averages_are_made_before_they_are_loaded(tmp_path):
    engine = start()
    average = zeroshard.EMA(engine, decay=0.5)
    take_step(engine)
    engine.save_checkpoint(tmp_path)
    other = start()
    with warned("Make the zeroshard.EMA of the engine before load_checkpoint()"):
        other.load_checkpoint(tmp_path)
    other = start()
    loaded = zeroshard.EMA(other, decay=0.5)
    other.load_checkpoint(tmp_path)
    with average.applied(), loaded.applied():
        same(whole(other), whole(engine))


def test_ignored_parameters_are_client_state(tmp_path):
    engine = start(ignored=["gain"])
    with warned("Give them as client_state if they are the same on all ranks"):
        engine.save_checkpoint(tmp_path / "without")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save_checkpoint(tmp_path, client_state={"gain": engine.module.gain.detach().clone()})
    other = start(ignored=["gain"])
    assert torch.equal(other.load_checkpoint(tmp_path)["gain"], torch.ones(()))


def test_a_slice_stays_out_of_client_state(tmp_path):
    engine = start()
    with told("expected tensors, numbers, strings, None, and lists, tuples and dicts of them"):
        engine.save_checkpoint(tmp_path, client_state={"weight": engine.module.inner.weight})
    engine.save_checkpoint(tmp_path, client_state={})
    other = start()
    other.load_checkpoint(tmp_path)
    same(whole(other), net().state_dict())
