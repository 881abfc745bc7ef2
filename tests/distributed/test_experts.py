"""Ranks whose tokens go to different experts train as DDP with find_unused_parameters=True.

An expert that some rank used counts zeros from the others. One that no rank used keeps grad = None, so
that weight decay and momentum leave it alone.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.models import VOCABULARY
from tests.distributed.training import (
    STAGES,
    adamw,
    differences,
    finish,
    numbers,
    plain,
    replicate,
    same_as_replicated,
    start,
)
from tests.ranks import on_ranks

WIDTH, NUM_EXPERTS = 14, 6


# -------------------------------------------------------------------------------------- of transformers


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=36,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            output_router_logits=True,
            use_cache=False,
        )
    )
    model.set_experts_implementation("grouped_mm")
    return model.train()


def mixtral_loss(model, number):
    """Three tokens for eight experts; the loss holds that of the router too."""
    seed = torch.Generator().manual_seed(100 * number + dist.get_rank())
    batch = torch.randint(0, VOCABULARY, (1, 3), generator=seed)
    return model(input_ids=batch, labels=batch).loss


def counts_of_experts(model, number):
    """[rank, layer, expert]: tokens."""
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    chosen = []
    handles = [
        router.register_forward_hook(lambda module, args, output: chosen.append(output[-1]))
        for router in routers
    ]
    mixtral_loss(model, number)
    for handle in handles:
        handle.remove()
    own = torch.stack([torch.bincount(indices.flatten(), minlength=8) for indices in chosen])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return torch.stack(everyone)


@on_ranks(2, timeout=120)
def test_a_mixtral_whose_ranks_route_differently_trains_as_in_ddp_to_the_bit():
    torch.manual_seed(0)
    model = mixtral()
    counts = counts_of_experts(model, 0)
    assert ((counts[0] == 0) != (counts[1] == 0)).any(), "some expert has tokens on one rank alone"
    assert (counts.sum(0) == 0).any(), "some expert has no token at all"
    return same_as_replicated(model, num_steps=4, loss=mixtral_loss, find_unused=True)


# --------------------------------------------------------------------------------- experts as modules


class Experts(nn.Module):
    """The best two of some experts for each token; one without tokens is not called."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.SiLU(), nn.Linear(9, WIDTH)) for _ in range(NUM_EXPERTS)
        )

    def forward(self, x, allowed):
        hidden = self.norm(x)
        closed = torch.tensor([number not in allowed for number in range(NUM_EXPERTS)])
        weights, chosen = self.router(hidden).masked_fill(closed, -torch.inf).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            token, place = torch.where(chosen == number)
            out = out.index_add(0, token, self.experts[number](hidden[token]) * weights[token, place, None])
        return x + out


class Model(nn.Module):
    """Layers of experts between two linear ones."""

    def __init__(self, num_layers=3):
        super().__init__()
        self.first, self.last = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Experts() for _ in range(num_layers))

    def forward(self, x, allowed):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.last(x)


class OfExperts(Experts):
    """Experts that the root itself holds."""

    def forward(self, x, allowed):
        return super().forward(torch.cat((x, x), -1), allowed)


def one_layer():
    """No block is repeated but the experts."""
    return Model(1)


ALLOWED = [
    ({0, 1}, {2, 3}),
    ({0, 1, 2, 3}, {1, 2}),
    ({3, 4}, {3, 4}),
    ({0, 1}, {0, 1}),
    ({0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}),
]
"""By step and rank: the experts that may be chosen. Some rest for steps on all ranks, the last one always."""


def expert_loss(model, number):
    rank = dist.get_rank()
    allowed = ALLOWED[number % len(ALLOWED)][rank % 2]
    return model(numbers(number, 4 + rank, 7), allowed).square().mean()


@pytest.mark.parametrize("make", [Model, one_layer, OfExperts])
@on_ranks(2)
def test_experts_that_some_or_all_ranks_leave_out_train_as_in_ddp_to_the_bit(make):
    """And experts are no units where nothing else is repeated."""
    torch.manual_seed(0)
    model, found = make(), []
    replica = replicate(model, find_unused=True)

    def run(net, optimizer):
        losses, having = [], []
        for number in range(len(ALLOWED)):
            loss = expert_loss(net, number)
            loss.backward()
            having.append({name for name, p in plain(net).named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return finish(net, losses), having

    want, wanted = run(replica, adamw(replica.parameters()))
    for stage in STAGES:
        sharded = copy.deepcopy(model)
        engine, optimizer = start(sharded, adamw(sharded.parameters()), stage=stage)
        got, having = run(engine, optimizer)
        found += differences(f"stage {stage}", got, want)
        found += [(stage, a ^ b) for a, b in zip(having, wanted, strict=True) if a != b]
        last = {n: v for n, v in got.parameters.items() if ".experts.5." in n}
        given = model.state_dict()
        found += [name for name, value in last.items() if not torch.equal(value, given[name])]
    sizes = [len(names) for names in wanted]
    assert len(set(sizes)) > 1
    assert max(sizes) < len(list(model.parameters()))
    return found
