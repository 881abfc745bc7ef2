"""Settings of asynchronous pipelines that do not go together: each message names the keys that were set."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard import Config
from zeroshard.parallel.pipeline.actions import parse_schedule
from zeroshard.parallel.pipeline.asynchronous.steady import require_steps
from zeroshard.parallel.pipeline.asynchronous.versions import read_delays

TEXT = "0F0,0F1,0B0,STEP,0B1,STEP\n1F0,1B0,STEP,1F1,1B1,STEP\n"
LIST = {"schedule": TEXT, "num_microbatches": 2}
SYNCHRONOUS = {"schedule": "0F0,0B0,STEP\n1F0,1B0,STEP\n"}


@pytest.mark.parametrize(
    ("pipeline", "others", "message"),
    [
        ({"schedule": "pb"}, {"clip_grad_norm": 1.0}, "pipeline.schedule='pb' needs clip_grad_norm to be None"),
        (LIST | {"weights": "stash"}, {"clip_grad_norm": 1.0}, "pipeline.weights='stash' needs clip_grad_norm"),
        ({"schedule": "pb"}, {"nonfinite": "skip"}, "pipeline.schedule='pb' needs nonfinite to be 'report'"),
        ({"schedule": "pb"}, {"ignored": ["x"]}, "pipeline.schedule='pb' needs ignored to be None"),
        ({"schedule": "pb"}, {"precision": {"param_dtype": "fp16"}}, "needs precision.param_dtype to be another"),
        ({"schedule": "pb"}, {"recompute": "unit"}, "pipeline.schedule='pb' needs recompute to be 'none'"),
        ({"schedule": "lwp"}, {"compile": True}, "pipeline.schedule='lwp' needs compile to be False"),
        (
            {"schedule": "pipedream", "weights": "vertical"},
            {"reshard_after_forward": False},
            "pipeline.weights='vertical' needs reshard_after_forward to be True, got False",
        ),
        (
            {"schedule": "pipedream"},
            {"offload": {"optimizer": "cpu"}},
            "pipeline.schedule='pipedream' needs offload.optimizer to be 'none', got 'cpu'",
        ),
        (
            {"schedule": "pb", "correction": "spike"},
            {"offload": {"optimizer": "cpu"}},
            "pipeline.correction='spike' needs offload.optimizer to be 'none', got 'cpu'",
        ),
        (
            {"schedule": "spectrain"},
            {"precision": {"param_dtype": "bf16", "main_dtype": "bf16"}},
            "pipeline.schedule='spectrain' needs precision.main_dtype to be another dtype than bfloat16",
        ),
        ({"weights": "stash"}, {}, "pipeline.weights='stash' needs pipeline.schedule to be one of pipedream"),
        ({"correction": "spike"}, {}, "pipeline.correction='spike' needs pipeline.schedule to be one of"),
        (
            SYNCHRONOUS | {"correction": "rescale"},
            {},
            "pipeline.correction='rescale' needs pipeline.weights to be set, as an asynchronous list needs them",
        ),
        ({"microbatches_per_step": 2}, {}, "pipeline.microbatches_per_step=2 needs pipeline.schedule to be one"),
        (LIST | {"weights": "stash", "synchronous_steps": 1}, {}, "pipeline.synchronous_steps=1 needs pipeline"),
        ({"schedule": "pb", "decay": 0.5}, {}, "decay=0.5 needs pipeline.schedule to be 'pipemare', got 'pb'"),
        (
            {"schedule": "pipemare", "weights": "stash", "decay": 0.5},
            {},
            "pipeline.decay=0.5 needs pipeline.weights to be 'estimate', got 'stash'",
        ),
        ({"schedule": "pb", "anneal_steps": 9}, {}, "anneal_steps=9 needs pipeline.correction to be 'rescale'"),
        ({"schedule": "pb", "max_crossed_steps": 2}, {}, "needs pipeline.schedule to be 'paci', got 'pb'"),
        ({"schedule": "pb", "num_chunks": 2}, {}, "schedule='pb' needs pipeline.num_chunks to be None or 1"),
        (
            {"schedule": "2bw", "microbatches_per_step": 1},
            {},
            "pipeline.schedule='2bw' needs pipeline.microbatches_per_step to be >= mesh.pp=2, so that two",
        ),
    ],
)
def test_settings_that_do_not_go_together(
    pipeline: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Config.parse({"mesh": {"pp": 2}, "stage": 3, "pipeline": pipeline, **others})
    assert message in str(caught.value)


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
    for rank in range(2):
        with pytest.raises(ValueError, match=f"pipeline.weights='{weights}': 1F2 uses the weights behind step 1"):
            read_delays(schedule, rank, weights)
