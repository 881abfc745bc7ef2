"""Parameters without a gradient: none of any rank's is None, some rank's count zeros.

The reference is DDP with find_unused_parameters=True; two ranks, so equal to the bit. Weight decay and
momentum would move a parameter whose gradient is zeros instead of None.
"""

import copy
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.models import Gated
from tests.distributed.training import (
    STAGES,
    differences,
    finish,
    full_gradients,
    numbers,
    plain,
    replicate,
    same_as_replicated,
    start,
    unequal,
)

WIDTH = 20


class Wrapped(nn.Module):
    """A block: layers that are left out on demand."""

    def __init__(self):
        super().__init__()
        self.inner = Gated(WIDTH)

    def forward(self, x, what):
        if what == "constant":
            return torch.zeros_like(x)
        return x if what == "input" else self.inner(x, what == "layers")


class Branching(nn.Module):
    """`plan`: block number -> what it does other than compute."""

    def __init__(self, num_blocks=4):
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Wrapped() for _ in range(num_blocks))
        self.last, self.never = nn.Linear(WIDTH, 3), nn.Linear(5, 5)

    def forward(self, x, plan):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, plan.get(number))
        return self.last(x)


def names_with_gradient(model):
    return {name for name, p in model.named_parameters() if p.grad is not None}


def follow(plans, optimizer, **config):
    """Where training with a plan for each step and rank differs from DDP's."""
    torch.manual_seed(0)
    model, found = Branching(), []
    replica = replicate(model, find_unused=True)
    plain_optimizer = optimizer(replica.parameters())

    def run(net, its_optimizer, names):
        losses = []
        for number, plan in enumerate(plans):
            loss = net(numbers(number, 5, 7), plan[dist.get_rank()]).square().mean()
            loss.backward()
            names.append(names_with_gradient(plain(net)))
            its_optimizer.step()
            its_optimizer.zero_grad()
            losses.append(loss.item())
        return finish(net, losses)

    wanted_names = []
    want = run(replica, plain_optimizer, wanted_names)
    for stage in STAGES:
        sharded = copy.deepcopy(model)
        engine, made = start(sharded, optimizer(sharded.parameters()), stage=stage, **config)
        got_names = []
        got = run(engine, made, got_names)
        found += differences(f"stage {stage}", got, want)
        found += [(stage, a ^ b) for a, b in zip(got_names, wanted_names, strict=True) if a != b]
    assert not any("never" in name or "unused" in name for names in wanted_names for name in names)
    return found


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1)


def follow_with_both(plans):
    return follow(plans, adamw) + follow(plans, sgd, num_prefetch=2)


def everywhere(what, *blocks):
    plan = dict.fromkeys(blocks, what)
    return plan, plan


def test_layers_left_out_inside_a_unit_on_one_rank_count_zeros(ranks):
    layers = [{}, {1: "layers"}, {0: "layers", 2: "layers"}, {3: "layers"}]
    plans = [(layers[0], layers[0]), (layers[1], {}), ({}, layers[2]), (layers[3], layers[1]), ({}, {})]
    assert ranks(2, follow_with_both, plans) == [[], []]


def test_layers_left_out_on_all_ranks_keep_no_gradient(ranks):
    plans = [everywhere("layers", 1), everywhere("layers"), everywhere("layers", 0, 1, 2, 3), ({}, {})]
    assert ranks(2, follow_with_both, plans) == [[], []]


@pytest.mark.long
def test_a_unit_that_returns_its_input_on_one_rank_counts_zeros(ranks):
    plans = [
        ({1: "input"}, {}),
        ({}, {0: "input"}),
        ({3: "input"}, {0: "input", 3: "input"}),
        ({0: "input", 1: "input"}, {2: "input", 3: "input"}),
        (dict.fromkeys(range(4), "input"), {}),
        ({}, {}),
    ]
    assert ranks(2, follow_with_both, plans) == [[], []]


@pytest.mark.long
def test_a_unit_that_returns_a_constant_on_one_rank_cuts_off_those_before_it(ranks):
    plans = [
        ({1: "constant"}, {}),
        ({}, {0: "constant"}),
        ({}, {}),
        ({3: "constant"}, {}),
        ({2: "constant"}, {1: "constant"}),
        ({}, {}),
    ]
    assert ranks(2, follow_with_both, plans) == [[], []]


def test_units_without_gradient_on_any_rank_are_left_alone(ranks):
    plans = [
        everywhere("input", 2),
        ({}, {}),
        everywhere("input", 0, 3),
        everywhere("constant", 1),
        everywhere("constant", 3),
        everywhere("input", 0, 1, 2, 3),
    ]
    assert ranks(2, follow_with_both, plans) == [[], []]


# ------------------------------------------------------------------------------ units that nobody calls


