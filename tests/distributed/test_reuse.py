"""Everything else that people do with a model: the same bits as plain PyTorch, or DDP on two ranks."""

import copy
import gc
import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.models import GPT, Recomputed, Tiny
from tests.distributed.training import (
    SOME_STAGES,
    STAGES,
    build,
    differences,
    distance_of_all,
    finish,
    flat_gradients,
    full_gradients,
    numbers,
    replicate,
    same_as_replicated,
    start,
    step,
    token_loss,
    tokens,
)
from tests.ranks import on_ranks


def run_loop(model, loop, num_steps=3):
    """Where `loop(net, optimizer, number) -> loss value` gives zeroshard other numbers than DDP."""
    replica = replicate(model)
    made = torch.optim.AdamW(replica.parameters(), lr=1e-3)
    want = finish(replica, [loop(replica, made, number) for number in range(num_steps)])
    found = []
    for stage in SOME_STAGES:
        engine, made = start(copy.deepcopy(model), stage=stage)
        got = finish(engine, [loop(engine, made, number) for number in range(num_steps)])
        found += differences(f"stage {stage}", got, want)
    return found


# ---------------------------------------------------------------------------------- forwards and backwards


def gradients_of(model, ways):
    """The distances of gradients, got in several ways, from those of plain PyTorch averaged over ranks."""
    found = {}
    for name, way in ways.items():
        net = copy.deepcopy(model)
        way(net)
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        want = {key: value / dist.get_world_size() for key, value in flat_gradients(net).items()}
        for stage in SOME_STAGES:
            engine, _ = start(copy.deepcopy(model), "SGD", stage=stage)
            way(engine)
            found[name, stage] = distance_of_all(full_gradients(engine), want)
    return found


def in_turn(net):
    first, second = token_loss(net, 0), token_loss(net, 1)
    first.backward()
    second.backward()


def last_first(net):
    first, second = token_loss(net, 0), token_loss(net, 1)
    second.backward()
    first.backward()


def retained(net):
    loss = token_loss(net, 0) + token_loss(net, 1)
    loss.backward(retain_graph=True)
    loss.backward()


def in_parts(net):
    batch = tokens(0)
    logits = net(batch[:, :-1])
    first, second = logits.chunk(2, 1)
    first.square().mean().backward(retain_graph=True)
    second.logsumexp(-1).mean().backward()


@on_ranks(2)
def test_several_backwards_over_pending_forwards_add_up(num_ranks):
    """1e-6: two reductions are added where plain PyTorch reduces the sum; on one rank to the bit."""
    ways = {"in turn": in_turn, "last first": last_first, "retained": retained, "in parts": in_parts}
    found = gradients_of(build("tied GPT"), ways)
    assert max(found.values()) <= (1e-6 if num_ranks > 1 else 0), found


# ---------------------------------------------------------------------------------- activation checkpoints


class Checkpointed(GPT):
    """Two blocks at a time are recomputed in backward."""

    def forward(self, batch):
        x = self.tokens(batch) + self.positions.weight[: batch.shape[1]]
        for begin in range(0, len(self.blocks), 2):
            x = checkpoint(self._run, x, begin, begin + 2, use_reentrant=False)
        return self.head(self.norm(x) * self.gain)

    def _run(self, x, begin, end):
        for block in self.blocks[begin:end]:
            x = block(x)
        return x


