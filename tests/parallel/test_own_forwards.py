"""Layers with code of the user, which would compute with a part, are refused; left whole they are right."""

import functools
import re

import pytest
import torch.nn.functional as F
import transformers
from torch import nn

from tests.parallel.runs import PLAN, adamw, compare, divided, plain, small_gpt
from zeroshard.parallel.tensor.division import match


class Ternary(nn.Linear):
    """A layer with a statistic of its whole weight, as of BitNet."""

    def forward(self, x):
        weight = self.weight.sign() * self.weight.abs().mean()
        return F.linear(x, self.weight + (weight - self.weight).detach(), self.bias)


class Centred(nn.Embedding):
    """An embedding whose rows have the mean 0."""

    def forward(self, tokens):
        return F.embedding(tokens, self.weight - self.weight.mean(0))


class Same(nn.Linear):
    """A subclass without a forward."""


def of_class(cls, layer):
    layer.__class__ = cls


def patched(layer):
    forward = layer.forward
    layer.forward = lambda x: 3.0 * forward(x)


def wrapped(layer):
    forward = nn.Linear.forward

    @functools.wraps(forward)  # whose __module__ is then torch's
    def tripled(layer, x):
        return 3.0 * forward(layer, x)

    layer.__class__ = type("Linear", (nn.Linear,), {"forward": tripled})


def hooked(layer):
    layer.register_forward_hook(lambda module, args, output: output / output.abs().amax(-1, keepdim=True))


def hooked_before(layer):
    layer.register_forward_pre_hook(lambda module, args: args[0] - args[0].mean(-1, keepdim=True))


def hooked_after(layer):
    layer.register_full_backward_hook(lambda module, given, gained: None)


ternary, centred, same = (functools.partial(of_class, cls) for cls in (Ternary, Centred, Same))
CASES = {
    "blocks.0.down": (hooked_before, ("blocks.0.up", "blocks.0.down"), "a Linear with hooks"),
    "tokens": (centred, ("tokens", "head"), "a Centred with a forward of its own"),
}
"""Code at a layer, and the layers that stay whole then, as the error says."""


@pytest.mark.long_where(name=["tokens"])
@pytest.mark.parametrize("name", CASES)
def test_code_of_the_user_is_refused_and_right_in_a_whole_layer(ranks, name):
    change, whole, what = CASES[name]
    model = small_gpt(0)
    change(model.get_submodule(name))
    with pytest.raises(ValueError, match=f"^tp_plan: '{name}' is {what}, which would get a part of") as told:
        match(model, PLAN, 2)
    assert f"Put '{name}': 'replicate' first in tp_plan, and the same for the layers" in str(told.value)
    plan = dict.fromkeys(whole, "replicate")
    changing = functools.partial(change_at, name)
    config = {"stage": 3, "mesh": {"tp": 2}}
    runs = ranks(2, divided, config, adamw, changing, plan=plan | PLAN | plan)
    compare(runs, plain(adamw, changing), losses=1e-9, norms=1e-6, values=1e-8)


def change_at(name, model):
    CASES[name][0](model.get_submodule(name))


@pytest.mark.parametrize(
    "word", ["colwise", "colwise_gather_output", "packed_colwise", "rowwise", "rowwise_split_input"]
)
@pytest.mark.parametrize("change", [patched, wrapped, hooked, hooked_before, hooked_after, ternary, same])
def test_all_ways_to_divide_a_layer_refuse_the_same(change, word):
    model = small_gpt(0)
    change(model.blocks[0].up)
    if change is same:
        assert match(model, {"blocks.*.up": word}, 2)
    else:
        with pytest.raises(ValueError, match=re.escape("'blocks.0.up' is a ")):
            match(model, {"blocks.*.up": word}, 2)


def test_hooks_of_an_embedding_by_tokens_see_whole_values():
    """Such as those of enable_input_require_grads()."""
    model = small_gpt(0)
    model.tokens.register_forward_hook(lambda module, args, output: output.requires_grad_())
    assert match(model, {"tokens": "rowwise"}, 2)


def test_forwards_of_transformers_are_known():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes))
    plan = {"model.embed_tokens": "rowwise"}
    assert match(model, plan, 2)
    patched(model.model.embed_tokens)
    text = "'model.embed_tokens' is a Gemma3TextScaledWordEmbedding"
    with pytest.raises(ValueError, match=re.escape(text)):
        match(model, plan, 2)
