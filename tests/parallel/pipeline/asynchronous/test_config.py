"""Settings of asynchronous pipelines: their defaults, and combinations that do not go together."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import Config, Mesh, Pipeline
from zeroshard.config.pipeline import ASYNCHRONOUS
from zeroshard.parallel.pipeline.schedules import schedule_of, steady


def config_of(schedule: str = "pipedream", pp: int = 4, num: int = 16, **options: object) -> Config:
    inside = {key: options.pop(key) for key in list(options) if key in KEYS}
    pipeline = {"schedule": schedule, "num_microbatches": num, **inside}
    return Config.from_dict({"mesh": {"pp": pp}, "pipeline": pipeline, **options})


KEYS = (
    *("microbatches_per_step", "synchronous_steps", "weights", "correction", "decay", "anneal_steps"),
    *("max_crossed_steps", "num_chunks"),
)


@pytest.mark.parametrize(
    ("schedule", "weights", "correction", "per_step"),
    [
        ("pipedream", "stash", "none", 1),
        ("2bw", "double", "none", 4),
        ("pipemare", "estimate", "rescale", 1),
        ("pb", "latest", "none", 1),
        ("spectrain", "predict", "none", 1),
        ("lwp", "lwp", "none", 1),
        ("paci", "bounded", "none", 3),
    ],
)
def test_a_name_stands_for_weights_a_correction_and_the_size_of_a_step(
    schedule: str, weights: str, correction: str, per_step: int
) -> None:
    config = config_of(schedule)
    assert config.pipeline.is_asynchronous
    assert (config.pipeline.chosen_weights, config.pipeline.chosen_correction) == (weights, correction)
    assert schedule_of(config, 16) == steady(4, 16, per_step)


def test_each_part_can_be_set_by_itself() -> None:
    pipeline = config_of("pb", weights="vertical", correction="rescale", microbatches_per_step=3).pipeline
    assert (pipeline.chosen_weights, pipeline.chosen_correction, pipeline.step_size(4)) == (
        "vertical",
        "rescale",
        3,
    )


def test_the_bound_sets_the_size_of_a_step() -> None:
    for bound, expected in [(1, 7), (2, 4), (3, 3), (7, 1), (9, 1)]:
        assert config_of("paci", pp=8, max_crossed_steps=bound).pipeline.step_size(8) == expected


def test_synchronous_steps_are_counted_over_lists() -> None:
    config = config_of("pb", pp=2, num=6, synchronous_steps=4, microbatches_per_step=2)
    assert schedule_of(config, 6) == steady(2, 6, 2, 4)
    assert schedule_of(config, 6, steps_taken=3) == steady(2, 6, 2, 1)
    assert schedule_of(config, 6, steps_taken=9) == steady(2, 6, 2, 0)


def test_a_synchronous_pipeline_has_neither_weights_nor_a_correction() -> None:
    pipeline = Pipeline(schedule="1f1b")
    assert not pipeline.is_asynchronous
    assert (pipeline.chosen_weights, pipeline.chosen_correction) == ("latest", "none")


NAMES = ", ".join(ASYNCHRONOUS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"schedule": "1f1b", "weights": "stash"},
            f"pipeline.weights='stash' needs pipeline.schedule to be one of {NAMES}, or a list, got '1f1b'",
        ),
        (
            {"schedule": "1f1b", "correction": "rescale"},
            "pipeline.correction='rescale' needs pipeline.schedule",
        ),
        (
            {"schedule": "gpipe", "microbatches_per_step": 2},
            "pipeline.microbatches_per_step=2 needs pipeline.schedule",
        ),
        (
            {"schedule": "gpipe", "synchronous_steps": 2},
            "pipeline.synchronous_steps=2 needs pipeline.schedule",
        ),
        ({"decay": 0.5}, "pipeline.decay=0.5 needs pipeline.schedule to be 'pipemare', got 'pipedream'"),
        (
            {"weights": "lwp", "decay": 0.5},
            "pipeline.decay=0.5 needs pipeline.weights to be 'estimate', got 'lwp'",
        ),
        ({"anneal_steps": 5}, "pipeline.anneal_steps=5 needs pipeline.correction to be 'rescale', got None"),
        ({"max_crossed_steps": 2}, "pipeline.max_crossed_steps=2 needs pipeline.schedule to be 'paci'"),
        ({"num_chunks": 2}, "pipeline.schedule='pipedream' needs pipeline.num_chunks to be None or 1, got 2"),
        (
            {"schedule": "2bw", "microbatches_per_step": 3},
            "pipeline.schedule='2bw' needs pipeline.microbatches_per_step to be >= mesh.pp=4, so that two "
            "versions are enough, got 3",
        ),
        ({"clip_grad_norm": 1.0}, "pipeline.schedule='pipedream' needs clip_grad_norm to be None, got 1.0"),
        ({"nonfinite": "skip"}, "pipeline.schedule='pipedream' needs nonfinite to be 'report', got 'skip'"),
        (
            {"precision": "fp16"},
            "pipeline.schedule='pipedream' needs precision.param_dtype to be another dtype",
        ),
        ({"ignored": ["*.bias"]}, "pipeline.schedule='pipedream' needs ignored to be None"),
        (
            {"schedule": "pb", "recompute": "unit"},
            "pipeline.schedule='pb' needs recompute to be 'none', got 'unit'",
        ),
        ({"schedule": "pb", "compile": True}, "pipeline.schedule='pb' needs compile to be False, got True"),
        (
            {"reshard_after_forward": False},
            "pipeline.schedule='pipedream' needs reshard_after_forward to be True",
        ),
        (
            {"offload": {"optimizer": "cpu"}},
            "pipeline.schedule='pipedream' needs offload.optimizer to be 'none', got 'cpu'",
        ),
        (
            {
                "schedule": "pb",
                "weights": "predict",
                "precision": {"param_dtype": "bf16", "main_dtype": "bf16"},
            },
            "pipeline.weights='predict' needs precision.main_dtype to be another dtype than bfloat16",
        ),
        (
            {"schedule": "pb", "correction": "spike", "offload": {"optimizer": "cpu"}},
            "pipeline.correction='spike' needs offload.optimizer to be 'none'",
        ),
        ({"weights": "newest"}, "config key 'pipeline.weights': expected None or 'latest' or 'stash'"),
        ({"decay": 2}, "config key 'pipeline.decay': expected a number from 0 to 1, got 2"),
        ({"pp": 1}, "pipeline.schedule='pipedream' needs mesh.pp to be >= 2, got 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(**options)  # type: ignore[arg-type]


def test_kept_versions_go_together_with_recomputation_and_compilation() -> None:
    for weights in ("stash", "vertical", "double"):
        config_of("pb", weights=weights, recompute="unit", microbatches_per_step=4)
        config_of("pb", weights=weights, compile=True, microbatches_per_step=4)


def test_a_config_goes_through_json() -> None:
    config = config_of("pipemare", decay=0.3, anneal_steps=7, synchronous_steps=2)
    assert Config.from_dict(config.to_dict()) == config


# ---------------------------------------------------------------------------------------- estimates


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "versions", "states"),
    [("pipedream", 3, 0), ("2bw", 1, 0), ("pipemare", 0, 1), ("spectrain", 0, 0)],
)
def test_an_estimate_counts_the_shards_of_versions_and_the_states_of_a_method(
    stage: int, schedule: str, versions: int, states: int
) -> None:
    """4 pipeline ranks of 2 blocks, 2 data-parallel ranks; the sizes need no padding."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    size = 2 * 512 * 512 // (1 if stage == 0 else 2)
    pipeline = Pipeline(schedule=schedule, num_microbatches=16, balance="memory")
    precision = zeroshard.Precision(param_dtype=torch.bfloat16)
    config = Config(stage=stage, mesh=Mesh(pp=4), pipeline=pipeline, precision=precision)
    plain = Config(
        stage=stage,
        mesh=Mesh(pp=4),
        pipeline=Pipeline(num_microbatches=16, balance="memory"),
        precision=precision,
    )
    found, before = zeroshard.estimate(model, 8, config), zeroshard.estimate(model, 8, plain)
    # Where nothing is gathered, weights that are moved have a copy.
    copies = int(stage == 0 and schedule in ("pipemare", "spectrain"))
    assert found.peak_versions == (versions + copies) * size * 2
    assert found.optimizer - before.optimizer == states * size * 4
    assert before.peak_versions == 0
    assert ("versions of weights" in str(found)) is (versions + copies > 0)


@pytest.mark.parametrize("schedule", ["pipedream", "2bw", "pipemare", "lwp"])
def test_an_estimate_counts_a_full_pipeline_as_lists_of_many_batches_have_it(schedule: str) -> None:
    """`train_batches` makes one list of many batches, also of those with few micro-batches."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    few, many = (zeroshard.estimate(model, 4, config_of(schedule, num=num, stage=0)) for num in (1, 16))
    assert few.peak_versions == many.peak_versions > 0
    assert few.optimizer == many.optimizer
