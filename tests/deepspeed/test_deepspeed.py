"""What a DeepSpeed config becomes, and what is said about the rest of it; names of its engine."""

import json
import warnings
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import nn

from tests.distributed.training import caught, numbers, start
from tests.ranks import on_ranks
from zeroshard import Config, Precision
from zeroshard.deepspeed.translate import IGNORED, MAPPED, NO_EQUIVALENT

QUIET = {"gradient_clipping": 0}  # given, so nothing has to be said about it


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def read(config):
    """The Config, without any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Config.from_deepspeed(QUIET | config)


def warned(config):
    """The Config and the text of the one warning."""
    with pytest.warns(UserWarning, match="^DeepSpeed config:") as caught:
        translated = Config.from_deepspeed(config)
    (warning,) = caught
    assert warning.filename == __file__
    return translated, str(warning.message)


def refusal(config):
    """The lines of the one error."""
    with pytest.raises(ValueError, match="DeepSpeed config:") as caught:
        Config.from_deepspeed(config)
    return str(caught.value).split("\n- ")[1:]


# --------------------------------------------------------------------------------------------- mapped

FP16 = Precision(param_dtype="fp16", loss_scale="dynamic")
BF16 = Config(stage=0, precision=Precision(param_dtype="bf16"), nonfinite="skip")
"""DeepSpeed 0.19.6 leaves out a step with gradients that are not finite."""
NO_GROUPS = {"zero_hpz_partition_size": 1, "mics_shard_size": -1}
NO_OFFLOAD = {"offload_optimizer": {"device": "none"}, "offload_param": None}


# tests/test_migrating.py has the keys of docs/migrating.md.
def test_a_key_says_what_it_says_in_deepspeed():
    for config, expected in (
        ({}, Config(stage=0)),
        ({"zero_optimization": None}, Config(stage=0)),
        ({"gradient_clipping": 0.0}, Config(stage=0, clip_grad_norm=None)),
        ({"bfloat16": {"enabled": True, "check_grad_overflow": True}}, BF16),
        ({"bf16": {"enabled": False, "check_grad_overflow": True}}, Config(stage=0)),
        ({"bf16": {"enabled": False}, "fp16": {"loss_scale": 8}}, Config(stage=0)),
        ({"fp16": {"enabled": True}}, Config(stage=0, precision=FP16)),
        ({"data_types": {"param_dtype": "fp32"}}, Config(stage=0, precision=Precision(param_dtype="fp32"))),
        ({"tensor_parallel": {"autotp_size": 0}, "sequence_parallel_size": 1}, Config(stage=0)),
        ({"zero_optimization": {"stage": 3, **NO_GROUPS, **NO_OFFLOAD}}, Config()),
        ({"activation_checkpointing": {"cpu_checkpointing": False}}, Config(stage=0)),
    ):
        assert read(config) == expected


def test_a_file_says_the_same_as_its_dict(tmp_path):
    config = QUIET | {"zero_optimization": {"stage": 2}, "steps_per_print": 10}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    assert warned(str(file)) == warned(file) == warned(config)
    file.write_text(json.dumps({"zero_optimisation": {}}))
    with pytest.raises(ValueError, match="did you mean 'zero_optimization'") as caught:
        Config.from_deepspeed(file)
    assert str(caught.value).startswith(f"config file '{file}': DeepSpeed config:")


# ------------------------------------------------------------------------------------------ batch sizes

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def test_a_global_batch_is_divided_over_the_ranks_of_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for given, micro_batch_size, steps in (
        ({TRAIN: 32, MICRO: 4}, 4, 2),
        ({TRAIN: 32, STEPS: 2}, 4, 2),
        ({TRAIN: 32, STEPS: 2, "tensor_parallel": {"autotp_size": 2}}, 8, 2),
        ({TRAIN: 32}, 8, 1),
        ({MICRO: 4}, 4, 1),
        ({STEPS: 4}, 1, 4),
    ):
        config = read(given)
        assert (config.micro_batch_size, config.gradient_accumulation_steps) == (micro_batch_size, steps)


def test_batch_sizes_that_do_not_agree_are_refused_with_the_numbers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for given in ({TRAIN: 32, MICRO: 4, STEPS: 4}, {TRAIN: 32, MICRO: 5}, {TRAIN: 2}):
        (problem,) = refusal(given)
        assert problem.startswith(f"'train_batch_size': {given[TRAIN]} does not go into micro-batch ")
        assert problem.endswith("data-parallel ranks 4")


def test_a_global_batch_that_is_divided_without_torchrun_is_told():
    config, note = warned(QUIET | {TRAIN: 32, MICRO: 4})
    assert config.gradient_accumulation_steps == 8
    assert "train_batch_size=32 was taken for one rank: WORLD_SIZE, which torchrun sets, is not set" in note
    assert read({TRAIN: 64, MICRO: 4, STEPS: 2}).micro_batch_size == 4  # three sizes may be for any ranks
    assert refusal({TRAIN: 65, MICRO: 4, STEPS: 2})


# ---------------------------------------------------------------------- the one warning, the one error


def test_what_has_no_effect_is_listed_in_one_warning():
    zero = {"stage": 3, "overlap_comm": True, "stage3_max_live_parameters": 1e9}
    more = {"zero_optimization": zero, "steps_per_print": 10, "wandb": {"enabled": True}}
    scale = {"loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}
    more["bf16"] = {"enabled": True, **scale, "initial_scale_power": 15}  # of DeepSpeed's example for CIFAR
    config, note = warned(QUIET | more)
    assert config == replace(BF16, stage=3)
    for key in ("zero_optimization.overlap_comm", "zero_optimization.stage3_max_live", "steps_per", "wandb"):
        assert key in note
    assert all(f"bf16.{key}" in note for key in scale)


def test_one_rank_of_torchrun_warns(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert read({"steps_per_print": 10}) == Config(stage=0)


def test_sections_of_objects_are_not_read_and_the_warning_says_what_to_give():
    config, note = warned(QUIET | {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}})
    assert config == Config(stage=0)
    assert note == (
        "DeepSpeed config:\n- not read: optimizer, scheduler (initialize takes objects of torch; "
        "docs/migrating.md has what does the work of the others)"
    )


def test_clipping_that_newer_deepspeed_does_by_itself_is_told():
    assert "gradient_clipping is not given, so gradients are not clipped" in warned({})[1]


def test_everything_that_is_wrong_is_listed_in_one_error():
    config = {
        "train_batch_size": "auto",
        "gradient_clipping": "1.0",
        "fp16": True,
        "zero_optimization": {"stage": 4, "zero_quantized_weights": True, "overlap_com": True},
        "elasticity": {"enabled": True, "max_train_batch_size": 2000},
    }
    assert refusal(config) == [
        "'train_batch_size': 'auto' is filled in by the Trainer of transformers, from its TrainingArguments",
        "'gradient_clipping': expected a number >= 0, got '1.0' (str)",
        "'fp16': expected a section, got True (bool)",
        "'zero_optimization.stage': expected an integer from 0 to 3, got 4 (int)",
        "'zero_optimization.zero_quantized_weights' has no equivalent: nothing is quantized on the wire; "
        "communication_data_type narrows gradients",
        "unknown key 'zero_optimization.overlap_com'; did you mean 'zero_optimization.overlap_comm'?",
        "'elasticity' has no equivalent: start torchrun with other ranks and keep the global batch yourself",
    ]


def test_a_misspelt_key_is_refused_with_the_closest_one_of_deepspeed():
    for key, meant in (
        ("zero_optimisation", "zero_optimization"),
        ("Gradient_Clipping", "gradient_clipping"),
        ("loss_scale", "fp16.loss_scale"),
        ("fp_16", "fp16"),
    ):
        assert refusal({key: 1}) == [f"unknown key '{key}'; did you mean '{meant}'?"]


def test_a_value_of_the_wrong_kind_is_refused_by_the_name_it_has_in_deepspeed():
    for config, problem in (
        ({"zero_optimization": {"stage": "2"}}, "expected an integer from 0 to 3, got '2' (str)"),
        ({"zero_optimization": [2]}, "'zero_optimization': expected a section, got [2] (list)"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "or 'cpu' or 'nvme', got 'gpu' (str)"),
        ({"bf16": {"enabled": "yes"}}, "'bf16.enabled': expected true or false, got 'yes' (str)"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "'fp16.loss_scale': expected a number >= 0, got -1"),
        ({"gradient_accumulation_steps": 0}, "expected an integer >= 1, got 0 (int)"),
        ({"gradient_clipping": float("nan")}, "expected a number >= 0, got nan (float)"),
        ({"communication_data_type": "int8"}, "got 'int8' (str)"),
        ({"sequence_parallel_size": 4}, "'sequence_parallel_size': expected an integer from 1 to 1, got 4"),
        ({"gradient_allreduce_op": "sum"}, "'gradient_allreduce_op': expected 'mean', got 'sum'"),
        ({"managed_gradient_accumulation": False}, "'managed_gradient_accumulation': expected true, got"),
    ):
        (line,) = refusal(config)
        assert problem in line


def test_only_a_mapping_or_a_path_is_read():
    for config in (None, [("stage", 2)]):
        with pytest.raises(ValueError, match="expected a mapping of DeepSpeed config keys, got "):
            Config.from_deepspeed(config)
    with pytest.raises(ValueError, match=r"'zero_optimization'; Config.from_deepspeed reads DeepSpeed's"):
        Config.from_dict({"zero_optimization": {"stage": 2}})


def test_keys_that_contradict_each_other_are_named():
    assert refusal({"bf16": {"enabled": True}, "fp16": {"enabled": True}}) == [
        "'bf16.enabled' asks for precision.param_dtype=bfloat16, 'fp16.enabled' for float16"
    ]
    paths = {f"offload_{what}": {"device": "nvme", "nvme_path": what} for what in ("param", "optimizer")}
    assert "asks for offload.nvme_path='param'" in refusal({"zero_optimization": {"stage": 3, **paths}})[0]


@pytest.mark.parametrize("key", sorted(NO_EQUIVALENT))
def test_what_has_no_equivalent_may_be_there_when_it_is_switched_off(key):
    for value in (False, None, {}, {"enabled": False}):
        assert read(nested(key, value)) == Config(stage=0)
    asked = nested(key, {"enabled": True})
    if key.startswith("fp16."):  # a section without effect unless it is on
        asked["fp16"]["enabled"] = True
    (problem,) = refusal(asked)
    assert problem.startswith(f"'{key}' has no equivalent: ")


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def test_no_key_has_two_fates():
    assert not MAPPED.keys() & IGNORED
    assert not MAPPED.keys() & NO_EQUIVALENT.keys()
    assert not IGNORED & NO_EQUIVALENT.keys()


# ---------------------------------------------------------------------------------------- names of the engine


class Net(nn.Module):
    hidden_size = 8

    def __init__(self):
        super().__init__()
        self.layer, self.config = nn.Linear(7, 3), {"pad_token_id": 5}

    def forward(self, inputs):
        return self.layer(inputs)

    def describe(self):
        return "a net"

    def encode(self, inputs):
        return self.layer(inputs)


@on_ranks(2)
def test_scripts_of_deepspeed_find_its_names():
    engine, _ = start(Net(), "SGD", gradient_accumulation_steps=2, micro_batch_size=3, clip_grad_norm=0.5)
    for number in range(2):
        engine.backward(engine(numbers(number, 5, 7)).square().mean())
        assert engine.is_gradient_accumulation_boundary() == (number == 1)
        engine.step()
    assert engine.device.type == "cpu"
    assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (dist.get_rank(), 2, 2)
    assert (engine.gradient_accumulation_steps(), engine.skipped_steps, engine.get_lr()) == (2, 0, [0.05])


@on_ranks(1)
def test_a_script_may_tell_where_a_step_ends_and_divide_the_loss_itself():
    """tests/integrations compares such steps with those of DDP."""
    engine, _ = start(Net(), "SGD", gradient_accumulation_steps=2)
    for number in range(3):
        engine.set_gradient_accumulation_boundary(number == 2)
        engine.backward(engine(numbers(number, 5, 7)).square().mean() / 3, scale_wrt_gas=False)
        assert engine.step() == (number == 2)
    with pytest.raises(RuntimeError, match=r"train_batch\(\) counts"):
        engine.train_batch(1)
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary()


@on_ranks(2)
def test_any_other_name_is_the_models_and_its_methods_do_not_compute_with_slices():
    engine, _ = start(Net(), "SGD")
    assert (engine.hidden_size, engine.describe(), engine.layer) == (8, "a net", engine.module.layer)
    assert engine.module.config == {"pad_token_id": 5}
    assert not hasattr(engine, "vocabulary")
    assert "'Config' object has no attribute 'pad_token_id'" in caught(lambda: engine.config.pad_token_id)
    assert "'vocabulary'" in caught(lambda: engine.vocabulary)
    computing = caught(engine.encode, numbers(0, 5, 7))
    assert "'layer.weight'" in computing
    assert "register_forward_method" in computing
