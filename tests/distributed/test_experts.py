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
from tests.distributed.test_unused import adamw, sgd
from tests.distributed.training import (
    STAGES,
    differences,
    distance_of_all,
    finish,
    flat_gradients,
    full_gradients,
    numbers,
    plain,
    replicate,
    same_as_replicated,
    start,
    train_replicated,
    train_sharded,
)

WIDTH, NUM_EXPERTS = 14, 6


# -------------------------------------------------------------------------------------- of transformers


def mixtral(implementation):
    """`implementation`: of the experts; a loop over them, or grouped products of matrices."""
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
    model.set_experts_implementation(implementation)
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


def train_mixtral(implementation, **config):
    torch.manual_seed(0)
    model = mixtral(implementation)
    counts = counts_of_experts(model, 0)
    assert ((counts[0] == 0) != (counts[1] == 0)).any(), "some expert has tokens on one rank alone"
    assert (counts.sum(0) == 0).any(), "some expert has no token at all"
    return same_as_replicated(model, num_steps=4, loss=mixtral_loss, find_unused=True, **config)


@pytest.mark.long_where(implementation=["eager"])
@pytest.mark.long_where(config=[{"recompute": "unit"}])
@pytest.mark.parametrize(
    ("implementation", "config"), [("eager", {}), ("grouped_mm", {}), ("grouped_mm", {"recompute": "unit"})]
)
def test_a_mixtral_whose_ranks_route_differently_trains_as_in_ddp_to_the_bit(ranks, implementation, config):
    pytest.importorskip("transformers")
    assert ranks(2, train_mixtral, implementation, timeout=120, **config) == [[], []]


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


def train_experts(make, make_optimizer, **config):
    """Where parameters, losses, and the names of what has a gradient differ from DDP's."""
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

    want, wanted = run(replica, make_optimizer(replica.parameters()))
    for stage in STAGES:
        sharded = copy.deepcopy(model)
        engine, optimizer = start(sharded, make_optimizer(sharded.parameters()), stage=stage, **config)
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


@pytest.mark.long_where(config=[{"recompute": "unit"}, {"num_prefetch": 3}])
@pytest.mark.long_where(optimizer=[sgd])
@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("config", [{}, {"recompute": "unit"}, {"num_prefetch": 3}], ids=str)
def test_experts_that_some_or_all_ranks_leave_out_train_as_in_ddp_to_the_bit(ranks, optimizer, config):
    assert ranks(2, train_experts, Model, optimizer, **config) == [[], []]


@pytest.mark.parametrize("make", [one_layer, OfExperts])
def test_experts_are_no_units_where_nothing_else_is_repeated(ranks, make):
    assert ranks(2, train_experts, make, adamw) == [[], []]


def on_many_ranks():
    torch.manual_seed(0)
    model = Model()
    want = train_replicated(model, "SGD", 5, expert_loss, find_unused=True)
    runs = {stage: train_sharded(model, "SGD", 5, expert_loss, stage=stage) for stage in STAGES}
    found = [line for stage in STAGES for line in differences(f"stage {stage}", runs[stage], runs[3])]
    losses = max(abs(a - b) / abs(b) for a, b in zip(runs[3].losses, want.losses, strict=True))
    parameters = runs[3].parameters
    return found, losses, distance_of_all(parameters, want.parameters) if parameters else 0


@pytest.mark.long
def test_on_four_ranks_stages_agree_to_the_bit_and_stay_close_to_ddp(ranks):
    for found, losses, parameters in ranks(4, on_many_ranks):
        assert found == []
        assert losses <= 1e-6
        assert parameters <= 5e-6


def over_micro_batches():
    """Gradients of two micro-batches with other experts each, against their mean computed by hand."""
    torch.manual_seed(0)
    model, found = Model(), {}
    reference = copy.deepcopy(model)
    for number in range(2):
        (expert_loss(reference, number) / 2).backward()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, flat_gradients(reference))
    names = set().union(*everyone)
    want = {n: sum(own[n] for own in everyone if n in own) / len(everyone) for n in names}
    for stage in STAGES:
        engine, _ = start(copy.deepcopy(model), stage=stage, gradient_accumulation_steps=2)
        engine.backward(expert_loss(engine, 0))
        engine.step()
        engine.backward(expert_loss(engine, 1))
        engine._runtime.before_step()
        found[stage] = distance_of_all(full_gradients(engine), want)
    assert len(names) < len(list(model.parameters()))
    return found


def test_experts_of_several_micro_batches_add_up(ranks):
    for found in ranks(2, over_micro_batches):
        for stage, distance in found.items():
            assert distance <= 1e-6, stage
