"""Remedies in errors about checkpoints and models without memory are followed, and they work."""

import warnings

import torch
from torch import nn

import zeroshard
from tests.remedies.told import (
    start,
    told,
    trains,
    warned,
)


def test_a_deferred_model_is_sharded_after_the_block():
    with zeroshard.deferred_init():
        model = nn.Linear(7, 7)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        with told("build the model in the block, and call initialize after it"):
            start(model)
    want = nn.Linear(7, 7)
    nn.init.ones_(want.weight), nn.init.ones_(want.bias)
    trains(start(model), want)


def test_ignored_parameters_are_client_state(tmp_path):
    engine = start(ignored=["gain"])
    with warned("Give them as client_state if they are the same on all ranks"):
        engine.save_checkpoint(tmp_path / "without")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save_checkpoint(tmp_path, client_state={"gain": engine.module.gain.detach().clone()})
    other = start(ignored=["gain"])
    assert torch.equal(other.load_checkpoint(tmp_path)["gain"], torch.ones(()))
