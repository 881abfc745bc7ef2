"""Frozen parameters cost no gradient, no state and no reduction, and held whole no gather; ignored ones.

The reference is DDP, to the bit on two ranks; for what is frozen and trained by turns, which DDP does not
follow, plain PyTorch with gradients averaged by hand.
"""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import zeroshard
from tests.distributed.models import Stemmed, Tiny
from tests.distributed.training import (
    SOME_STAGES,
    adamw,
    numbers,
    plain,
    same_as_replicated,
    seeded,
    square_loss,
    start,
    step,
)
from tests.ranks import on_ranks
from zeroshard.optim import Muon, muon_groups


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


def by_turns(model, number):
    turn(plain(model), number)
    return square_loss(model, number)


@on_ranks(2)
def test_what_was_trained_can_be_frozen_and_trained_again_between_steps():
    """Plain PyTorch with gradients averaged by hand, as DDP keeps what it saw when it was built."""
    return same_as_replicated(Tiny(2), adamw, 6, by_turns, stages=SOME_STAGES, averages=True)


@on_ranks(2)
def test_what_was_frozen_at_initialize_cannot_be_trained_and_is_named():
    model = Tiny()
    model.inner.requires_grad_(False)
    engine, _ = start(model, stage=3)

    def under_unsharded():
        with engine.unsharded():
            model.inner.weight.requires_grad = True

    def inside_forward():
        handle = model.inner.register_forward_pre_hook(lambda module, _: module.weight.requires_grad_(True))
        try:
            square_loss(engine, 0).backward()
        finally:
            handle.remove()

    for way in (
        lambda: engine.get_parameter("inner.weight").requires_grad_(True),
        lambda: engine.requires_grad_(True),
        under_unsharded,
        inside_forward,
    ):
        with pytest.raises(RuntimeError, match=r"(?=.*'inner\.)(?=.*frozen at initialize)"):
            way()


@on_ranks(2)
def test_frozen_weights_are_rounded_to_the_dtype_in_which_they_are_held(tmp_path):
    for overrides in (None, {"0": "fp32"}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
        narrow = torch.float32 if overrides else torch.bfloat16
        want = model[0].requires_grad_(False).weight.detach().to(narrow)
        engine, _ = start(
            model,
            torch.optim.SGD(model[1].parameters(), lr=0.1),
            precision={"param_dtype": "bf16", "overrides": overrides},
        )
        file = f"{tmp_path}/{overrides is None}"
        engine.save_pretrained(file)
        values = [engine.full_parameter("0.weight"), dict(engine.named_full_parameters())["0.weight"]]
        values += [load_file(f"{file}/model.safetensors")["0.weight"]]
        engine.close()
        values += [model[0].weight]
        assert [value.dtype for value in values] == [torch.float32, narrow, narrow, torch.float32]
        assert all(torch.equal(value.float(), want.float()) for value in values)


WIDTH = 20


def block():
    return nn.Sequential(nn.Linear(WIDTH, 33), nn.Tanh(), nn.Linear(33, WIDTH))


class Seeing(nn.Module):
    """A frozen tower with a table of its own, a trained trunk with a frozen block; [n, 20] -> [n, 3]."""

    def __init__(self):
        super().__init__()
        self.tower = nn.ModuleDict({"stem": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)})
        self.tower["blocks"] = nn.ModuleList(block() for _ in range(3))
        self.trunk = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.tower.requires_grad_(False)
        self.trunk[1].requires_grad_(False)

    def forward(self, x, sees=True):
        y = x
        if sees:
            y = self.tower["stem"](y)
            for block in self.tower["blocks"]:
                y = y + block(y)
            y = self.tower["norm"](y)
        for block in self.trunk:
            y = y + block(y)
        return self.head(y)


def loss_of(model, number, **others):
    return model(numbers(number, 5, WIDTH), **others).float().square().mean()


