"""Frozen parameters that are replicated by choice: which, their plan, and what is refused."""

import pytest
import torch

from tests.sharding.models import build
from zeroshard import Config
from zeroshard.plan.buffers import DtypePolicy, Setting, group, plan_buffer
from zeroshard.plan.names import find_replicated
from zeroshard.plan.placement import DP_INNER, DP_REPLICATE, DP_SHARD, TP, place
from zeroshard.plan.tiers import Tier, Tiers
from zeroshard.plan.units import find_units


def half_frozen():
    model = build()
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
    assert names(build(), "replicate") == set()
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
    with pytest.raises(ValueError, match=r"'frozen': expected 'shard' or 'replicate' or parameter names"):
        Config(frozen=False)
