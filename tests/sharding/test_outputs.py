"""Containers and objects that forwards return, and parameters that leave them in other ways."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.distributed.training import (
    differences,
    numbers,
    seeded,
    square_loss,
    start,
    train_replicated,
    train_sharded,
)
from tests.ranks import on_ranks

WIDTH = 7


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


HIDDEN = {"dict subclass": AttributeDict, "namespace": SimpleNamespace}


class Hides(nn.Module):
    """Returns its result and one of its parameters in an object."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.inner, self.kind = nn.Linear(WIDTH, WIDTH), nn.Identity(), kind

    def forward(self, x):
        return HIDDEN[self.kind](out=torch.tanh(self.linear(x)), bias=self.linear.bias)


class Hiding(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(Hides(kind) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).out
        return x


@pytest.mark.parametrize("kind", HIDDEN)
@on_ranks(1, 2)
def test_a_unit_that_hides_its_tensors_in_an_object_is_refused_by_name(num_ranks, kind):
    name = HIDDEN[kind].__name__
    refused = rf"unit 'blocks.0' returns a {name}, in which no tensor can be found.*units="
    for stage, units in ((3, ["Hides"]), (1, ["Hides"]), (3, [])):
        engine, _ = start(Hiding(kind), "SGD", stage=stage, units=units)
        with torch.no_grad():
            engine(numbers(0, 5, WIDTH))
        is_refused = stage == 3 and units and num_ranks > 1  # where a unit is freed that is not the root
        with pytest.raises(RuntimeError, match=refused) if is_refused else nullcontext():
            engine(numbers(0, 5, WIDTH)).sum().backward()


class Scale(nn.Module):
    """Has a parameter of its own, and hides its result along with a tensor that has no backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return SimpleNamespace(out=x * self.scale), x.detach() > 0


@on_ranks(2)
def test_a_unit_with_parameters_of_its_own_hides_no_tensor_along_with_another_one():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale())
    engine, _ = start(model, "SGD", stage=3, units=["Scale"])
    with pytest.raises(RuntimeError, match=r"'1' returns a tuple, in which no tensor can be found"):
        engine(numbers(0, 5, WIDTH))


# ------------------------------------------------------------------------------ beside what a forward returns


class Aside(nn.Module):
    """Puts its weight, or a part of it, aside in an attribute."""

    def __init__(self, part):
        super().__init__()
        self.linear, self.inner, self.part = nn.Linear(WIDTH, WIDTH), nn.Identity(), part
        self.kept = None

    def forward(self, x):
        self.kept = self.linear.weight[0] if self.part else self.linear.weight
        return torch.tanh(self.linear(x))


class KeepsAside(nn.Module):
    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Aside(part) for _ in range(3))

    def forward(self, x, reads):
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + sum(b.kept.square().sum() for b in self.blocks if reads) / 3


TOLD = r"unit 'blocks.0'.*'blocks.0.linear.weight'.*was kept.*clone\(\)"
CAN_TELL = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")


@pytest.mark.skipif(not CAN_TELL, reason="needs a torch that can clear the message, as 2.14")
@on_ranks(1, 2)
def test_views_of_parameters_that_leave_beside_the_outputs_are_right_or_raise_by_name(num_ranks):
    for part in (True, False):
        model, replica = KeepsAside(part), KeepsAside(part)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine, optimizer = start(model, optimizer, stage=3, units=["Aside"])
        for number, context in enumerate((torch.no_grad(), torch.inference_mode(), torch.enable_grad())):
            x = numbers(number, 5, WIDTH)
            with context, nullcontext() if num_ranks == 1 else pytest.raises(RuntimeError, match=TOLD):
                loss = engine(x, True)
                assert loss.item() == replica(x, True).item()
                if loss.requires_grad:
                    loss.backward()
        for _ in range(2):  # the engine goes on
            engine(x, False).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert engine(x, False).item() == replica(x, False).item()
        assert engine.memory_report().unsharded == 0


class Again(nn.Module):
    """Calls itself as often as asked, between its own layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, times=2):
        x = torch.tanh(self.first(x))
        return self.last(self(x, times - 1) if times else x)


class Around(nn.Module):
    """Calls itself, and has no parameters of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = Again(), Again()

    def forward(self, x, again=True):
        return self.outer(self(x, False)) if again else self.inner(x)


@on_ranks(1, 2)
def test_modules_that_call_themselves_train_as_in_plain_pytorch(num_ranks):
    model, found = seeded(Around), []
    want = train_replicated(model, "SGD", 2, square_loss)
    for recompute in ("none", "unit"):
        got = train_sharded(model, "SGD", 2, square_loss, units=["Again"], recompute=recompute)
        found += differences(recompute, got, want)
    return found
