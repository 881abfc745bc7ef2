"""Compute dtypes by name: the parameters that fit, the modules that are cast, and refusals."""

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import Config, Precision
from zeroshard.assemble import find_casts
from zeroshard.plan.buffers import DtypePolicy, group
from zeroshard.plan.names import find_overrides
from zeroshard.plan.units import find_units

WIDE, HALF = torch.float32, torch.bfloat16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router, self.mlp = nn.LayerNorm(4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.mlp(self.norm(x)) * self.gain + self.router(x).sum()


class Model(nn.Module):
    def __init__(self, num_blocks):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(num_blocks)), nn.LayerNorm(4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def build(num_blocks=2):
    return Model(num_blocks)


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


def test_layers_1_is_not_layers_10():
    assert {name.split(".")[1] for name in fitting(build(11), {"layers.1": WIDE})} == {"1"}


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


def test_parameters_that_are_left_out_fit_no_pattern():
    model = build()
    left_out = set(model.norm.parameters())
    assert not left_out & find_overrides(model, {"*norm*": WIDE}, left_out).keys()
    with pytest.raises(ValueError, match=r"fits 'layers.0.norm.weight'"):
        find_units(model, None, ["layers.0.norm.*"], {"layers.0.norm.weight": WIDE})


def test_the_first_pattern_holds_that_fits_any_name_of_a_tied_parameter():
    model = build()
    model.layers[1].mlp.weight = model.layers[0].mlp.weight
    assert find_overrides(model, {"layers.1.mlp.weight": WIDE}) == {model.layers[0].mlp.weight: WIDE}
    found = find_overrides(model, {"layers.1.mlp": WIDE, "layers.0.mlp": torch.float64})
    assert found[model.layers[0].mlp.weight] == WIDE


def casts_of(model, overrides, parts=()):
    """The outermost modules that are cast, by name."""
    casts = find_casts(model, find_overrides(model, overrides), HALF, parts)
    return {
        name for name, module in model.named_modules() if module in casts and casts[module].without is HALF
    }


def test_the_largest_modules_are_cast_whose_parameters_all_have_one_such_dtype():
    model = build()
    assert casts_of(model, {"*norm*": WIDE}) == {"layers.0.norm", "layers.1.norm", "norm"}
    # Nobody calls a list of modules; a module with other parameters deals with two dtypes itself.
    assert casts_of(model, {"layers": WIDE}) == {"layers.0", "layers.1"}
    assert casts_of(model, {"gain": WIDE, "*.mlp.weight": WIDE}) == set()
    assert casts_of(model, {"layers.0": WIDE}, parts={model.layers[0]}) == {
        *("layers.0.norm", "layers.0.router", "layers.0.mlp")
    }


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


def test_a_trace_is_refused():
    with pytest.raises(ValueError, match=r"pipeline.trace=True needs precision.overrides to be None"):
        Config(
            mesh=zeroshard.Mesh(pp=2),
            pipeline=zeroshard.Pipeline(split=["a"], trace=True),
            precision=Precision(overrides={"a": "fp32"}),
        )


def test_an_estimate_of_a_number_of_parameters_has_no_names():
    with pytest.raises(ValueError, match=r"precision.overrides: expected a model.*router"):
        zeroshard.estimate(10**9, 8, {"precision": {"overrides": {"router": "fp32"}}})
