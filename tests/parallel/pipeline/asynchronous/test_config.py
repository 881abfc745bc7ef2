"""Settings of asynchronous pipelines and lists of a user: what does not go together."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard import Config
from zeroshard.parallel.pipeline.actions import parse_schedule
from zeroshard.parallel.pipeline.asynchronous.method import read_delays, refuse_forwards_in_backward
from zeroshard.parallel.pipeline.schedules import require_steps
from zeroshard.sharding.context import Changes


@pytest.mark.parametrize("model", [nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), 10**9])
def test_an_estimate_of_an_asynchronous_pipeline_is_refused(model: nn.Module | int) -> None:
    config = {"mesh": {"pp": 4}, "pipeline": {"schedule": "pipedream", "num_microbatches": 4}}
    with pytest.raises(ValueError, match=r"^pipeline\.schedule: expected a synchronous one for an estimate"):
        zeroshard.estimate(model, 4, config)


# ------------------------------------------------------------------------------------- lists of a user

TEXT = "0F0,0F1,0B0,STEP,0B1,STEP\n1F0,1B0,STEP,1F1,1B1,STEP\n"
SYNCHRONOUS = "0F0,0B0,STEP\n1F0,1B0,STEP\n"


STASH = {"schedule": TEXT, "weights": "stash"}


@pytest.mark.parametrize(
    ("pipeline", "others", "message"),
    [
        ({"schedule": SYNCHRONOUS, "correction": "rescale"}, {}, "pipeline.correction='rescale' needs "
         "pipeline.weights to be set, as an asynchronous list needs them"),
        (STASH | {"synchronous_steps": 1}, {}, "pipeline.synchronous_steps=1 needs pipeline.schedule to be"),
        (STASH, {"clip_grad_norm": 1.0}, "pipeline.weights='stash' needs clip_grad_norm to be None, got 1.0"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_with_a_list(
    pipeline: dict[str, object], others: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Config.parse({"mesh": {"pp": 2}, "pipeline": pipeline, **others})


def test_ranks_with_different_numbers_of_steps_are_refused() -> None:
    """Their schedules of the learning rate would differ, and a checkpoint has one number of steps."""
    text = "0F0,0F1,0B0,STEP,0B1,STEP\n1F0,1B0,1F1,1B1,STEP\n"
    message = "expected the same number of steps in all lists of an asynchronous pipeline, got 2, 1"
    with pytest.raises(ValueError, match=message):
        require_steps(parse_schedule(text))


LATE = "0F0,0F1,0B0,STEP,0F2,0B1,STEP,0B2,STEP\n1F0,1B0,1F1,1B1,1F2,1B2,STEP\n"


@pytest.mark.parametrize("weights", ["vertical", "double"])
def test_a_version_that_a_chunk_does_not_have_yet_is_refused_on_all_ranks(weights: str) -> None:
    schedule = parse_schedule(LATE)
    message = f"pipeline.weights='{weights}': 1F2 uses the weights after step 1"
    for rank in range(2):
        with pytest.raises(ValueError, match=message):
            read_delays(schedule, rank, weights)


def test_double_keeps_two_versions_or_is_refused_on_all_ranks() -> None:
    early = "0F0,0F1,0F2,0B0,STEP,0F3,0B1,STEP,0F4,0B2,STEP,0B3,STEP,0B4,STEP\n"
    late = "1F0,1B0,STEP,1F1,1B1,STEP,1F2,1B2,STEP,1F3,1B3,STEP,1F4,1B4,STEP\n"
    schedule = parse_schedule(early + late)
    for rank in range(2):
        with pytest.raises(ValueError, match=r"pipeline\.weights='double': a pipeline rank keeps 3 versions"):
            read_delays(schedule, rank, "double")
        read_delays(schedule, rank, "stash")


# ------------------------------------------------------------------------ weights of another moment


def test_forwards_that_run_again_are_refused_with_newer_weights() -> None:
    layer, x = nn.Linear(4, 4), torch.rand(2, 4, requires_grad=True)
    refuse_forwards_in_backward([layer], Changes(), "latest")
    again = checkpoint(layer, x, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="the forward of Linear runs again inside the backward"):
        again.backward()