class InsideAndOutside(nn.Module):
    """A block whose layer runs inside a checkpoint and again outside, in either order."""

    def __init__(self, inside_first):
        super().__init__()
        self.inside_first = inside_first
        self.layer, self.other = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x):
        if self.inside_first:
            x = checkpoint(self._body, x, use_reentrant=False)
            return torch.tanh(self.layer(x))
        x = torch.tanh(self.layer(x))
        return x + checkpoint(self._body, x, use_reentrant=False)

    def _body(self, x):
        return self.other(torch.tanh(self.layer(x)))


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(7, 20), nn.ModuleList(blocks), nn.Linear(20, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def same_as_averaged(model, loss):
    """Where gradients are further than 1e-6 from plain PyTorch's, averaged over the ranks."""
    found = gradients_of(model, {"one": lambda net: loss(net, 0).backward()})
    return [f"stage {stage}: {distance:g}" for (_, stage), distance in found.items() if distance > 1e-6]


@on_ranks(2, timeout=120)
def test_checkpoints_around_several_units_and_parts_of_them_change_no_number():
    """To the bit where DDP can; it refuses parameters that a backward reaches twice."""
    torch.manual_seed(0)
    found = same_as_replicated(Checkpointed(tied=True, num_blocks=4), num_steps=3)
    for inside_first in (True, False):
        torch.manual_seed(0)
        model = Stack([InsideAndOutside(inside_first) for _ in range(3)])
        lines = same_as_averaged(model, lambda net, n: net(numbers(n, 5, 7)).square().mean())
        found += [f"inside first {inside_first}: {line}" for line in lines]
    return found


class OwnCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint that is not torch's."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run, ctx.x = run, x.detach()
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class Reentrant(nn.Module):
    """Runs a block, which may be frozen, or a layer of the root in a reentrant checkpoint."""

    def __init__(self, what, is_own, frozen):
        super().__init__()
        self.what, self.is_own = what, is_own
        self.first, self.block, self.last = nn.Linear(7, 7), Recomputed(nn.Linear(7, 7)), nn.Linear(7, 1)
        self.block.requires_grad_(not frozen)

    def forward(self, x):
        x, inside = self.first(x), getattr(self, self.what)
        if self.is_own:
            return OwnCheckpoint.apply(inside, x).square().mean()
        return checkpoint(inside, x, use_reentrant=True).square().mean()


@on_ranks(2)
def test_reentrant_checkpoints_are_refused_in_the_forward_or_with_the_first_gradient():
    found = []
    for stage in STAGES:
        for what, is_own, frozen in product(("block", "last"), (False, True), (False, True)):
            if what == "block" and frozen and (is_own or stage < 3):
                continue  # the block has no gradient; stage 3 gathers it in an order that all ranks must know
            engine, _ = start(Reentrant(what, is_own, frozen), "SGD", stage=stage, units=["Recomputed"])
            with pytest.raises(RuntimeError, match=r"reentrant activation checkpoint.*use_reentrant=False"):
                engine.backward(engine(numbers(0, 5, 7)))
            with torch.no_grad():
                found.append(engine(numbers(0, 5, 7)).item())
    assert all(math.isfinite(loss) for loss in found)


# ------------------------------------------------------------------------------------------- two engines


def adversaries(stage):
    """A generator and a discriminator in turn: where they differ from DDP's."""
    torch.manual_seed(0)
    generator = Tiny(2)
    judge = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, judge)]
    replicas = [replicate(generator), replicate(judge)]
    replica_sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in replicas]
    engines = [start(m, o, stage=stage)[0] for m, o in zip((generator, judge), sgd, strict=True)]

    def play(make, tell, make_sgd, tell_sgd):
        losses = []
        for number in range(4):
            noise = numbers(number, 5, 7)
            loss = tell(make(noise).detach()).mean() - tell(torch.ones(5, 3)).mean()
            loss.backward()
            tell_sgd.step()
            tell_sgd.zero_grad()
            make_loss = -tell(make(noise)).mean()
            make_loss.backward()
            make_sgd.step()
            make_sgd.zero_grad()
            tell_sgd.zero_grad()
            losses += [loss.item(), make_loss.item()]
        return losses

    got_losses, want_losses = play(*engines, *sgd), play(*replicas, *replica_sgd)
    return [
        line
        for engine, replica in zip(engines, replicas, strict=True)
        for line in differences(f"stage {stage}", finish(engine, got_losses), finish(replica, want_losses))
    ]


@on_ranks(2)
def test_two_engines_may_take_turns_and_feed_each_other():
    return [line for stage in SOME_STAGES for line in adversaries(stage)]


@pytest.mark.long_where(stage=[1, 2])
@pytest.mark.parametrize("stage", SOME_STAGES)
@on_ranks(2, timeout=15)
def test_an_engine_may_be_dropped_right_after_a_step(stage):
    """An engine is dropped while the gathers that its step has started are under way; another goes on."""
    for number in range(4):
        engine, optimizer = start(build("tied GPT"), stage=stage)
        step(engine, optimizer, token_loss, number)
        del engine, optimizer
        gc.collect()
        total = torch.ones(())
        dist.all_reduce(total)
    assert total.item() == 2.0


# ------------------------------------------------------------------------------------------------- edits


def edit_copy(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter * 0.5)


def edit_data(parameters):
    for parameter in parameters:
        parameter.data.mul_(0.5)


@on_ranks(2)
def test_edits_of_sharded_parameters_between_steps_are_seen_by_the_next_forward():
    found = []
    for edit in (edit_copy, edit_data):

        def loop(net, optimizer, number, edit=edit):
            first = step(net, optimizer, token_loss, number)
            edit(net.parameters())
            with torch.no_grad():
                second = token_loss(net, number).item()
            edit(net.parameters())
            return first + second

        found += [f"{edit.__name__}: {line}" for line in run_loop(build("tied GPT"), loop)]
    return found
