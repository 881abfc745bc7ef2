"""Parameters by name: compute dtypes, modules that are cast, frozen ones that are replicated; refusals."""

import pytest
import torch
from torch import nn

from zeroshard import Config, Precision
from zeroshard.assemble import find_casts
from zeroshard.parallel.pipeline.chunked import Absent
from zeroshard.plan.buffers import DtypePolicy, Setting, group, plan_buffer
from zeroshard.plan.names import find_overrides, find_replicated
from zeroshard.plan.placement import DP_INNER, DP_REPLICATE, DP_SHARD, TP, place
from zeroshard.plan.tiers import Tier, Tiers
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
    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(4)


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
    assert fitting(Model(), {pattern: WIDE}) == names


def test_the_first_pattern_that_fits_holds():
    model = Model()
    found = find_overrides(model, {"layers.0.*": torch.float64, "*norm*": WIDE, "norm.bias": HALF})
    dtypes = {name: found[p] for name, p in model.named_parameters() if p in found}
    assert dtypes["layers.0.norm.bias"] == torch.float64
    assert {dtypes[name] for name in ("layers.1.norm.weight", "norm.bias")} == {WIDE}


def test_a_pattern_that_fits_nothing_is_refused_with_close_names():
    with pytest.raises(
        ValueError, match=r"precision.overrides.*no parameter whose name fits 'rooter'; close.*'router'"
    ):
        find_overrides(Model(), {"*norm*": WIDE, "rooter": WIDE})
    with pytest.raises(ValueError, match=r"fits '\*\.zzz'\. Expected the name of a parameter"):
        find_overrides(Model(), {"*.zzz": WIDE})


def casts_of(model, overrides):
    """The outermost modules that are cast, by name."""
    casts = find_casts(model, find_overrides(model, overrides), HALF)
    return {
        name for name, module in model.named_modules() if module in casts and casts[module].without is HALF
    }


def test_the_largest_modules_are_cast_whose_parameters_all_have_one_such_dtype():
    model = Model()
    assert casts_of(model, {"*norm*": WIDE}) == {"layers.0.norm", "layers.1.norm", "norm"}
    # Nobody calls a list of modules; a module with other parameters deals with two dtypes itself.
    assert casts_of(model, {"layers": WIDE}) == {"layers.0", "layers.1"}
    assert casts_of(model, {"gain": WIDE, "*.mlp.weight": WIDE}) == set()
    model.layers[0].absent = Absent(adds=False, turn=None, name="absent", names=())
    assert casts_of(model, {"layers.0": WIDE}) == {"layers.0.norm", "layers.0.router", "layers.0.mlp"}


def test_a_unit_gets_one_buffer_more_for_each_dtype():
    specs = find_units(Model(), ["Block"], None, {"norm": WIDE, "router": torch.float64})
    policy = DtypePolicy(param_dtype=HALF, reduce_dtype=None, main_dtype=None)
    block = next(spec for spec in specs if spec.name == "layers.0")
    buffers = [{original.fqn.split(".")[2] for original in part} for part in group(block.originals, policy)]
    assert sorted(map(sorted, buffers)) == [["gain", "mlp"], ["norm"], ["router"]]
    same = find_units(Model(), ["Block"], None, {"norm": HALF})
    assert all(len(group(spec.originals, policy)) == 1 for spec in same if spec.originals)


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


def half_frozen():
    model = Model()
    model.layers[0].requires_grad_(False)
    model.layers[1].norm.requires_grad_(False)
    return model


def names(model, choice, left_out=()):
    found = find_replicated(model, choice, left_out)
    return {name for name, parameter in model.named_parameters() if parameter in found}


def test_a_choice_or_patterns_name_frozen_parameters():
    model = half_frozen()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert names(model, "shard") == set()
    assert names(model, "replicate") == frozen
    assert names(Model(), "replicate") == set()
    assert names(model, ("*norm*",)) == {name for name in frozen if "norm" in name}
    assert names(model, ("layers.0.mlp", "gain")) == {
        *("layers.0.mlp.weight", "layers.0.mlp.bias", "layers.0.gain")
    }
    assert not names(model, "replicate", set(model.parameters()))


def test_patterns_that_fit_no_frozen_parameter_are_refused():
    with pytest.raises(ValueError, match=r"'frozen': the model has no .* fits 'normal'; close .* 'norm'"):
        names(half_frozen(), ("normal",))
    with pytest.raises(ValueError, match=r"'layers.1.mlp' fits trained parameters alone, such as 'layers"):
        names(half_frozen(), ("layers.1.mlp",))


def setting(stage=3, **tiers):
    sizes = {DP_SHARD: 4, DP_REPLICATE: 1, DP_INNER: 1, TP: 1}
    dtypes = DtypePolicy(param_dtype=torch.bfloat16, reduce_dtype=None, main_dtype=None)
    return Setting(placements=place(stage, True, 4), dtypes=dtypes, sizes=sizes, tiers=Tiers(**tiers))


def test_their_buffer_is_resident_whole_and_on_the_device_at_every_stage():
    specs = find_units(half_frozen(), ["Block"], frozen=("layers.0.mlp",))
    block = next(spec for spec in specs if spec.name == "layers.0")
    for stage in range(4):
        made = setting(stage, parameters=Tier.HOST if stage == 3 else Tier.DEVICE)
        rest, chosen = (plan_buffer(part, made) for part in group(block.originals, made.dtypes))
        assert chosen.layout.sizes == (16, 4)
        assert chosen.is_resident
        assert chosen.is_alias
        assert not chosen.is_partial
        assert chosen.gathers == chosen.regathers == chosen.reductions == ()
        assert chosen.main_tier is Tier.DEVICE
        assert rest.is_resident == (stage < 3)


def test_a_config_takes_a_word_or_patterns():
    assert Config().frozen == "shard"
    assert Config(frozen="Replicate").frozen == "replicate"
    assert Config(frozen="tower").frozen == ("tower",)
    assert Config.from_dict(Config(frozen=["a.*", "b"]).to_dict()).frozen == ("a.*", "b")
    with pytest.raises(ValueError, match=r"'frozen': expected 'shard' or 'replicate' or names of"):
        Config(frozen=False)
