"""Activations that save less: the same gradients, and the tensors that are counted."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import Phi3Config, activations
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import zeroshard
from tests.forwards.peak import Peak
from tests.parallel.models import build, kind_of, tokens_of
from tests.parallel.runs import compare, divided, plain
from zeroshard.config.sections import Config
from zeroshard.forwards import lean, tiled
from zeroshard.forwards.dryrun import LiveBytes
from zeroshard.forwards.lean import change_mlps
from zeroshard.sharding.context import Changes

TOKENS, INNER = 32, 48


sgd = partial(torch.optim.SGD, lr=0.1)


class Gated(LlamaMLP):
    def __init__(self, act="silu"):
        nn.Module.__init__(self)
        self.gate_proj, self.up_proj = (nn.Linear(16, INNER, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(INNER, 16, bias=False), activations.ACT2FN[act]


def ran(module, is_lean, width):
    """The output and the gradients of a module, and the tensors of tokens x inner elements that it saves."""
    torch.manual_seed(0)
    changes, x = Changes(), torch.randn(TOKENS, width, requires_grad=True)
    module.zero_grad()
    if is_lean:
        change_mlps(module, "lean", "none", changes, is_whole=True)
    with LiveBytes([x, *module.parameters()]) as live:
        output = module(x)
        saved = live.now - output.nbytes
    output.square().sum().backward()
    return output, [x.grad, *(p.grad.clone() for p in module.parameters())], saved / (TOKENS * INNER * 4)


@pytest.mark.parametrize(("act", "before", "after"), [("silu", 4, 3), ("relu", 3, 3), ("gelu_new", 7, 3)])
def test_a_gated_mlp_saves_three_tensors_and_its_gradients_have_the_same_bits(act, before, after):
    module = Gated(act)
    plain_output, expected, num = ran(module, False, 16)
    lean_output, got, num_lean = ran(module, True, 16)
    assert (num, num_lean) == (before, after)
    is_same_function = act != "gelu_new"
    for one, other in zip([lean_output, *got], [plain_output, *expected], strict=True):
        assert torch.equal(one, other) or not is_same_function
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [activations.NewGELUActivation, activations.FastGELUActivation])
def test_a_written_out_gelu_is_torchs(kind):
    plain_output, expected, num = ran(kind(), False, INNER)
    lean_output, got, num_lean = ran(kind(), True, INNER)
    assert num >= 3
    assert num_lean == 0  # its input, which is counted elsewhere
    torch.testing.assert_close([lean_output, *got], [plain_output, *expected], rtol=1e-6, atol=1e-6)


class Patched(Gated):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + 1


def with_forward():
    module = Gated()
    module.forward = lambda x: x
    return module


def with_edits():
    module = Gated()
    module.act_fn = nn.SiLU(inplace=True)
    return module


def with_one_projection():
    return Phi3MLP(Phi3Config(hidden_size=16, intermediate_size=8))


@pytest.mark.parametrize("make", [Patched, with_edits, with_forward, with_one_projection])
def test_other_modules_stay_as_they_are(make):
    module, changes = make(), Changes()
    change_mlps(module, "lean", "none", changes, is_whole=True)
    assert not changes.stacks


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize(
    ("num_ranks", "config", "name"),
    [
        (1, {"stage": 3}, "Llama"),
        (2, {"stage": 3, "offload": {"activations": "cpu"}}, "Qwen3, tied"),
        (2, {"stage": 1, "mesh": {"tp": 2}, "loss": {"tiles": 2}}, "Llama"),
        (2, {"stage": 3}, "GPT-2"),
    ],
    ids=str,
)
def test_a_model_of_transformers_trains_as_in_one_process(ranks, num_ranks, config, name):
    kind = kind_of(name)
    found = ranks(num_ranks, divided, {**config, "recompute": "lean"}, sgd, kind=kind, steps=3)
    compare(found, plain(sgd, kind=kind, steps=3), losses=1e-6, norms=1e-5, values=1e-6)


@pytest.mark.parametrize("tiles", [1, 5, TOKENS, 1000, "auto"])
def test_an_mlp_in_tiles_has_the_same_gradients_and_one_tile_at_a_time(tiles, monkeypatch):
    monkeypatch.setattr(tiled, "TILE_BYTES", 5 * 6 * INNER * 8 * 2)
    found = []
    for number in ("none", tiles):
        torch.manual_seed(0)
        module, x = Gated().double(), torch.randn(2, TOKENS, 16, dtype=torch.float64, requires_grad=True)
        change_mlps(module, "none", number, Changes(), is_whole=True)
        with Peak([x, *module.parameters()]) as live:
            output = module(x)
            saved = live.now
            output.square().sum().backward()
        found.append((output, x.grad, *(p.grad for p in module.parameters())))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    wide, weights = 2 * TOKENS * INNER * 8, 3 * 16 * INNER * 8
    assert saved < 4 * x.nbytes
    if tiles in (5, "auto"):
        assert live.peak < 8 * wide // 5 + 8 * x.nbytes + 2 * weights
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(x), output, rtol=1e-12, atol=1e-12)
    for part, want in ((x[None], output[None]), (x[0], output[0]), (x[0, 0], output[0, 0])):
        torch.testing.assert_close(module(part), want, rtol=1e-12, atol=1e-12)


def test_without_gated_mlps_tiles_are_refused():
    with pytest.raises(ValueError, match=r"'mlp\.tiles': expected gated MLPs of transformers"):
        zeroshard.initialize(build("GPT-2"), sgd, {"mlp": {"tiles": 2}})
    for others in ({"mesh": {"tp": 2, "sequence": True}}, {"compile": True}):
        with pytest.raises(ValueError, match=r"mlp\.tiles"):
            Config.parse({"mlp": {"tiles": 2}, **others})


def test_the_forward_of_a_gated_mlp_takes_one_argument():
    def scaled(self, x, scale=None):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    assert lean._is_gated(LlamaMLP.forward)
    assert not lean._is_gated(scaled)


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [
        (1, {"stage": 0}),
        (2, {"stage": 3, "recompute": "unit", "gradient_accumulation_steps": 2}),
        (2, {"stage": 1, "mesh": {"tp": 2}, "recompute": "lean"}),
    ],
    ids=str,
)
def test_a_model_with_mlps_in_tiles_trains_as_in_one_process(ranks, num_ranks, config):
    kind = kind_of("Llama")
    found = ranks(num_ranks, divided, {**config, "mlp": {"tiles": 3}}, sgd, kind=kind, steps=3)
    compare(found, plain(sgd, kind=kind, steps=3), losses=1e-6, norms=1e-5, values=1e-6)


def test_estimates_count_what_is_left_out():
    tokens, layers, inner = 9 * 1000, 2, build("Llama").config.intermediate_size
    whole, leaner = (
        zeroshard.estimate(build("Llama"), 1, {"recompute": recompute}, num_tokens=tokens).activations
        for recompute in ("none", "lean")
    )
    assert whole - leaner == layers * tokens * inner * 8
    tiled = zeroshard.estimate(build("Llama"), 1, {"mlp": {"tiles": 16}}, num_tokens=tokens).activations
    assert layers * tokens * inner * 8 * 3.5 < whole - tiled <= layers * tokens * inner * 8 * 4


def test_the_units_show_it():
    engine = zeroshard.initialize(build("Llama"), sgd, {"stage": 3, "recompute": "lean"}).engine
    mlp = engine.module.model.layers[0].mlp
    assert engine._runtime.changes.stacks[mlp] == ["lean"]
    tokens = tokens_of(0)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.close(restore=False)
