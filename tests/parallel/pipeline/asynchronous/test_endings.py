"""An asynchronous run ends when a rank is lost or fails, and tells the action of each rank."""

import signal

import pytest

from tests.test_ends_cleanly import Forks, run, textwrap

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

# The last block computes on the last pipeline rank alone.
DIE = """
engine.train_batch(x, y)
calls = []
def die(*_):
    calls.append(0)
    if len(calls) == 4 and rank == 1:
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)
last.register_forward_pre_hook(die)
engine.train_batch(x, y)
"""

# The last pipeline rank computes with the version of the first one, which is not the newest one there.
EDIT = """
def clamp(block, _):
    if engine.global_step:
        with torch.no_grad():
            block.linear.weight.clamp_(-0.1, 0.1)
last.register_forward_pre_hook(clamp)
engine.train_batch(x, y)
"""


def script(schedule, *, checkpoints, act=TRAIN, stage=3, weights=None):
    text = textwrap.dedent(MODEL) + act
    values = {"SCHEDULE": schedule, "WEIGHTS": weights, "CHECKPOINTS": checkpoints, "STAGE": stage}
    for key, value in values.items():
        text = text.replace(key, repr(value))
    return text


@pytest.mark.long
def test_a_rank_that_is_killed_between_two_steps_ends_the_other_with_its_action(run: Forks):
    [(waiting, killed)] = run(script("pipedream", checkpoints=False, act=DIE))
    assert killed.code == -signal.SIGKILL
    assert waiting.code == 1
    assert waiting.seconds < 25
    assert "rank 1 has exited or is stopped" in waiting.last_line
    assert "action 1F3 of pipeline rank 1" in waiting.last_line


@pytest.mark.long
def test_a_recomputation_with_other_weights_than_its_forward_is_refused(run: Forks):
    [(first, _)] = run(script("pb", checkpoints=True))
    assert first.code == 1
    assert first.last_line.startswith(
        "RuntimeError: an activation checkpoint runs the forward of Linear again inside the backward, where "
        "pipeline.weights='latest' has other weights"
    )


def test_a_forward_that_edits_a_version_is_refused(run: Forks):
    [(_, last)] = run(script("pipedream", checkpoints=False, act=EDIT, stage=0, weights="vertical"))
    assert last.code == 1
    assert last.last_line.startswith("RuntimeError: '3.linear.weight' was edited in a forward or backward")
