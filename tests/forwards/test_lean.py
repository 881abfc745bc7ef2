"""Activations that save less: the same gradients, and the tensors that are counted."""

import pytest
import torch
from torch import nn
from transformers import Phi3Config, activations
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import zeroshard
from tests.parallel.models import build, kind_of, tokens_of
from tests.parallel.runs import compare, divided, plain
from zeroshard.forwards.lean import lean_forwards
from zeroshard.memory.activations import LiveBytes
from zeroshard.sharding.context import Changes

TOKENS, INNER = 32, 48


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


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
        lean_forwards(module, changes)
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


class Curved(nn.ReLU):
    """An activation with a parameter."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))


def with_curve():
    module = Gated()
    module.act_fn = Curved()
    return module


def with_forward():
    module = Gated()
    module.forward = lambda x: x
    return module


def with_dropout():
    module = Gated()
    module.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    return module


def with_hook():
    module = Gated()
    module.act_fn.register_forward_hook(lambda *_: None)
    return module


def with_one_projection():
    return Phi3MLP(Phi3Config(hidden_size=16, intermediate_size=8))


@pytest.mark.parametrize(
    "make", [Patched, with_curve, with_dropout, with_hook, with_forward, with_one_projection]
)
def test_other_modules_stay_as_they_are(make):
    module, changes = make(), Changes()
    lean_forwards(module, changes)
    assert not changes.stacks


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


def test_estimates_count_what_is_left_out():
    tokens, layers, inner = 9 * 1000, 2, build("Llama").config.intermediate_size
    whole, lean = (
        zeroshard.estimate(build("Llama"), 1, {"recompute": recompute}, num_tokens=tokens).activations
        for recompute in ("none", "lean")
    )
    assert whole - lean == layers * tokens * inner * 8


def test_the_units_show_it():
    engine = zeroshard.initialize(build("Llama"), sgd, {"stage": 3, "recompute": "lean"}).engine
    mlp = engine.module.model.layers[0].mlp
    assert engine._runtime.changes.stacks[mlp] == ["lean"]
    tokens = tokens_of(0)
    x = torch.randn(2, 32, dtype=torch.float64, requires_grad=True)
    with engine.unsharded():
        (first,) = torch.autograd.grad(mlp(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.close(restore=False)
