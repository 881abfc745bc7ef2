"""Everything else that people do with a model: the same bits as plain PyTorch, or DDP on two ranks."""

import copy
import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.distributed.models import Recomputed, Residual, Tiny
from tests.distributed.training import (
    SOME_STAGES,
    differences,
    finish,
    made_by,
    numbers,
    replicate,
    seeded,
    square_loss,
    start,
    train_replicated,
    train_sharded,
)
from tests.ranks import on_ranks

# ---------------------------------------------------------------------------------- activation checkpoints


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
    for stage in SOME_STAGES:
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


class OnceInside(nn.Module):
    """Calls its first unit in a checkpoint, and then without one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(7)])

    def forward(self, x):
        first, *others = self.layers
        inside = checkpoint(lambda value: self.norm(first(value)), x, use_reentrant=False)
        y = first(inside)
        for layer in others:
            y = layer(y)
        return inside, y


@on_ranks(2)
def test_the_turns_of_ranks_meet_where_the_last_call_of_a_unit_is_outside_of_its_checkpoint():
    """The loss of one rank depends on the checkpoint alone; each exchange has its place in one order."""
    torch.manual_seed(0)
    plain, rank = OnceInside().double(), torch.distributed.get_rank()
    model, optimizer = copy.deepcopy(plain), torch.optim.SGD(plain.parameters(), lr=0.1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, _ = start(model, sgd, stage=3, units=["Linear"], num_prefetch=1)
    for number in range(2):
        x = [seeded(torch.randn, 3, 7, seed=number + at, dtype=torch.float64) for at in (0, 10)]
        outputs = [engine(x[rank]), *map(plain, x)]
        own, first, second = (sum(one.square().mean() for one in both) for both in outputs)
        own = own if rank == 0 else outputs[0][0].square().mean()
        second = outputs[2][0].square().mean()
        engine.backward(own)
        engine.step()
        ((first + second) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = engine.full_state_dict()
    if rank == 0:
        torch.testing.assert_close(whole, dict(plain.state_dict()), rtol=1e-12, atol=1e-12)


class CallsItself(nn.Module):
    """Calls itself inside its forward, as steps of Lightning do with `self(batch)`."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Residual(), nn.Linear(7, 7)

    def forward(self, x, is_inside=False):
        return self.head(self.block(x) if is_inside else self(x, is_inside=True))


@on_ranks(1, 2)
def test_a_model_that_calls_itself_trains_and_evaluates_as_in_plain_pytorch():
    torch.manual_seed(0)
    model, found = CallsItself(), []
    want = train_replicated(model, "AdamW", 3, square_loss)
    for stage in (0, 2, 3):
        found += differences(
            f"stage {stage}", train_sharded(model, "AdamW", 3, square_loss, stage=stage), want
        )
        engine, _ = start(copy.deepcopy(model), stage=stage)
        with torch.no_grad():
            assert torch.equal(engine(numbers(0, 5, 7)), model(numbers(0, 5, 7)))
        assert engine(numbers(0, 5, 7)).requires_grad
    return found


@on_ranks(1)
def test_a_forward_after_ctrl_c_in_another_is_no_call_inside_of_it():
    sharded = zeroshard.shard(CallsItself(), {"stage": 3})
    handle = sharded.module.block.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sharded.module(numbers(0, 5, 7))
    handle.remove()
    for _ in range(2):
        sharded.module(numbers(0, 5, 7)).sum().backward()


def interrupt(*_):
    raise KeyboardInterrupt


@on_ranks(1)
def test_a_model_that_calls_itself_casts_its_last_output_alone():
    precision = {"param_dtype": "bf16", "output_dtype": "fp32"}
    engine, _ = start(CallsItself(), stage=3, precision=precision)
    assert engine(numbers(0, 5, 7)).dtype is torch.float32


class Frozen(nn.Module):
    """A frozen layer of its own, and blocks that are trained."""

    def __init__(self):
        super().__init__()
        self.base, self.parts = nn.Linear(7, 7), nn.Sequential(Residual(), Residual())

    def forward(self, x):
        return self.parts(torch.tanh(self.base(x)))