class Depth(nn.Module):
    """Calls the blocks it is told to, the same ones on all ranks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Gated(WIDTH) for _ in range(5))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x, called):
        x = self.first(x)
        for number in called:
            x = self.blocks[number](x)
        return self.last(x)


CALLS = [(1, 3), (0, 1, 2, 3, 4), (4,), (), (4, 3, 2, 1, 0), (0, 2, 4)]
"""By step. The order of the first forward is not that of later ones, nor is it complete."""


def depth_loss(net, step):
    return net(numbers(step, 5, 7), CALLS[step]).square().mean()


def change_depth():
    torch.manual_seed(0)
    found = []
    for options in ({}, {"num_prefetch": 3}, {"num_prefetch": 0}, {"reshard_after_forward": False}):
        found += same_as_replicated(Depth(), "AdamW", len(CALLS), depth_loss, find_unused=True, **options)
    return found


def test_units_may_be_called_in_any_order_and_left_out_on_all_ranks_alike(ranks):
    assert ranks(2, change_depth, timeout=120) == [[], []]


class Reversed(nn.Module):
    """Blocks that use all of their parameters, called in any order; before one the gradient may end."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(6))

    def forward(self, x, called, cut):
        for number in called:
            x = x.detach() if number == cut else x
            x = x + self.blocks[number](x)
        return x


def reversed_loss(net, step):
    called = range(6) if step % 2 == 0 else range(5, -1, -1)
    return net(numbers(step, 5, 7), called, 2 if step and dist.get_rank() else None).square().mean()


def cut_off_in_another_order():
    torch.manual_seed(0)
    return same_as_replicated(Reversed(), "SGD", 4, reversed_loss, find_unused=True, watchdog_s=10.0)


def test_ranks_reduce_in_the_order_of_this_forward_whatever_branch_they_took(ranks):
    assert ranks(2, cut_off_in_another_order) == [[], []]


CALLS_OF_RANKS = [
    ((0, 2, 3, 4), (0, 1, 2, 3, 4)),
    ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)),
    ((1, 2), (3, 4)),
    ((0, 1, 2, 3, 4), (2,)),
]


def other_depth_loss(net, step):
    return net(numbers(step, 5, 7), CALLS_OF_RANKS[step][dist.get_rank()]).square().mean()


def differ_in_depth(calls):
    torch.manual_seed(0)
    model, found = Depth(), []
    with mock.patch.object(sys.modules[__name__], "CALLS_OF_RANKS", calls):
        for stages, options in (((0, 1, 2), {}), ((0, 2), {"num_prefetch": 0})):
            num = len(calls)
            found += same_as_replicated(
                model, "AdamW", num, other_depth_loss, stages=stages, find_unused=True, **options
            )
    return found


@pytest.mark.long_where(calls=[CALLS_OF_RANKS[2:], CALLS_OF_RANKS[1:] * 2])
@pytest.mark.parametrize("calls", [CALLS_OF_RANKS, CALLS_OF_RANKS[2:], CALLS_OF_RANKS[1:] * 2])
def test_below_stage_3_ranks_may_leave_out_different_units_from_the_first_step_on(ranks, calls):
    assert ranks(2, differ_in_depth, calls) == [[], []]


def traffic_after_a_short_first_forward():
    """Bytes sent over those of an engine whose first forward was whole, and how much was gathered at once."""
    torch.manual_seed(0)
    model, found = Depth(), []
    for stage in STAGES:
        for first in ((0, 2, 3, 4), (0,), ()):
            sent, peaks = [], []
            for calls in ((0, 1, 2, 3, 4), first):
                copied = copy.deepcopy(model)
                engine, made = start(copied, adamw(copied.parameters()), stage=stage)
                with torch.no_grad():
                    engine(numbers(0, 5, 7), calls)
                for number in range(3):
                    engine.reset_comm_report()
                    engine(numbers(number, 5, 7), (0, 1, 2, 3, 4)).square().mean().backward()
                    made.step()
                    made.zero_grad()
                report = engine.comm_report().bytes_sent
                sent.append((report["all_gather"], report["reduce_scatter"]))
                peaks.append(engine.memory_report().peak_unsharded)
            found += [] if sent[0] == sent[1] and peaks[0] >= peaks[1] else [(stage, first, sent, peaks)]
    return found


@pytest.mark.long
def test_a_first_forward_that_leaves_out_units_costs_no_traffic_later(ranks):
    assert ranks(2, traffic_after_a_short_first_forward) == [[], []]


# ----------------------------------------------------------------------------------------------- frozen


def is_trained(name):
    return name.startswith("blocks.1") or name in ("last.bias", "blocks.2.inner.left.weight")


