"""Optimizers, parameter groups and LR schedules: stopped and resumed is the same as never stopped."""

import functools
import re

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from tests.checkpoint.runs import build, differences, maker, refused, saved, start, state, train
from tests.distributed.training import different
from tests.ranks import on_ranks

BEFORE, AFTER = range(2), range(2, 4)


def rates(engine):
    """The learning rate of each parameter, wherever its group stands."""
    return {p.fqn: group["lr"] for group in engine.optimizer.param_groups for p in group["params"]}


def follow(engine):
    """Learning rates and loss of each step after the stop."""
    return [(rates(engine), *train(engine, [number])) for number in AFTER]


def stopped_and_resumed(folder, make, configs=(3,), remake=None, scheduler=None):
    """Where a run that was stopped at stage 3 and resumed with each config differs from one that was not."""
    engine = saved(folder, 3, make, lr_scheduler=scheduler)
    steps, end = follow(engine), state(engine)
    found = []
    for config in configs:
        engine = start(config, remake or make, seed=1, lr_scheduler=scheduler)
        engine.load_checkpoint(folder)
        found += [(a, b) for a, b in zip(follow(engine), steps, strict=True) if a != b]
        got = state(engine)
        if remake is not None:  # in other groups
            got.values = end.values = {}
        found += differences(got, end)
    return found


# --------------------------------------------------------------------------------------------- optimizers


@on_ranks(2)
def test_an_optimizer_goes_on_to_the_bit_at_its_own_and_another_stage(tmp_path):
    """The fuzz has others."""
    make = maker("AdamW", amsgrad=True, lr=torch.tensor(1e-2))
    return stopped_and_resumed(tmp_path, make, configs=(3, 0), scheduler=cosine)


@on_ranks(1)
def test_how_a_step_is_computed_is_the_resumed_runs_own_choice(tmp_path):
    """Saved by the default kernels, resumed by the fused ones: `step` is where each expects it, and `lr`."""
    engine = saved(tmp_path, 3, maker("AdamW", lr=torch.tensor(1e-2)))
    want = train(engine, AFTER)
    engine = start(3, maker("AdamW", fused=True), seed=1)
    engine.load_checkpoint(tmp_path)
    (group,) = engine.optimizer.param_groups
    assert (group["fused"], type(group["lr"])) == (True, float)
    got = train(engine, AFTER)
    assert got == pytest.approx(want, rel=1e-5)


ADAGRAD = maker("Adagrad", initial_accumulator_value=0.1)


@on_ranks(2)
def test_a_model_alone_is_saved_and_loaded(tmp_path):
    """A checkpoint of a model alone, loaded with an optimizer, and the other way round."""
    alone = start(3, None)
    alone.save_checkpoint(tmp_path)
    want = train(start(3, ADAGRAD), AFTER)
    engine = start(3, ADAGRAD, seed=1)
    with pytest.warns(UserWarning, match="holds no optimizer state: the optimizer keeps"):
        engine.load_checkpoint(tmp_path)
    assert train(engine, AFTER) == want
    engine.save_checkpoint(tmp_path)
    alone.load_checkpoint(tmp_path)
    return different(alone.full_state_dict(), engine.full_state_dict())


@on_ranks(1)
def test_parameters_that_no_saved_optimizer_had_keep_their_present_state(tmp_path):
    """Saved with an optimizer over the blocks, loaded with one over everything."""
    blocks = {f"blocks.{name}" for name, _ in build().blocks.named_parameters()}
    saved(tmp_path, 3, lambda model: maker("Adagrad")(model.blocks))
    other = start(3, maker("Adagrad"), seed=1)
    other.load_checkpoint(tmp_path)
    steps = {p.fqn: float(values["step"]) for p, values in other.optimizer.state.items()}
    train(other, AFTER)
    assert {name for name, count in steps.items() if count == len(BEFORE)} == blocks
    assert {count for name, count in steps.items() if name not in blocks} == {0}


