"""A run over pipeline ranks ends when a rank is lost or fails, and tells the action of each rank."""

import re
import signal
import textwrap

import pytest

from tests.endings import Forks, run

__all__ = ["run"]

MODEL = """
import os, signal, time
import torch, zeroshard
from torch import nn

rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 30), *(nn.Sequential(nn.Linear(30, 30), nn.Tanh()) for _ in range(4)))
last = [module for module in model[4].modules()][1]
x, y = torch.randn(8, 20), torch.randn(8, 30)
pipeline = {"num_microbatches": 4, "balance": "memory"}
config = {"stage": 3, "mesh": {"pp": 2}, "pipeline": pipeline, "watchdog_s": 2.5}
engine = zeroshard.initialize(model, torch.optim.AdamW, config, loss_fn=nn.functional.mse_loss).engine
for _ in range(2):
    engine.train_batch(x, y)
"""

# The last linear layer computes on the last pipeline rank alone.
DIE = """
calls = []
def die(*_):
    calls.append(0)
    if len(calls) == 3 and rank == DEAD:
        ACT
last.register_forward_pre_hook(die)
engine.train_batch(x, y)
"""


def script(act, dead):
    return textwrap.dedent(MODEL) + DIE.replace("ACT", act).replace("DEAD", str(dead))


@pytest.mark.long
def test_a_rank_that_is_killed_in_the_middle_ends_all_others_with_their_actions(run: Forks):
    [endings] = run(script("time.sleep(1.5); os.kill(os.getpid(), signal.SIGKILL)", 3), num_ranks=4)
    assert endings[3].code == -signal.SIGKILL
    for rank, ending in enumerate(endings[:3]):
        assert ending.code == 1
        assert ending.seconds < 45
        assert re.match(rf"RuntimeError: rank {rank} of 4 gave up in the ", ending.last_line)
        assert re.search(
            r"rank 3 has exited or is stopped \(.*, action 1F2 of pipeline rank 1", ending.last_line
        )
    assert re.search(r"rank 0 waits in the .*, action 0\w+ of pipeline rank 0", endings[1].last_line)


def test_a_rank_that_fails_in_the_middle_ends_the_other_with_its_error(run: Forks):
    [(waiting, failed)] = run(script("raise LookupError('a row is missing')", 1))
    assert [waiting.code, failed.code] == [1, 1]
    assert failed.last_line == "LookupError: a row is missing"
    label = "gradient of 1B2 from pipeline rank 1 to 0"
    assert waiting.last_line.startswith(
        f"RuntimeError: rank 0 of 2 gave up in the {label} after at most 2.5 s"
    )
    assert "rank 1 has exited with LookupError: a row is missing" in waiting.last_line