def train_frozen():
    """Frozen parameters share units with trained ones, as with adapters."""
    torch.manual_seed(0)
    model = Branching()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
    replica = replicate(model, find_unused=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = []

    def run(net, optimizer, number_of_steps=3):
        losses = []
        for number in range(number_of_steps):
            loss = net(numbers(number, 5, 7), {}).square().mean()
            loss.backward()
            grads = names_with_gradient(plain(net))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return finish(net, losses), grads

    want, wanted_grads = run(replica, adamw([p for p in replica.parameters() if p.requires_grad]))
    for stage in STAGES:
        for over_all in (True, False):
            sharded = copy.deepcopy(model)
            parameters = [p for p in sharded.parameters() if over_all or p.requires_grad]
            engine, optimizer = start(sharded, adamw(parameters), stage=stage)
            got, grads = run(engine, optimizer)
            found += differences(f"stage {stage}", got, want)
            names = {p: name for name, p in engine.named_parameters()}
            with_state = {names[p] for p in optimizer.state}
            requires = {name for name, p in engine.named_parameters() if p.requires_grad}
            found += [] if grads == wanted_grads == with_state else [(stage, grads, with_state)]
            found += [] if requires == set(filter(is_trained, before)) else [(stage, requires)]
            if got.parameters:
                frozen = {name: value for name, value in got.parameters.items() if not is_trained(name)}
                found += unequal("frozen", frozen, {name: before[name] for name in frozen})
    return found


def test_frozen_parameters_stay_as_they_are_and_have_neither_gradient_nor_state(ranks):
    assert ranks(2, train_frozen) == [[], []]


def skip_before_frozen():
    """Only block 1 is trained in front of the frozen blocks, and each rank skips it once."""
    torch.manual_seed(0)
    model = Branching(5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.1", "last.bias")))
    plans = [({}, {}), ({1: "input"}, {}), ({}, {1: "layers"}), ({1: "input"}, {1: "input"}), ({}, {})]

    def loss(net, number):
        return net(numbers(number, 5, 7), plans[number][dist.get_rank()]).square().mean()

    return [
        line
        for prefetch in (0, 1, 3)
        for line in same_as_replicated(
            model, "AdamW", len(plans), loss, find_unused=True, num_prefetch=prefetch, watchdog_s=10.0
        )
    ]


@pytest.mark.long
def test_frozen_units_that_have_a_backward_on_one_rank_only_are_gathered_on_all(ranks):
    assert ranks(2, skip_before_frozen) == [[], []]


def frozen_memory_and_traffic():
    """Bytes of gradients, of states, and elements reduced, of a model whose first half is frozen."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(4)))
    for parameter in model[:2].parameters():
        parameter.requires_grad_(False)
    results = {}
    for stage in STAGES:
        sharded = copy.deepcopy(model)
        engine, optimizer = start(sharded, adamw(sharded.parameters()), stage=stage)
        engine(numbers(0, 5, 64)).square().mean().backward()
        optimizer.step()
        report = engine.memory_report()
        reduced = engine.comm_report().bytes_sent["reduce_scatter"]
        results[stage] = report.gradients, report.optimizer, reduced
    return results


def test_frozen_parameters_cost_no_gradient_memory_no_state_and_no_reduction(ranks):
    trained, n = 2 * 64 * 64, 2
    for results in ranks(n, frozen_memory_and_traffic):
        for stage, (gradients, states, reduced) in results.items():
            own = trained // (1 if stage == 0 else n)
            steps = 2 * 4  # AdamW keeps a step number for each parameter
            assert (gradients, states, reduced) == (4 * own, 8 * own + steps, 4 * trained // n)


def all_frozen():
    torch.manual_seed(0)
    model, found = Branching().requires_grad_(False), []
    x = numbers(0, 5, 7).requires_grad_()
    want = model(x, {})
    (want_gradient,) = torch.autograd.grad(want.sum(), x)
    for stage in STAGES:
        engine = zeroshard.initialize(copy.deepcopy(model), None, {"stage": stage}).engine
        got = engine(x, {})
        (gradient,) = torch.autograd.grad(got.sum(), x)
        found += [] if torch.equal(got, want) and torch.equal(gradient, want_gradient) else [stage]
    return found


def test_gradients_of_inputs_flow_through_a_model_that_is_all_frozen(ranks):
    assert ranks(2, all_frozen) == [[], []]


def two_forwards(plans, **config):
    """Gradients of a backward over two forwards; the mean by hand is exact at two ranks."""
    torch.manual_seed(0)
    model = Branching()
    sharded = copy.deepcopy(model)
    engine, _ = start(sharded, sgd(sharded.parameters()), stage=3, **config)

    def backward(net, number):
        losses = [
            net(numbers(number + at, 5, 7), plans[at][dist.get_rank()]).square().mean() for at in (0, 1)
        ]
        sum(losses).backward()

    found = []
    for number in range(2):
        model.zero_grad()
        engine.zero_grad()
        backward(model, number)
        backward(engine, number)
        own = {name: p.grad for name, p in model.named_parameters()}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        got = full_gradients(engine)
        for name in own:
            given = [grads[name] for grads in everyone if grads[name] is not None]
            want = sum(grad / len(everyone) for grad in given).flatten() if given else None
            same = want is None if name not in got else want is not None and torch.equal(got[name], want)
            found += [] if same else [name]
    return found


@pytest.mark.long_where(num_prefetch=[0, 2])
@pytest.mark.parametrize("num_prefetch", [0, 1, 2])
def test_a_gradient_cut_on_one_rank_in_one_of_two_forwards_before_a_backward(ranks, num_prefetch):
    plans = ({2: "constant"}, {}), ({}, {})
    assert ranks(2, two_forwards, plans, num_prefetch=num_prefetch) == [[], []]
    assert ranks(2, two_forwards, plans[::-1], num_prefetch=num_prefetch) == [[], []]
