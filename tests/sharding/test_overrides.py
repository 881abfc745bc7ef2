"""Compute dtypes by name: the parameters that fit, the modules that are cast, and refusals."""

import pytest
import torch

from tests.sharding.models import build
from zeroshard import Config, Precision
from zeroshard.assemble import find_casts
from zeroshard.parallel.pipeline.chunked import Absent
from zeroshard.plan.buffers import DtypePolicy, group
from zeroshard.plan.names import find_overrides
from zeroshard.plan.units import find_units

WIDE, HALF = torch.float32, torch.bfloat16


def fitting(model, overrides):
    """The names of the overridden parameters."""
    found = find_overrides(model, overrides)
    return {name for name, parameter in model.named_parameters() if parameter in found}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.norm*", {f"layers.{n}.norm.{at}" for n in (0, 1) for at in ("weight", "bias")}),
        ("norm", {f"{at}norm.{p}" for at in ("", "layers.0.", "layers.1.") for p in ("weight", "bias")}),
        ("layers.1.norm", {"layers.1.norm.weight", "layers.1.norm.bias"}),
        ("norm.weight", {"norm.weight"}),
        ("gain", {"layers.0.gain", "layers.1.gain"}),
        ("layers.?.r*.bias", {"layers.0.router.bias", "layers.1.router.bias"}),
        ("layers.*.router", {f"layers.{n}.router.{at}" for n in (0, 1) for at in ("weight", "bias")}),
    ],
)
def test_patterns_fit_full_names_and_other_text_fits_parts_of_them(pattern, names):
    assert fitting(build(), {pattern: WIDE}) == names


def test_the_first_pattern_that_fits_holds():
    model = build()
    found = find_overrides(model, {"layers.0.*": torch.float64, "*norm*": WIDE, "norm.bias": HALF})
    dtypes = {name: found[p] for name, p in model.named_parameters() if p in found}
    assert dtypes["layers.0.norm.bias"] == torch.float64
    assert {dtypes[name] for name in ("layers.1.norm.weight", "norm.bias")} == {WIDE}


def test_a_pattern_that_fits_nothing_is_refused_with_close_names():
    with pytest.raises(
        ValueError, match=r"precision.overrides.*no parameter whose name fits 'rooter'; close.*'router'"
    ):
        find_overrides(build(), {"*norm*": WIDE, "rooter": WIDE})
    with pytest.raises(ValueError, match=r"fits '\*\.zzz'\. Expected the name of a parameter"):
        find_overrides(build(), {"*.zzz": WIDE})


def casts_of(model, overrides):
    """The outermost modules that are cast, by name."""
    casts = find_casts(model, find_overrides(model, overrides), HALF)
    return {
        name for name, module in model.named_modules() if module in casts and casts[module].without is HALF
    }


def test_the_largest_modules_are_cast_whose_parameters_all_have_one_such_dtype():
    model = build()
    assert casts_of(model, {"*norm*": WIDE}) == {"layers.0.norm", "layers.1.norm", "norm"}
    # Nobody calls a list of modules; a module with other parameters deals with two dtypes itself.
    assert casts_of(model, {"layers": WIDE}) == {"layers.0", "layers.1"}
    assert casts_of(model, {"gain": WIDE, "*.mlp.weight": WIDE}) == set()
    model.layers[0].absent = Absent(adds=False, turn=None, name="absent", names=())
    assert casts_of(model, {"layers.0": WIDE}) == {"layers.0.norm", "layers.0.router", "layers.0.mlp"}


def test_a_unit_gets_one_buffer_more_for_each_dtype():
    specs = find_units(build(), ["Block"], None, {"norm": WIDE, "router": torch.float64})
    policy = DtypePolicy(param_dtype=HALF, reduce_dtype=None, main_dtype=None)
    block = next(spec for spec in specs if spec.name == "layers.0")
    buffers = [{original.fqn.split(".")[2] for original in part} for part in group(block.originals, policy)]
    assert sorted(map(sorted, buffers)) == [["gain", "mlp"], ["norm"], ["router"]]
    same = find_units(build(), ["Block"], None, {"norm": HALF})
    assert all(len(group(spec.originals, policy)) == 1 for spec in same if spec.originals)


# ------------------------------------------------------------------------------------------- the config


def test_a_config_keeps_the_order_and_is_written_as_a_dict():
    config = Config.from_dict(
        {"precision": {"param_dtype": "bf16", "overrides": {"b": "fp32", "a*": "fp64"}}}
    )
    assert dict(config.precision.overrides) == {"b": torch.float32, "a*": torch.float64}
    written = config.to_dict()["precision"]["overrides"]
    assert list(written.items()) == [("b", "float32"), ("a*", "float64")]
    assert Config.from_dict(config.to_dict()) == config
    assert hash(config) == hash(Config.from_dict(config.to_dict()))
    assert Precision(overrides={"a": "fp32", "b": "fp32"}) != Precision(overrides={"b": "fp32", "a": "fp32"})


@pytest.mark.parametrize("value", ["fp32", {"a": "int8"}, {3: "fp32"}, {"": "fp32"}, 3, [("a",)], ["ab"]])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r"precision.overrides': expected None or a dict of dtypes by names"):
        Precision(overrides=value)


def test_float16_for_some_needs_float16_for_all_since_that_has_the_loss_scale():
    with pytest.raises(ValueError, match=r"precision.overrides=.* needs precision.param_dtype to be float16"):
        Precision(param_dtype="bf16", overrides={"a": "fp16"})