class AroundFrozen(nn.Module):
    """Calls it in a checkpoint, and a block before or after it in there, too."""

    def __init__(self, is_before):
        super().__init__()
        self.first, self.other, self.last = (Residual() for _ in range(3))
        self.frozen, self.is_before = Frozen(), is_before

    def inside(self, x):
        return self.frozen(self.other(x)) if self.is_before else self.other(self.frozen(x))

    def forward(self, x):
        x = self.first(x)
        y = checkpoint(self.inside, x, use_reentrant=False)
        return x, y, self.last(y)


@on_ranks(1, 2)
def test_a_checkpoint_around_a_recomputed_resident_unit_is_that_of_the_sharded_units_inside(num_ranks):
    """The losses of two ranks depend on the same outputs, or on other ones."""
    rank = dist.get_rank()
    for is_before, used in product((False, True), ((2, 2), (2, 0), (0, 2))):
        plain = seeded(AroundFrozen, is_before).double()
        plain.frozen.base.requires_grad_(False)
        optimizer, names = made_by("SGD", plain), ["Residual", "Frozen"]
        options = {"stage": 3, "units": names, "frozen": ["frozen.base"], "recompute": "unit"}
        engine, _ = start(copy.deepcopy(plain), "SGD", num_prefetch=1, **options)
        for number in range(2):
            x = [numbers(number, 3, 7, rank=one).double() for one in range(num_ranks)]
            losses = [plain(value)[one].square().mean() for value, one in zip(x, used, strict=False)]
            own = engine(x[rank])[used[rank]].square().mean()
            assert own.item() == losses[rank].item()
            engine.backward(own)
            engine.step()
            (sum(losses) / num_ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine._runtime.reducer.num_late == 0
        whole = engine.full_state_dict()
        if rank == 0:
            torch.testing.assert_close(whole, dict(plain.state_dict()), rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_two_engines_may_take_turns_and_feed_each_other():
    """A generator and a discriminator in turn."""
    generator = seeded(Tiny, 2)
    judge = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, judge)]
    replicas = [replicate(generator), replicate(judge)]
    replica_sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in replicas]
    engines = [start(m, o)[0] for m, o in zip((generator, judge), sgd, strict=True)]

    def play(make, tell, make_sgd, tell_sgd):
        losses = []
        for number in range(3):
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
        for line in differences("adversaries", finish(engine, got_losses), finish(replica, want_losses))
    ]


WIDTH, LENGTH = 16, 6


def layer():
    return nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x, mask):
        return x + self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]


class Layers(nn.Module):
    """torch's encoder, its layers without the encoder around them, and attention alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(7, WIDTH), nn.ModuleList(layer() for _ in range(2))
        self.encoder = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=True)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x, mask):
        x = self.first(x)
        for each in self.layers:
            x = each(x, src_key_padding_mask=mask)
        x = self.encoder(x, src_key_padding_mask=mask)
        for block in self.blocks:
            x = block(x, mask)
        return x


def slowly(model, x, mask):
    """The output without fast paths, those of attention alone included."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return model(x, mask)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@on_ranks(2)
def test_evaluation_with_padding_masks_is_that_of_plain_pytorch():
    model, x = Layers(), torch.linspace(-1, 1, 3 * LENGTH * 7).view(3, LENGTH, 7)
    mask = torch.arange(LENGTH)[None] >= torch.tensor([LENGTH, 4, 2])[:, None]
    plain = copy.deepcopy(model)
    engine, optimizer = start(model, "SGD", stage=3, units=["TransformerEncoder", "Attention"])
    for _ in range(2):
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                want, got = slowly(plain.eval(), x, mask), engine.eval()(x, mask)
            torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
        losses = [net.train()(x, mask).square().mean() for net in (plain, engine)]
        torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
        losses[1].backward()
        optimizer.zero_grad()
    assert engine.memory_report().unsharded == 0
