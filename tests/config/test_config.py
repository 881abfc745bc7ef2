"""What the user may ask for, how it is written down, and what the refusals say."""

import dataclasses
import json
import math
import pathlib
import re

import pytest
import torch
from torch import nn

from tests.distributed.training import refused
from zeroshard.config.sections import Checkpoint, Config, Loader, Mesh, Offload, Pipeline, Precision
from zeroshard.parallel.pipeline.actions import parse_schedule

SECTIONS = {kind.__name__.lower(): kind for kind in (Precision, Offload, Checkpoint, Loader, Mesh, Pipeline)}


class Block(nn.Module):
    pass


LISTS = "0F0,0B0\n1F0,1B0\n"


def test_a_config_is_frozen_keyword_only_and_hashable():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 1
    with pytest.raises(TypeError):
        Config(1)
    assert hash(config) == hash(Config())


def test_a_value_is_stored_in_one_form_whatever_its_spelling():
    for kind, key, given, stored in (
        (Config, "device", None, None),
        (Config, "device", "cpu:0", "cpu"),
        (Config, "device", torch.device("xpu", 2), "xpu:2"),
        (Pipeline, "schedule", "ZB-H1", "zb-h1"),
        (Pipeline, "schedule", LISTS, LISTS),
        (Pipeline, "schedule", parse_schedule(LISTS), LISTS),
        (Pipeline, "schedule", pathlib.Path("lists", "Own.csv"), str(pathlib.Path("lists/Own.csv"))),
        (Config, "ignored", ["router.*", "blocks.?.scale"], ("router.*", "blocks.?.scale")),
        (Config, "ignored", "bias", ("bias",)),
        *((Config, "units", units, ("Block",)) for units in ("Block", Block, ["Block"], (Block,))),
        *((Precision, "param_dtype", name, torch.bfloat16) for name in ("bf16", "BFloat16", torch.bfloat16)),
        *((Precision, "param_dtype", name, torch.float16) for name in ("fp16", "torch.half", "float16")),
        *((Precision, "reduce_dtype", name, torch.float32) for name in ("fp32", "float")),
        *((Precision, "reduce_dtype", name, torch.float64) for name in ("FP64", "torch.double")),
    ):
        assert getattr(kind(**{key: given}), key) == stored


# ---------------------------------------------------------------------------------- types and ranges


NAN, INF = math.nan, math.inf
AN_INTEGER = (True, "1", 1.0, [1])

WRONG_VALUES = [
    ("stage", [-1, 4, None, ["x" * 10**6], *AN_INTEGER]),
    ("gradient_accumulation_steps", [0, -1, None, *AN_INTEGER]),
    ("device", ["", "gpu", "cuda:", "meta", "cuda:-1", 0, True, ["cpu"], b"cpu"]),
    ("micro_batch_size", [0, None]),
    ("shard_group_size", [0, True]),
    ("num_prefetch", [-1, True]),
    ("clip_grad_norm", [0, -1.0, NAN, INF, 10**400, True, "1.0", 1j]),
    ("nonfinite", [None, True, "ignore", ["skip"]]),
    ("watchdog_s", [0, -1, NAN, INF, None, False, "600"]),
    ("units", [3, True, [3], ["Block", None], [""], "", b"Block", {"Block": 1}, {"Block"}, [int]]),
    ("units", [Block(), [Block()], [["norm", "head"]]]),
    ("ignored", [[3]]),
    ("reshard_after_forward", [1, 0, -2, None, "true", 2.0]),
    ("watchdog_s", [1e30]),
    ("recompute", ["full", None, True]),
    ("compile", [1, None, "yes"]),
    ("precision", [None, "bf15", torch.int8, Mesh()]),
    ("offload", [None, "cpu", True]),
    ("precision.param_dtype", [torch.int8, torch.complex64, "bf15", "torch", 16, True, torch.tensor(1.0)]),
    ("precision.reduce_dtype", [torch.int64, "int8"]),
    ("precision.main_dtype", [torch.bool, "", "fp16"]),
    ("precision.output_dtype", ["float8_e4m3fn", torch.float8_e4m3fn]),
    ("precision.loss_scale", [0, -2, NAN, INF, True, "static", "128"]),
    ("offload.optimizer", [None, "gpu", True]),
    ("offload.parameters", [None, "disk"]),
    ("offload.activations", [None, "disk", "nvme", ["cpu"]]),
    ("offload.device_fraction", [-0.1, 1.1, NAN, None, True, "0.5"]),
    ("offload.nvme_path", ["", 3, True, b"/nvme"]),
    ("checkpoint.keep_last", [0, -1, *AN_INTEGER]),
    ("checkpoint.verify", [1, None, "yes"]),
    ("mesh.pp", [0, None]),
    ("mesh.tp", [0, "1"]),
    ("pipeline.schedule", ["2f2b", None, 1, "own.txt", "0F0,0B0", pathlib.Path("own.txt"), b"own.csv"]),
    ("pipeline.num_microbatches", [0, None]),
    ("pipeline.split", [3, [3], [Block], b"layers"]),
    ("pipeline.num_chunks", [0, 1.0]),
    ("pipeline.balance", [None, "speed", 1]),
    ("pipeline.weights", ["newest", 1]),
    ("pipeline.decay", [2, -0.1, "1"]),
]