@pytest.mark.parametrize("precision", [None, "bf16"])
@on_ranks(2)
def test_nothing_of_replicated_parameters_is_gathered(precision):
    model, size = seeded(Seeing), 2 if precision else 4
    config = {"stage": 3, "frozen": "replicate", "precision": precision or {}}
    want = zeroshard.estimate(copy.deepcopy(model), 2, config, host_computes=True)
    engine, optimizer = start(model, **config)
    for number in range(3):
        engine.reset_comm_report()
        engine.reset_memory_report()
        step(engine, optimizer, loss_of, number)
    sent, report = engine.comm_report().bytes_sent, engine.memory_report()
    sizes = {unit.name: unit.numel for unit in engine.units}
    root = 512  # the head, in two blocks of 256; its frozen neighbours lie in a buffer of their own
    share = root + sizes["trunk.0"] + sizes["trunk.2"]
    # The root stays gathered up to its backward, and so does the last unit that is gathered.
    assert sent["all_gather"] == size * (share + sizes["trunk.0"]) // 2
    assert sent["reduce_scatter"] == 4 * share // 2
    assert sent["all_gather"] + sent["reduce_scatter"] == want.wire_bytes_per_step
    assert (report.parameters, report.peak_unsharded) == (want.parameters, want.peak_unsharded)
    engine.reset_comm_report()
    with torch.no_grad():
        loss_of(engine, 0)
    assert engine.comm_report().bytes_sent["all_gather"] == size * share // 2


@on_ranks(2)
def test_a_rank_may_leave_out_a_tower_that_is_not_gathered():
    """Ranks leave out the blocks of a tower by turns, with a trained layer before them."""
    model = seeded(Seeing)
    model.tower["stem"].requires_grad_(True)

    def loss(net, number):
        return loss_of(net, number, sees=(dist.get_rank() + number) % 2 == 0)

    config = {"frozen": ["tower.blocks"], "num_prefetch": 2}
    return same_as_replicated(model, trained, 3, loss, stages=(3,), averages=True, **config)


def trained(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


@on_ranks(2)
def test_a_model_that_is_frozen_as_a_whole_evaluates_without_exchange():
    for frozen in ("replicate", "shard"):
        engine, *_ = zeroshard.initialize(seeded(Seeing).requires_grad_(False), None, {"frozen": frozen})
        engine.reset_comm_report()
        loss_of(engine, 0)
        assert (engine.comm_report().bytes_sent["all_gather"] > 0) == (frozen == "shard")


IGNORED = ["blocks.*.up.bias", "head.*"]


def built():
    """Has an expert of its own on each rank."""
    model = Stemmed()
    model.head.load_state_dict(nn.Linear(7, 7).state_dict() | {"weight": numbers(0, 7, 7)})
    return model


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_checkpoints_leave_ignored_parameters_out_with_a_warning_and_alone_when_loaded(tmp_path, stage):
    engine, optimizer = start(built(), stage=stage, ignored=IGNORED)
    step(engine, optimizer, square_loss, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save_checkpoint(str(tmp_path), "a")
    notes = [
        str(warning.message)
        for warning in caught
        if "leaves out" in str(warning.message) and warning.filename == __file__
    ]
    before = {name: p.detach().clone() for name, p in engine.named_parameters()}
    step(engine, optimizer, square_loss, 1)
    after = {name: p.detach().clone() for name, p in engine.named_parameters()}
    own = [name for name in after if "up.bias" in name or "head" in name]
    states = {name: dict(optimizer.state[engine.get_parameter(name)]) for name in own}
    engine.load_checkpoint(str(tmp_path), "a")
    for name, parameter in engine.named_parameters():
        assert torch.equal(parameter.detach(), (after if name in states else before)[name]), name
    for name, state in states.items():
        assert optimizer.state[engine.get_parameter(name)] == state, name
    step(engine, optimizer, square_loss, 2)
    assert len(notes) == 1
    assert "'blocks.0.up.bias'" in notes[0]


@on_ranks(1)
def test_a_matrix_in_a_group_of_muon_is_refused_before_a_step():
    model = built()
    with pytest.raises(
        ValueError, match=r"'blocks.0.up.weight' is ignored, and in group \d, .*use_muon=False"
    ):
        start(model, Muon(muon_groups(model)), ignored=["blocks.0.up.*"])


@on_ranks(1)
def test_patterns_that_fit_nothing_and_dtypes_that_need_other_gradients_are_refused():
    for pattern, precision, text in (
        ("blocks.*.gain", {}, "no parameter whose name fits 'blocks.*.gain'"),
        ("head.*", {"param_dtype": "float16"}, "param_dtype to be another dtype than float16"),
        ("head.*", {"main_dtype": "bfloat16"}, "main_dtype to be another dtype than bfloat16"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            start(built(), "SGD", ignored=[pattern], precision=precision)
