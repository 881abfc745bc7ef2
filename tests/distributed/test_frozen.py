"""Partly frozen models: what is frozen costs no gradient, no state and no reduction, and stays as it is.

The reference is DDP, to the bit on two ranks; for what is frozen and trained by turns, which DDP does not
follow, plain PyTorch with gradients averaged by hand.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zeroshard
from tests.distributed.models import Tiny
from tests.distributed.training import (
    SOME_STAGES,
    adamw,
    differences,
    finish,
    lora,
    same_as_replicated,
    square_loss,
    start,
    step,
)
from tests.ranks import on_ranks

# ------------------------------------------------------------------------------------------------ parity


@on_ranks(2, timeout=120)
def test_adapters_train_as_in_ddp_to_the_bit():
    found = {
        name: same_as_replicated(lora(**options), num_steps=2)
        for name, options in {
            "plain": {},
            "checkpoints, frozen in bf16": {"dtype": torch.bfloat16, "checkpoints": True},
            "gradients end before the first layer": {"layers_to_transform": [1]},
        }.items()
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


# ------------------------------------------------------------------------------------- memory and traffic


@on_ranks(2)
def test_frozen_units_before_all_that_is_trained_are_not_gathered_for_backward():
    """Elements gathered in a step whose first block needs no backward, and those of its two gathers."""
    model = Tiny(3)
    model.inner.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    engine, optimizer = start(model, stage=3)
    for number in range(2):
        engine.reset_comm_report()
        step(engine, optimizer, square_loss, number)
    sent = engine.comm_report().bytes_sent["all_gather"] // 4
    size = {unit.name: unit.numel // 2 for unit in engine.units}
    kept = [unit.name for unit in engine.units if unit.kept]
    want = sum(size.values()) + size["blocks.1"]
    assert kept == ["", "blocks.2"]
    assert sent == want


# ------------------------------------------------------------------------------- frozen and trained by turns


def turn(net, number):
    """What is frozen changes before steps 1, 2 and 4, through the module, as one does in plain PyTorch."""
    if number == 1:
        net.blocks[0].requires_grad_(False)
        net.gain.requires_grad = False
    if number == 2:
        net.requires_grad_(False)
        net.outer.weight.requires_grad = True
    if number == 4:
        net.requires_grad_(True)


def train_by_turns():
    torch.manual_seed(0)
    model, found = Tiny(2), []
    replica = copy.deepcopy(model)
    made = adamw(replica.parameters())

    def run(net, optimizer, module):
        losses, having = [], []
        for number in range(6):
            turn(module, number)
            loss = square_loss(net, number)
            loss.backward()
            if net is replica:
                average(net)
            having.append({name for name, p in module.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return finish(net, losses), having

    want, wanted = run(replica, made, replica)
    for stage in SOME_STAGES:
        sharded = copy.deepcopy(model)
        engine, made = start(sharded, adamw(sharded.parameters()), stage=stage)
        got, having = run(engine, made, engine.module)
        found += differences(f"stage {stage}", got, want)
        found += [] if having == wanted else [(stage, having)]
    assert len(wanted[0]) > len(wanted[1]) > len(wanted[2]) == 1
    return found


def average(net):
    """DDP itself keeps what it saw when it was built."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


@on_ranks(2)
def test_what_was_trained_can_be_frozen_and_trained_again_between_steps():
    return train_by_turns()


@on_ranks(2)
def test_what_was_frozen_at_initialize_cannot_be_trained_and_is_named():
    model = Tiny()
    model.inner.requires_grad_(False)
    engine, _ = start(model, stage=3)

    class Thaw:
        def __call__(self, module, args):
            module.weight.requires_grad_(True)

    def outside():
        dict(engine.named_parameters())["inner.weight"].requires_grad_(True)

    def by_module():
        engine.requires_grad_(True)

    def under_unsharded():
        with engine.unsharded():
            model.inner.weight.requires_grad = True

    def inside_forward():
        handle = model.inner.register_forward_pre_hook(Thaw())
        try:
            square_loss(engine, 0).backward()
        finally:
            handle.remove()

    for way in (outside, by_module, under_unsharded, inside_forward):
        with pytest.raises(RuntimeError) as caught:
            way()
        message = str(caught.value)
        assert "'inner." in message
        assert "frozen at initialize" in message


@on_ranks(2)
def test_what_is_frozen_under_unsharded_stays_frozen():
    model = Tiny()
    engine, _ = start(model)
    with engine.unsharded(model.inner):
        model.inner.requires_grad_(False)
    square_loss(engine, 0).backward()
    assert {name for name, p in engine.named_parameters() if p.grad is None} == {"inner.weight", "inner.bias"}


# --------------------------------------------------------------------------------- reading and evaluating


@on_ranks(2)
def test_frozen_weights_are_rounded_to_the_dtype_in_which_they_are_held(tmp_path):
    for stage, overrides in (
        (stage, overrides) for stage in SOME_STAGES for overrides in (None, {"0": "fp32"})
    ):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
        want = model[0].requires_grad_(False).weight.detach().clone()
        want = want if overrides else want.bfloat16()
        precision = {"param_dtype": "bf16", "overrides": overrides}
        config = {"stage": stage, "precision": precision}
        engine = zeroshard.initialize(model, torch.optim.SGD(model[1].parameters(), lr=0.1), config).engine
        file = f"{tmp_path}/{stage}-{overrides is None}"
        engine.save_pretrained(file)
        values = [engine.full_parameter("0.weight"), dict(engine.named_full_parameters())["0.weight"]]
        values += [load_file(f"{file}/model.safetensors")["0.weight"]]
        engine.close()
        values += [model[0].weight]
        narrow = torch.float32 if overrides else torch.bfloat16
        assert [value.dtype for value in values] == [torch.float32, narrow, narrow, torch.float32]
        assert all(torch.equal(value.float(), want.float()) for value in values)