def nested(key, value):
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


@pytest.mark.parametrize(("key", "values"), WRONG_VALUES)
def test_a_wrong_value_is_refused_with_its_key_what_was_expected_and_what_came(key, values):
    section, _, name = key.rpartition(".")
    for value in values:
        by_constructor = refused(SECTIONS.get(section, Config), **{name: value})
        by_dict = refused(Config.from_dict, nested(key, value))
        assert by_constructor == by_dict
        assert by_dict.startswith(f"config key '{key}': expected ")
        got = "None" if value is None else f"({type(value).__name__})"
        assert by_dict.endswith(got)
        assert repr(value).removeprefix("torch.")[:200] in by_dict
        assert len(by_dict) < 400


def test_a_loss_scale_is_a_number_or_dynamic_and_needs_float16():
    assert Precision(param_dtype="fp16", loss_scale="Dynamic").loss_scale == "dynamic"
    assert Precision(param_dtype="fp16", loss_scale=1024).loss_scale == 1024.0
    assert refused(Precision, loss_scale="dynamic", param_dtype="bf16") == (
        "precision.loss_scale='dynamic' needs precision.param_dtype to be float16, got bfloat16"
    )
    assert "precision.param_dtype to be float16, got None" in refused(Precision, loss_scale=8)


def test_a_predicate_is_kept_but_cannot_be_written_down():
    def is_block(module):
        return isinstance(module, Block)

    config = Config(units=is_block)
    assert config.units is is_block
    message = refused(config.to_dict)
    assert message.startswith("config key 'units': expected class names to write down, got <function")


# --------------------------------------------------------------------------------------- dicts and files


def test_a_misspelt_key_is_refused_with_the_closest_one():
    message = refused(Config.from_dict, {"precison": {"param_dtype": "bf16"}})
    assert message.startswith("unknown config key 'precison'; did you mean 'precision'? Known keys: stage, ")
    for known in dataclasses.fields(Config):
        assert known.name in message
    for key, meant in (
        ("Stage", "stage"),
        ("clip_gradient_norm", "clip_grad_norm"),
        ("grad_accumulation_steps", "gradient_accumulation_steps"),
        ("param_dtype", "precision.param_dtype"),
    ):
        assert f"unknown config key '{key}'; did you mean '{meant}'?" in refused(Config.from_dict, {key: 1})


def test_a_dtype_alone_is_a_precision_that_computes_in_it():
    for dtype in ("bf16", torch.float32):
        for config in (Config(precision=dtype), Config.from_dict({"precision": dtype})):
            assert config.precision == Precision(param_dtype=dtype)
            assert Config.from_dict(config.to_dict()) == config


