"""An asynchronous run ends when a rank is lost or fails, and tells the action of each rank."""

import textwrap

import pytest

from tests.endings import Forks, run

__all__ = ["run"]

MODEL = """
import os, signal, time
import torch, zeroshard
from torch import nn
from torch.utils.checkpoint import checkpoint

rank = int(os.environ["RANK"])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(20, 20)

    def forward(self, x):
        if CHECKPOINTS:
            return checkpoint(self.linear, x.tanh(), use_reentrant=False)
        return self.linear(x.tanh())

torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(4)))
first, last = model[0], model[3]
x, y = torch.randn(16, 20), torch.randn(16, 20)
pipeline = {"schedule": SCHEDULE, "weights": WEIGHTS, "num_microbatches": 8, "balance": "memory"}
config = {"stage": STAGE, "mesh": {"pp": 2}, "pipeline": pipeline, "watchdog_s": 5.0}
engine = zeroshard.initialize(model, torch.optim.AdamW, config, loss_fn=nn.functional.mse_loss).engine
"""
TRAIN = "engine.train_batch(x, y)"


# The last pipeline rank computes with the version of the first one, which is not the newest one there.
CLAMP = """
def clamp(block, _):
    if engine.global_step >= FIRST:
        EDIT
CLAMPED.register_forward_pre_hook(clamp)
engine.train_batch(x, y)
"""
EDITS = {
    "in place": "with torch.no_grad():\n            block.linear.bias.clamp_(-0.05, 0.05)",
    "through data": "block.linear.bias.data.clamp_(-0.05, 0.05)",
}

BETWEEN = """
def batches():
    yield x, y
    CALL
    yield x, y
engine.train_batches(batches(), 2)
"""
CALLS = {
    "eval_batch()": "engine.eval_batch(x, y)",
    "save_checkpoint()": "engine.save_checkpoint('nowhere')",
}
RAGGED = """
engine.train_batches([(x, y), (x[:8], y[:8])])
"""


def script(schedule, *, checkpoints, act=TRAIN, stage=3, weights=None):
    text = textwrap.dedent(MODEL) + act
    values = {"SCHEDULE": schedule, "WEIGHTS": weights, "CHECKPOINTS": checkpoints, "STAGE": stage}
    for key, value in values.items():
        text = text.replace(key, repr(value))
    return text


def editing(schedule, how, first, block, stage, weights=None):
    """A script that edits from a micro-batch on: the first one is noted in another way than later ones."""
    act = CLAMP.replace("EDIT", EDITS[how]).replace("FIRST", str(first)).replace("CLAMPED", block)
    return script(schedule, checkpoints=False, act=act, stage=stage, weights=weights)


EDITED = "RuntimeError: '{}.linear.bias' was edited in a forward or backward"
REFUSED = {
    "edit of a version": (editing("pipedream", "in place", 1, "last", 0, "vertical"), EDITED.format(3)),
    # The first pipeline rank computes with predicted weights, which are no main parameters.
    "edit through data": (editing("spectrain", "through data", 2, "first", 0), EDITED.format(0)),
    "edit where weights are gathered": (editing("spectrain", "in place", 0, "first", 3), EDITED.format(0)),
    "recomputation": (
        script("pb", checkpoints=True),
        "RuntimeError: an activation checkpoint runs the forward of Linear again inside the backward, where "
        "pipeline.weights='latest' has other weights",
    ),
    "ragged batches": (
        script("pipedream", checkpoints=False, act=RAGGED),
        "ValueError: batch 1: expected the shapes",
    ),
    **{
        call: (
            script("pipedream", checkpoints=False, act=BETWEEN.replace("CALL", code)),
            f"RuntimeError: {call} inside of a batch",
        )
        for call, code in CALLS.items()
    },
}
FAST = ("ragged batches",)


@pytest.mark.parametrize(
    "names", [FAST, pytest.param(REFUSED.keys() - {*FAST}, marks=pytest.mark.long)], ids=len
)
def test_habits_that_cannot_go_on_are_refused_by_name(run: Forks, names):
    """At once: the other rank of each run waits for its watchdog."""
    for name, endings in zip(names, run(*(REFUSED[name][0] for name in names)), strict=True):
        found = [ending.last_line for ending in endings]
        assert any(line.startswith(REFUSED[name][1]) for line in found), (name, found)
        assert (
            any(line.endswith("(drop_last=True of a DataLoader)") for line in found)
            or name != "ragged batches"
        ), found
