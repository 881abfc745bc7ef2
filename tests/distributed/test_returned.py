"""Tensors that a model returns are those of its graph: gradients of them are plain PyTorch's."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard
from tests.ranks import on_ranks


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, use_cache=False, **sizes))


def loss_and_states(model, embedded):
    """A loss, and the hidden states; the first of them is the leaf that was given."""
    tokens = torch.arange(10).view(2, 5)
    output = model(inputs_embeds=embedded, labels=tokens, output_hidden_states=True)
    assert output.hidden_states[0] is embedded
    return output.loss, output.hidden_states


class Skipped(nn.Module):
    """Returns its input, or half of it."""

    def __init__(self, is_used):
        super().__init__()
        self.layer, self.is_used = nn.Linear(32, 32), is_used

    def forward(self, x):
        return x + self.layer(x) if self.is_used else x


class Returned(nn.Module):
    """Returns its input and the outputs of its blocks, some of which are one tensor."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Skipped(is_used) for is_used in (True, False, True, False)])

    def forward(self, x):
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states


def loss_and_outputs(model, x):
    states = model(x)
    return states[-1].square().mean(), states


def gradients_of(case, model, x):
    """By retain_grad, twice through one graph; and by autograd.grad with a penalty of one of the tensors."""
    loss, states = case(model, x)
    for state in states:
        state.retain_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    loss, again = case(model, x.detach().requires_grad_())
    penalty = 0.1 * again[1].square().mean()
    return [state.grad for state in states], torch.autograd.grad(loss + penalty, again[1])[0]


class Biased(nn.Module):
    """Hands a tensor on, which some ranks use; the first block makes it, unless it is given."""

    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(7, 7), nn.Parameter(torch.ones(7))

    def forward(self, x, position):
        position = (2 * self.bias).sin() if position is None else position
        return torch.tanh(self.layer(x + position if dist.get_rank() == 0 else x)), position


class HandedOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Biased() for _ in range(5)])

    def forward(self, x, position=None):
        for block in self.blocks:
            x, position = block(x, position)
        return x.square().mean()


@on_ranks(2)
def test_a_unit_is_gathered_once_in_a_backward_whatever_passes_through_it():
    """Ranks whose loss does not depend on the tensor gather in the same order."""
    torch.manual_seed(0)
    model, given = HandedOn(), torch.ones(7, requires_grad=True)
    plain = copy.deepcopy(model)
    engine = zeroshard.initialize(
        model, lambda p: torch.optim.SGD(p, lr=0.1), {"stage": 3, "units": ["Biased"]}
    ).engine
    for position in (None, given * 2):
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(dist.get_rank()))
        assert torch.equal(engine(x, position), plain(x, position))  # the order of units is known now
        engine.reset_comm_report()
        engine.backward(engine(x, position))
        assert engine.comm_report().calls["all_gather"] <= 5 + 4  # the last unit stays for the backward
        engine.zero_grad()


CASES = {
    "layers": (llama, ["LlamaDecoderLayer"], loss_and_states),
    "layers inside a unit": (llama, ["LlamaModel", "LlamaDecoderLayer"], loss_and_states),
    "inputs returned": (Returned, ["Skipped"], loss_and_outputs),
    "inputs returned inside a unit": (
        lambda: nn.Sequential(Returned()),
        ["Returned", "Skipped"],
        loss_and_outputs,
    ),
}


@on_ranks(1, 2)
def test_gradients_of_returned_tensors_are_those_of_plain_pytorch():
    for name, (make, units, case) in CASES.items():
        for stage in (0, 3):
            model = make()
            x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
            expected, by_grad = gradients_of(case, copy.deepcopy(model), x.clone().requires_grad_())
            config = {"stage": stage, "units": units}
            engine = zeroshard.initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), config).engine
            found, found_by_grad = gradients_of(case, engine, x.clone().requires_grad_())
            for place, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(one, other), (name, stage, place)
            assert torch.equal(found_by_grad, by_grad), (name, stage)
