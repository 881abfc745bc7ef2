"""bitsandbytes' optimizers over ranks: the bits that they have on whole parameters.

The model is linear in its parameters, with gradients whose mean over 1 to 4 ranks is exact.
"""

import copy
import zlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.models import Told
from tests.distributed.training import own_loss, refused, seeded, start, take_steps
from tests.ranks import on_ranks
from zeroshard.optim.adopted import num_bits, to_common

bnb = pytest.importorskip("bitsandbytes").optim
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

NUM_STEPS = 3
OPTIONS = {
    "Adam": {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.3},
    "SGD": {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.01},
}
KINDS = [*OPTIONS, "PagedAdamW"]


def options_of(kind):
    return OPTIONS[kind.removeprefix("Paged")]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        shapes = {"weight": (50, 100), "odd": (4099,), "bias": (300,), "gain": ()}
        self.layers = nn.ModuleList(Told(f"layers.{at}.", **shapes) for at in range(2))

    def forward(self, step):
        return sum(layer(step, gradient) for layer in self.layers)


def gradient(name, step, shape):
    """Three times numbers of few bits: a third of it, rounded, times three is exact. A block is zeros."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    g = torch.randint(-120, 120, shape, generator=generator) / 64 * 3
    g.view(-1)[256:300] = 0
    return g


def by_class(make):
    """The parameters after all steps of bitsandbytes alone, and the states of 8 bits."""
    bnb.GlobalOptimManager.get_instance().initialize()
    model, found = seeded(Net), {}
    optimizer = make(model)
    for step in range(NUM_STEPS):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        states = to_common(optimizer, optimizer.state[p])
        flat = {key: value.flatten() for key, value in states.items() if key != "step"}
        is_8bit = any(value.dtype == torch.uint8 for value in flat.values())
        found[name] = p.detach().flatten(), flat if is_8bit else {}
    return found


def stepped(make):
    bnb.GlobalOptimManager.get_instance().initialize()
    model = seeded(Net)
    engine, optimizer = start(model, make(model), stage=3)
    take_steps(engine, range(NUM_STEPS), own_loss)
    return engine, optimizer


def gather(engine, optimizer):
    """By parameter: its values, flat, and its states, whole; and what ranks have of them that they should."""
    found = {}
    for name, p in engine.named_parameters():
        state = to_common(optimizer, optimizer.state[p])
        assert state.pop("step") == NUM_STEPS, "it counts where a rank owns nothing, too"
        is_8bit = num_bits(optimizer, p) == 8
        assert is_8bit == any(value.dtype == torch.uint8 for value in state.values())
        size = p.full_shape.numel()
        num_blocks = -(-size // 256)
        states = {
            key: join(value, num_blocks if key.endswith("_absmax") else size) for key, value in state.items()
        }
        found[name] = (join(p.detach(), size), states if is_8bit else {})
    return found


def join(part, whole_size):
    """The whole from the slices of all ranks; replicas must be equal."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.flatten())
    first, *others = torch.cat(parts).split(whole_size)
    assert all(torch.equal(first, other) for other in others)
    return first


def trained(kind):
    make = getattr(bnb, f"{kind}8bit")
    engine, optimizer = stepped(lambda model: make(model.parameters(), **options_of(kind)))
    assert type(optimizer) is make
    return gather(engine, optimizer)


@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [(2, "AdamW"), *(pytest.param(4, kind, marks=pytest.mark.long) for kind in KINDS)],
)
def test_8_bit_states_are_the_same_bits_at_every_number_of_ranks(ranks, num_ranks, kind):
    plain = getattr(bnb, f"{kind.removeprefix('Paged')}8bit")
    found = ranks(num_ranks, trained, kind)[0]
    want = by_class(lambda model: plain(model.parameters(), **options_of(kind)))
    assert found.keys() == want.keys()
    for name, (parameter, states) in want.items():
        assert torch.equal(found[name][0], parameter), name
        assert found[name][1].keys() == states.keys(), name
        for key, value in states.items():
            assert torch.equal(found[name][1][key], value), (name, key)


# ------------------------------------------------------------------------------------------- overrides


@on_ranks(2)
def test_overrides_of_modules_are_honoured():
    """`layers.0.weight` has 32 bits and `layers.1.bias` 8."""
    manager, options = bnb.GlobalOptimManager.get_instance(), OPTIONS["AdamW"]

    def make(model):
        optimizer = bnb.AdamW8bit(model.parameters(), **options)
        manager.register_module_override(model.layers[0], "weight", {"optim_bits": 32})
        manager.register_module_override(model.layers[1], "bias", {"min_8bit_size": 300})
        return optimizer

    engine, optimizer = stepped(make)
    names = ["layers.0.odd", "layers.1.weight", "layers.1.odd", "layers.1.bias"]
    assert [name for name, p in engine.named_parameters() if num_bits(optimizer, p) == 8] == names
    found = gather(engine, optimizer)
    for name, (parameter, states) in by_class(make).items():
        assert torch.equal(found[name][0], parameter), name
        assert found[name][1].keys() == states.keys(), name


@on_ranks(2)
def test_ranks_with_other_overrides_are_an_error_that_names_the_difference():
    model = seeded(Net)
    manager = bnb.GlobalOptimManager.get_instance()
    manager.initialize()
    optimizer = bnb.AdamW8bit(model.parameters())
    if dist.get_rank() == 1:
        manager.register_module_override(model.layers[0], "odd", {"optim_bits": 32})
    one, other = (f"min_8bit_size=4096, optim_bits={bits}" for bits in (8, 32))
    assert refused(zeroshard.initialize, model, optimizer) == (
        "the ranks were given different models, configs, optimizers or data: "
        f"rank(s) 0 have optimizer AdamW8bit group 0 with 'layers.0.odd', {one}; "
        f"rank(s) 1 have optimizer AdamW8bit group 0 with 'layers.0.odd', {other}"
    )


@on_ranks(2)
def test_the_composable_layer_refuses_what_would_depend_on_slices():
    model = nn.Linear(80, 70)
    runtime = zeroshard.shard(model, {"stage": 1})
    answers = []
    for kind in (bnb.AdamW8bit, type("Derived", (bnb.AdamW8bit,), {})):
        try:
            runtime.attach(kind(model.parameters()))
        except ValueError as error:
            answers.append(str(error))
    for name, answer in zip(("AdamW8bit", "Derived"), answers, strict=True):
        assert f"{name} would choose the precision of its states by the sizes of this rank's slices" in answer


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_replicated_parameters_follow_steps_that_autograd_does_not_see(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 80), nn.Tanh(), nn.Linear(80, 70))
    plain = copy.deepcopy(model)
    zeroshard.shard(model, {"stage": stage})
    x = torch.ones(3, 70)
    losses = []
    for net in (plain, model):
        optimizer = bnb.AdamW32bit(net.parameters(), lr=1e-2)
        own = []
        for _ in range(3):
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
        losses.append(own)
    want, got = losses
    assert got == want
    assert len(set(got)) == 3