def test_reading_a_dict_leaves_it_as_it_was():
    options = {"precision": {"param_dtype": "bf16"}, "units": ["Block"]}
    Config.from_dict(options)
    assert options == {"precision": {"param_dtype": "bf16"}, "units": ["Block"]}


WRITTEN = [
    {"precision": {"param_dtype": "fp16", "loss_scale": 8, "output_dtype": "fp32"}, "nonfinite": "skip"},
    {"precision": {"param_dtype": "fp16", "loss_scale": {"start": 4.0}}, "device": "cuda:1"},
    {"precision": {"param_dtype": "bf16", "main_dtype": "bf16", "overrides": {"*.norm": "fp32"}}},
    {"units": ["Block", "Head"], "ignored": ["router.*"], "frozen": ["tower"], "reshard_after_forward": 4},
    {"offload": {"optimizer": "nvme", "parameters": "cpu", "nvme_path": "/a", "device_fraction": 0.5}},
    {"stage": 0, "clip_grad_norm": 0.5, "gradient_accumulation_steps": 2, "offload": {"activations": "cpu"}},
    {"mesh": {"pp": 2, "tp": 3}, "pipeline": {"schedule": LISTS, "num_microbatches": 5, "split": ["a"]}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "2bw", "balance": "memory"}, "watchdog_s": 0.5},
]


@pytest.mark.parametrize("options", WRITTEN)
def test_a_config_survives_being_written_down_as_json_and_read_again(options):
    config = Config.from_dict(options)
    written = json.dumps(config.to_dict(), allow_nan=False)
    assert Config.from_dict(json.loads(written)) == config


JSON = '{"stage": 2, "clip_grad_norm": 1, "units": ["Block"], "precision": {"param_dtype": "bf16"}}'
TOML = 'stage = 2\nclip_grad_norm = 1\nunits = ["Block"]\n[precision]\nparam_dtype = "bf16"\n'


def write(folder, name, text):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_json_and_toml_files_say_the_same(tmp_path):
    expected = Config(stage=2, clip_grad_norm=1, units="Block", precision=Precision(param_dtype="bf16"))
    for name, text in (("c.json", JSON), ("c.toml", TOML), ("C.JSON", JSON), ("bom.json", "\ufeff" + JSON)):
        file = write(tmp_path, name, text)
        assert Config.from_file(file) == Config.from_file(str(file)) == expected


def test_what_is_wrong_in_a_file_is_told_with_the_name_of_the_file(tmp_path):
    for name, text, reason in (
        ("c.yaml", "stage: 2", "expected a name that ends in .json or .toml"),
        ("c.json", '{"stage": 2,\n "units" "Block"}', "line 2"),
        ("c.toml", "stage = 2\n\nunits = Block\n", "line 3"),
        ("c.json", "[1, 2]", "expected a mapping of config keys, got [1, 2] (list)"),
        ("c.json", '{"precison": {}}', "unknown config key 'precison'; did you mean 'precision'?"),
        ("c.toml", "stage = 9\n", "config key 'stage': expected an integer from 0 to 3, got 9 (int)"),
        ("c.json", '{"clip_grad_norm": Infinity}', "'clip_grad_norm': expected None or a finite number"),
        ("c.toml", "stage = 0\nshard_group_size = 2\n", "needs stage to be >= 1"),
    ):
        file = write(tmp_path, name, text)
        message = refused(Config.from_file, file)
        assert message.startswith(f"config file '{file}': ")
        assert reason in message


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ValueError if path is tmp_path else OSError, match=re.escape(str(path))):
            Config.from_file(path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert f"config file '{binary}': " in refused(Config.from_file, binary)


def test_parse_takes_nothing_a_config_a_dict_or_a_path(tmp_path):
    config = Config(stage=2)
    file = write(tmp_path, "c.toml", "stage = 2\n")
    assert Config.parse(None) == Config()
    assert Config.parse(config) is config
    assert Config.parse({"stage": 2}) == Config.parse(file) == Config.parse(str(file)) == config
    assert refused(Config.parse, 3) == "expected a mapping of config keys, got 3 (int)"
