"""LARS and LAMB against the formulas of their papers, written here in float64 for one process.

The models are linear in their parameters, so their gradients are known: exactly, but for the rounding of
sums over three ranks.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import STAGES, seeded, start
from tests.optim.matrices import Net, gradient, is_used, net_with_zeros
from tests.ranks import on_ranks
from zeroshard.optim import LAMB, LARS, AdamW8bit
from zeroshard.optim.adopted import check_optimizer

NUM_STEPS = 5
KINDS = {"LARS": LARS, "LAMB": LAMB}

# ----------------------------------------------------------------------------------------- the formulas


def lars(w, g, state, *, lr, momentum, weight_decay, trust_coefficient, trust_ratio=True):
    """You, Gitman, Ginsburg 2017, algorithm 1."""
    local = 1.0
    if trust_ratio and w.norm() > 0 and g.norm() > 0:
        local = trust_coefficient * w.norm() / (g.norm() + weight_decay * w.norm())
    state["v"] = momentum * state.get("v", 0) + lr * local * (g + weight_decay * w)
    return w - state["v"]


def lamb(w, g, state, *, lr, betas, eps, weight_decay, trust_ratio=True):
    """You et al. 2020, algorithm 2."""
    beta1, beta2 = betas
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
    r = (state["m"] / (1 - beta1**t)) / ((state["v"] / (1 - beta2**t)).sqrt() + eps)
    u = r + weight_decay * w
    ratio = w.norm() / u.norm() if trust_ratio and w.norm() > 0 and u.norm() > 0 else 1.0
    return w - lr * ratio * u


FORMULAS = {"LARS": lars, "LAMB": lamb}
HYPERPARAMETERS = {
    "LARS": {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.03, "trust_coefficient": 0.1},
    "LAMB": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
}
OTHER = {
    "LARS": {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.0, "trust_coefficient": 0.3},
    "LAMB": {"lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
}


def options_of(kind, name):
    """Three groups: matrices; biases, without decay and trust ratio; the last layer, with its own values."""
    if name.endswith("bias"):
        return HYPERPARAMETERS[kind] | {"weight_decay": 0.0, "trust_ratio": False}
    return OTHER[kind] if name.startswith("layers.1") else HYPERPARAMETERS[kind]


def grouped(kind, model):
    groups = {}
    for name, parameter in model.named_parameters():
        options = options_of(kind, name)
        groups.setdefault(str(options), options | {"params": []})["params"].append(parameter)
    return KINDS[kind](list(groups.values()), lr=1.0)


def by_formula(kind, model):
    """The parameters after all steps, float64."""
    values = {name: p.detach().double() for name, p in model.named_parameters()}
    states = {name: {} for name in values}
    for step in range(NUM_STEPS):
        for name, value in values.items():
            if is_used(name, step):
                g = gradient(name, step, value.shape).double()
                values[name] = FORMULAS[kind](value, g, states[name], **options_of(kind, name))
    return values


# ------------------------------------------------------------------------------------------- the models


def farthest(engine, want):
    """By name, what is more than 1e-6 away, relative to the norm; on rank 0."""
    got = engine.full_state_dict()
    found = {name: distance(got[name], value) for name, value in want.items() if got}
    return {name: value for name, value in found.items() if not value <= 1e-6}


def distance(got, want):
    assert got.shape == want.shape
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


# ---------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("kind", KINDS)
def test_plain_parameters_follow_the_formula_of_the_paper(kind):
    model = net_with_zeros()
    want, optimizer = by_formula(kind, model), grouped(kind, model)
    for step in range(NUM_STEPS):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert distance(p.detach(), want[name]) <= 1e-6, name
    assert torch.equal(model.unused, net_with_zeros().unused)
    assert want["zero"].norm() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_is_run_with_gradients_and_its_loss_returned(kind):
    model = net_with_zeros()
    optimizer = grouped(kind, model)

    def closure():
        loss = model(0)
        loss.backward()
        return loss

    assert optimizer.step(closure) == net_with_zeros()(0)
    assert optimizer.step() is None


def test_only_our_own_are_taken_over_and_a_class_derived_from_them_with_a_warning():
    parameter = nn.Parameter(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (LARS, LAMB, AdamW8bit):
            check_optimizer(kind([parameter], lr=0.1), {parameter: "weight"})
    for kind in (LAMB, AdamW8bit):
        own = type("Own", (kind,), {"step": lambda optimizer, closure=None: None})
        with pytest.warns(UserWarning, match="Own is not known"):
            check_optimizer(own([parameter]), {parameter: "weight"})
    theirs = type("LAMB", (torch.optim.SGD,), {})([parameter], lr=0.1)
    with pytest.raises(ValueError, match=r"needs whole tensors .*zeroshard\.optim\.LAMB"):
        check_optimizer(theirs, {parameter: "weight"})


# --------------------------------------------------------------------------------------------- sharded


def shard(kind, configs):
    """Distances; differences between stages and ranks; exchanges a step; parameters owned by nobody here."""
    found, bits, num_unowned = [], {}, 0
    model = net_with_zeros()
    want = by_formula(kind, model)
    for config in configs:
        own = copy.deepcopy(model)
        engine, optimizer = start(own, grouped(kind, own), **config)
        shared, norms = optimizer.norms_of, []
        optimizer.norms_of = lambda *given, shared=shared, norms=norms: (
            norms.append(shared(*given)) or norms[-1]
        )
        for step in range(NUM_STEPS):
            engine(step).backward()
            engine.reset_comm_report()
            optimizer.step()
            calls = engine.comm_report().calls.get("control", 0)
            found += [] if calls == (dist.get_world_size() > 1) else [(config, "exchanges", calls)]
            optimizer.zero_grad()
        num_unowned = sum(not p.numel() for p in engine.parameters())
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, norms)
        found += [(config, "norms") for other in everyone if not all(map(torch.equal, other, norms))]
        found += [(config, *item) for item in farthest(engine, want).items()]
        got = engine.full_state_dict()
        parameters = dict(engine.named_parameters())
        whole = shared(list(parameters.values()), list(parameters.values())).tolist()
        for (name, value), norm in zip(got.items(), whole, strict=bool(got)):
            if norm != pytest.approx(value.double().norm().item(), rel=1e-12):
                found.append((config, "norm", name))
        first = bits.setdefault(config.get("shard_group_size"), got)
        found += [(config, "bits", name) for name in got if not torch.equal(got[name], first[name])]
    return found, num_unowned


CONFIGS = [{"stage": stage} for stage in STAGES]


@pytest.mark.long_where(num_ranks=[3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_stages_follow_the_formula_with_one_exchange_a_step_and_the_same_bits(ranks, num_ranks, kind):
    hybrid = [{"stage": 3, "shard_group_size": 2}] if num_ranks == 4 else []
    answers = ranks(num_ranks, shard, kind, CONFIGS + hybrid)
    assert [found for found, _ in answers] == [[]] * num_ranks
    assert max(num_unowned for _, num_unowned in answers) > 1


@on_ranks(2)
def test_a_step_without_any_gradient_exchanges_and_changes_nothing():
    model = seeded(Net)
    engine, optimizer = start(model, grouped("LAMB", model), stage=3)
    engine.reset_comm_report()
    optimizer.step()
    assert (engine.comm_report().calls.get("control", 0), len(optimizer.state)) == (0, 0)
