"""The change that a message about two keys of the config asks for is made, and the config is taken."""

import copy
import re

import pytest

from zeroshard import Config

NEEDED = {
    "None": None,
    "None or 1": None,
    "True": True,
    "False": False,
    "1": 1,
    "3": 3,
    "a path": "folder",
    "names of modules": ["1"],
}
"""The values of a config by their words in a message; of other words, the first value that they name."""


def follow(problem, options):
    """The options, changed as the message "KEY=VALUE needs OTHER to be NEEDED, got GIVEN" asks for."""
    other, needed = re.fullmatch(r"\S+=.* needs (\S+) to be (.+), got .*", problem).groups()
    if least := re.match(r">= (?:[\w.]+=)?([\d.]+)", needed):
        value = float(least[1]) if other.endswith("start") else int(least[1])
    elif needed.startswith("another dtype than"):
        value = "float32"
    elif needed == "float16":
        value = "float16"
    else:
        value = NEEDED[needed] if needed in NEEDED else re.match(r"(?:one of )?'?([\w-]+)", needed)[1]
    *sections, key = other.split(".")
    place = options
    for section in sections:
        place = place.setdefault(section, {})
    place[key] = value


ON_HOST = {"optimizer": "cpu"}
ALL_BF16 = {"param_dtype": "bf16", "main_dtype": "bf16"}
REQUIREMENTS = [
    {"stage": 0, "shard_group_size": 2},
    {"stage": 2, "reshard_after_forward": 2},
    {"stage": 1, "offload": {"parameters": "cpu"}},
    {"stage": 1, "offload": {"step_in_backward": True}},
    {"offload": {"step_in_backward": True}, "precision": {"param_dtype": "float16"}},
    {"offload": {"step_in_backward": True}, "clip_grad_norm": 1.0},
    {"offload": {"step_in_backward": True}, "nonfinite": "skip"},
    {"offload": {"step_in_backward": True}, "mesh": {"pp": 2}},
    {"offload": {"activations": "cpu"}, "compile": True},
    {"gradient_accumulation_steps": 2, "mesh": {"pp": 2}},
    {"mesh": {"sequence": True, "tp": 2, "pp": 2}},
    {"pipeline": {"schedule": "gpipe"}},
    {"pipeline": {"num_microbatches": 2}},
    {"pipeline": {"num_chunks": 4}},
    {"pipeline": {"split": ["2"]}},
    {"pipeline": {"balance": "memory"}},
    {"pipeline": {"trace": True}},
    {"pipeline": {"trace": True}, "mesh": {"pp": 2, "tp": 2}},
    {"pipeline": {"trace": True}, "mesh": {"pp": 2}, "compile": True},
    {"pipeline": {"trace": True}, "mesh": {"pp": 2}, "precision": {"overrides": {"*": "bf16"}}},
    {"ignored": ["gain"], "precision": {"param_dtype": "float16"}},
    {"ignored": ["gain"], "precision": {"main_dtype": "bfloat16"}},
    {"precision": {"loss_scale": 8.0}},
    {"precision": {"overrides": {"gain": "float16"}}},
    {"precision": {"param_dtype": "float16", "loss_scale": {"start": 1.0, "minimum": 2.0}}},
    {"pipeline": {"schedule": "pb"}, "mesh": {"pp": 2}, "clip_grad_norm": 1.0},
    {"pipeline": {"schedule": "pb"}, "mesh": {"pp": 2}, "nonfinite": "error"},
    {"pipeline": {"schedule": "pb"}, "mesh": {"pp": 2}, "precision": {"param_dtype": "float16"}},
    {"pipeline": {"schedule": "pb"}, "mesh": {"pp": 2}, "ignored": ["gain"]},
    {"pipeline": {"schedule": "pb", "weights": "stash"}, "mesh": {"pp": 2}, "offload": ON_HOST},
    {"pipeline": {"schedule": "pb", "weights": "stash"}, "mesh": {"pp": 2}, "reshard_after_forward": False},
    {"pipeline": {"schedule": "pb", "weights": "estimate"}, "mesh": {"pp": 2}, "recompute": "unit"},
    {"pipeline": {"schedule": "pb", "weights": "estimate"}, "mesh": {"pp": 2}, "compile": True},
    {"pipeline": {"schedule": "pb", "correction": "spike"}, "mesh": {"pp": 2}, "offload": ON_HOST},
    {"pipeline": {"schedule": "pb", "weights": "predict"}, "mesh": {"pp": 2}, "precision": ALL_BF16},
    {"pipeline": {"weights": "stash"}, "mesh": {"pp": 2}},
    {"pipeline": {"weights": "double", "microbatches_per_step": 1}, "mesh": {"pp": 2}},
    {"offload": {"optimizer": "nvme"}},
    {"pipeline": {"balance": "memory", "split": ["1"]}, "mesh": {"pp": 2}},
    {"recompute": "auto", "pipeline": {"trace": True}, "mesh": {"pp": 2}},
    {"pipeline": {"microbatches_per_step": 2}, "mesh": {"pp": 2}},
    {"pipeline": {"synchronous_steps": 2}, "mesh": {"pp": 2}},
    {"pipeline": {"correction": "rescale"}, "mesh": {"pp": 2}},
    {"pipeline": {"schedule": "pb", "decay": 0.3}, "mesh": {"pp": 2}},
    {"pipeline": {"schedule": "pb", "weights": "stash", "decay": 0.3}, "mesh": {"pp": 2}},
    {"pipeline": {"schedule": "pb", "anneal_steps": 3}, "mesh": {"pp": 2}},
    {"pipeline": {"schedule": "pb", "max_crossed_steps": 3}, "mesh": {"pp": 2}},
    {"pipeline": {"schedule": "pb", "num_chunks": 2}, "mesh": {"pp": 2}},
]


def problem_of(options):
    """The message that refuses a config, or none."""
    try:
        Config.from_dict(options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("given", REQUIREMENTS, ids=str)
def test_a_config_that_follows_each_message_is_taken(given):
    options, problems = copy.deepcopy(given), []
    while problem := problem_of(options):
        assert problem not in problems, "the change that the message asks for is not enough"
        follow(problem, options)
        problems.append(problem)
    assert problems