@on_ranks(1)
def test_states_of_another_optimizer_are_refused_unless_they_mean_the_same_and_that_is_asked_for(tmp_path):
    engine = saved(tmp_path)
    for name, options, converts in (("SGD", {"momentum": 0.9}, True), ("Adam", {}, False)):
        other = start(3, maker(name, **options), seed=1)
        said = refused(other, tmp_path, convert_states=converts)
        assert f"holds states of AdamW; the engine has {name}" in said
    other.load_checkpoint(tmp_path, convert_states=True)
    assert not any(group["decoupled_weight_decay"] for group in other.optimizer.param_groups)  # as in Adam
    want = state(engine)
    return [line for line in differences(state(other), want) if not line.startswith("groups")]


# ------------------------------------------------------------------------------------------------- groups


def in_groups(model, order=(0, 1, 2), others=(0.0, 0.0)):
    """Blocks, the embedding, and all others in two groups of one learning rate and of these decays."""
    named = dict(model.named_parameters())
    blocks = [p for name, p in named.items() if name.startswith("blocks")]
    rest = [p for name, p in named.items() if not name.startswith("blocks") and name != "tokens.weight"]
    groups = [
        {"params": blocks, "lr": 3e-3, "weight_decay": 0.3},
        {"params": [model.tokens.weight], "lr": 5e-3, "betas": (0.5, 0.9)},
        {"params": rest[::2], "weight_decay": others[0]},
        {"params": rest[1::2], "weight_decay": others[1]},
    ]
    if len(order) < len(groups):  # the last two as one
        groups[2:] = [{"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([groups[index] for index in order], lr=1e-2)


SPLIT = functools.partial(in_groups, order=(0, 1, 2, 3))


BLOCKS, TOKENS, REST = (3e-3, 0.3, (0.9, 0.999)), (5e-3, 0.01, (0.5, 0.9)), (1e-2, 0.0, (0.9, 0.999))
SPLIT_AND_REORDERED = functools.partial(in_groups, order=(3, 1, 0, 2)), [REST, TOKENS, BLOCKS, REST]


MERGED = pytest.param(in_groups, [BLOCKS, TOKENS, REST], marks=pytest.mark.long)


@pytest.mark.parametrize(("remake", "expected"), [MERGED, SPLIT_AND_REORDERED])
@on_ranks(2)
def test_groups_that_were_reordered_split_or_merged_go_on_to_the_bit(tmp_path, remake, expected):

    def remade(model):
        optimizer = remake(model)
        for group in optimizer.param_groups:
            group.update(lr=1.0, weight_decay=1.0, betas=(0.0, 0.0))
        return optimizer

    found = stopped_and_resumed(tmp_path, SPLIT, (3,), remake)
    engine = start(3, remade)
    engine.load_checkpoint(tmp_path)
    got = [(group["lr"], group["weight_decay"], group["betas"]) for group in engine.optimizer.param_groups]
    assert (found, got) == ([], expected)


@on_ranks(1)
def test_merging_groups_of_different_hyperparameters_is_refused_unless_the_present_ones_are_kept(tmp_path):
    engine = saved(tmp_path, 3, functools.partial(SPLIT, others=(0.0, 0.5)))
    merged = start(3, in_groups, seed=1)
    before = state(merged)
    said = refused(merged, tmp_path)
    assert re.search(r"group 2: in the .* weight_decay=0\.0 and.* restore_hyperparameters=F", said)
    merged.load_checkpoint(tmp_path, restore_hyperparameters=False)
    got, want = state(merged), state(engine)
    assert got.values["groups"] == before.values["groups"]
    got.values, want.values = {}, {}
    return differences(got, want)


# ---------------------------------------------------------------------------------------------- schedules


def cosine(optimizer):
    return CosineAnnealingLR(optimizer, 20)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, [1e-2, 2e-2, 3e-2], total_steps=12)


@on_ranks(1)
def test_another_schedule_is_refused_unless_it_is_to_stay(tmp_path):
    saved(tmp_path, 3, in_groups, lr_scheduler=cosine)
    other = start(3, in_groups, seed=1, lr_scheduler=one_cycle)
    rates = other.lr_scheduler.get_last_lr()
    said = refused(other, tmp_path)
    assert "holds the state of a CosineAnnealingLR; the engine has a OneCycle" in said
    other.load_checkpoint(tmp_path, restore_hyperparameters=False)
    assert other.lr_scheduler.get_last_lr() == rates
    assert other.global_step == len(BEFORE)
    train(other, AFTER)
