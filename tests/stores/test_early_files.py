"""Units whose values lie in files are stepped in the backward: same bits, errors told, read ahead."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

from tests.checkpoint import runs
from tests.stores.tiers import Failing


class Layers(nn.Module):
    """Units whose order changes with each forward, if that is wanted."""

    def __init__(self, *, turns=False):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))
        self.turns, self.num_forwards, self.fails = turns, 0, False

    def forward(self, x):
        self.num_forwards += 1
        is_turned = self.turns and self.num_forwards % 2
        x = self.first(x)
        if self.fails:
            x = Failing.apply(x)
        for block in reversed(self.blocks) if is_turned else self.blocks:
            x = block(x)
        return x


def seeded(**options):
    torch.manual_seed(0)
    return Layers(**options)


def loss_of(engine, number):
    return engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().mean()


def start(folder, make, *, model=None, **config):
    files = {"optimizer": "nvme", "nvme_path": str(folder), "step_in_backward": True}
    return runs.start({"stage": 3, "offload": files} | config, make, model=model or seeded())


def adamw(model):
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 2e-2}, {"params": others}], lr=1e-2)


def adam_of_bitsandbytes(model):
    from bitsandbytes.optim import Adam8bit

    return Adam8bit(model.parameters(), lr=1e-2, min_8bit_size=1 << 20)


MAKERS = {
    "AdamW": adamw,
    "bitsandbytes": adam_of_bitsandbytes,
}
BF16_MAIN = {"precision": {"param_dtype": "bf16", "main_dtype": "bf16"}}


def watched(engine):
    """What a tensor hook sees of the optimizer within the backward."""
    seen, optimizer = set(), engine.optimizer

    def look(module, args, output):
        if output.requires_grad:
            sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
            output.register_hook(lambda _: seen.add((sizes, len(optimizer._optimizer_step_post_hooks))))

    for block in engine.module.blocks:
        block[0].register_forward_hook(look)
    return seen


def equal_bits(folder):
    found = []
    for name, make in MAKERS.items():
        for options in ({}, BF16_MAIN) if name == "AdamW" else ({},):
            plain = runs.start({"stage": 3} | options, make, model=seeded(turns=True))
            want = runs.state(plain, runs.train(plain, range(3), loss_of))
            plain.close(restore=False)
            engine = start(folder, make, model=seeded(turns=True), **options)
            before = [len(group["params"]) for group in engine.optimizer.param_groups]
            seen = watched(engine)
            got = runs.state(engine, runs.train(engine, range(3), loss_of))
            what = f"{name}, {options}"
            found += [f"{what}: {text}" for text in runs.differences(got, want)]
            found += [f"{what}: losses"] * (got.losses != want.losses)
            num_hooks = len(engine.optimizer._optimizer_step_post_hooks)
            found += [f"{what}: a hook saw {seen}"] * (seen != {(tuple(before), num_hooks)})
            engine.close(restore=False)
    return found


def test_steps_from_files_in_a_backward_have_the_bits_of_later_ones_and_nobody_sees_their_parts(
    ranks, tmp_path
):
    for found in ranks(2, equal_bits, tmp_path):
        assert not found


def failures(folder):
    """Errors of a step and of the backward around it; then training goes on from a checkpoint."""
    engine = start(folder, adamw)
    engine.save_checkpoint(folder / "saved")
    own_step, steps = engine._early._parts._own_step, []

    def failing(twin):
        steps.append(len(steps))
        if len(steps) == 2:
            raise OSError("made to fail")
        own_step(twin)

    found = []
    engine._early._parts._own_step = failing
    with pytest.raises(OSError, match="made to fail") as caught:
        engine.backward(loss_of(engine, 0))
    found += ["no traceback"] * ("in failing" not in "".join(traceback.format_exception(caught.value)))
    found += [f"{len(steps)} steps"] * (len(steps) != 2)
    engine._early._parts._own_step = own_step
    with pytest.raises(RuntimeError, match="Load the last checkpoint"):
        engine.backward(loss_of(engine, 1))
    engine.zero_grad()
    engine.load_checkpoint(folder / "saved")
    engine.module.fails = True
    with pytest.raises(KeyError, match="made to fail"):
        engine.backward(loss_of(engine, 0))
    engine.module.fails = False
    with pytest.raises(RuntimeError, match="Load the last checkpoint"):
        engine.step()
    engine.load_checkpoint(folder / "saved")
    got = runs.state(engine, runs.train(engine, range(3), loss_of))
    plain = runs.start(3, adamw, model=seeded())
    found += runs.differences(got, runs.state(plain, runs.train(plain, range(3), loss_of)))
    return found


def test_errors_of_a_step_in_the_backward_are_told_and_a_load_goes_on(ranks, tmp_path):
    assert ranks(1, failures, tmp_path) == [[]]
