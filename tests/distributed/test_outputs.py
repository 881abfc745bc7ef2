"""Containers and objects that forwards return, and parameters that leave them in other ways."""

import copy
import re
from collections import defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.training import SOME_STAGES, differences, finish, numbers, replicate, start, step
from tests.ranks import on_ranks

WIDTH = 7


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


class Pair(NamedTuple):
    out: Tensor
    bias: Tensor


@dataclass
class Data:
    out: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Frozen:
    out: Tensor
    inner: dict[str, list[Tensor | None]]


def by_key(found):
    return found["out"], found["bias"]


def by_index(found):
    return found[0], found[1]


def by_name(found):
    return found.out, found.bias


FOUND = {
    "tuple": (lambda out, bias: (out, bias), by_index),
    "dict": (lambda out, bias: {"out": out, "more": None, "bias": bias}, by_key),
    "default dict": (lambda out, bias: defaultdict(list, out=out, bias=bias), by_key),
    "deque": (lambda out, bias: deque([out, bias], maxlen=2), by_index),
    "named tuple": (Pair, by_name),
    "dataclass": (Data, by_name),
    "frozen dataclass": (
        lambda out, bias: Frozen(out, {"bias": [bias, None]}),
        lambda found: (found.out, found.inner["bias"][0]),
    ),
    "dataclass in a list": (lambda out, bias: [out, Data(out, bias)], lambda found: by_name(found[1])),
}
HIDDEN = {
    "dict subclass": (lambda out, bias: AttributeDict(out=out, bias=bias), by_name),
    "namespace": (lambda out, bias: SimpleNamespace(out=out, bias=bias), by_name),
}
RETURNS = FOUND | HIDDEN


class Block(nn.Module):
    """Returns its result and one of its parameters, or a view of one."""

    def __init__(self, kind, is_view):
        super().__init__()
        self.linear, self.inner, self.kind = nn.Linear(WIDTH, WIDTH), nn.Identity(), kind
        self.is_view = is_view

    def forward(self, x):
        bias = self.linear.weight[0] if self.is_view else self.linear.bias
        return RETURNS[self.kind][0](torch.tanh(self.linear(x)), bias)


class Model(nn.Module):
    """Reads what its blocks have returned after all of them have run."""

    def __init__(self, kind, is_view):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(kind, is_view) for _ in range(3))

    def forward(self, x):
        unwrap, results = RETURNS[self.kind][1], []
        for block in self.blocks:
            results.append(block(x))
            x = unwrap(results[-1])[0]
        return x, results


def loss_of(model, number):
    x, results = model(numbers(number, 5, WIDTH))
    kind = getattr(model, "module", model).kind
    return (x.square().mean() + sum(RETURNS[kind][1](result)[1].square().sum() for result in results)) / 3


def returned(kinds, is_view):
    """Losses in training and without a graph; parameters after two steps."""
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        model = Model(kind, is_view)
        replica = replicate(model)
        optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
        want = run(replica, optimizer)
        for stage in SOME_STAGES:
            net = copy.deepcopy(model)
            engine, optimizer = start(net, torch.optim.AdamW(net.parameters(), lr=1e-2), stage=stage)
            found += differences(f"{kind}, stage {stage}", run(engine, optimizer), want)
    return found


def run(net, optimizer):
    losses = []
    for number in range(2):
        losses.append(step(net, optimizer, loss_of, number))
        with torch.no_grad():
            losses.append(loss_of(net, number).item())
    return finish(net, losses)


def test_results_and_parameters_in_containers_and_dataclasses_are_those_of_ddp(ranks):
    assert ranks(2, returned, list(FOUND), is_view=True, timeout=150) == [[]] * 2


def hidden(kind, units):
    """The errors of a forward with a graph, by stage."""
    found = []
    for stage in (1, 3):
        model = Model(kind, is_view=False)
        engine, _ = start(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage, units=units)
        with torch.no_grad():
            engine(numbers(0, 5, WIDTH))
        try:
            loss_of(engine, 0).backward()
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_unit_that_hides_its_tensors_in_an_object_is_refused_by_name(ranks, kind):
    name = type(HIDDEN[kind][0](torch.ones(1), torch.ones(1))).__name__
    for found in ranks(2, hidden, kind, ["Block"]):
        (message,) = found
        assert f"unit 'blocks.0' returns a {name}, in which no tensor can be found" in message
        assert "units=" in message
    assert ranks(2, hidden, kind, []) == [[], []]  # one unit: the whole model
    assert ranks(1, hidden, kind, ["Block"]) == [[]]


class Scale(nn.Module):
    """Has a parameter of its own, and hides its result along with a tensor that has no backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return SimpleNamespace(out=x * self.scale), x.detach() > 0


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Scale(), Scale()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)[0].out
        return x


@on_ranks(2)
def test_a_unit_with_parameters_of_its_own_hides_no_tensor_along_with_another_one():
    model = Scales()
    engine, _ = start(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=3, units=["Scale"])
    with pytest.raises(RuntimeError) as caught:
        engine(numbers(0, 5, WIDTH))
    message = str(caught.value)
    assert "unit 'blocks.0' returns a tuple, in which no tensor can be found" in message


# ------------------------------------------------------------------------------ beside what a forward returns


class Aside(nn.Module):
    """Puts a view of its weight aside."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.inner, self.how = nn.Linear(WIDTH, WIDTH), nn.Identity(), how
        self.kept = None

    def forward(self, x, others):
        row = self.linear.weight[0]
        if self.how == "attribute":
            self.kept = row
        elif self.how == "list of the caller":
            others.append(row)
        elif self.how == "parameter itself":
            others.append(self.linear.weight)
        y = torch.tanh(self.linear(x))
        if self.how == "iterator":
            return y, iter([row])
        return y, None


def read_aside(block, others, returned):
    kept = {
        "attribute": lambda: block.kept,
        "list of the caller": lambda: others.pop(0),
        "parameter itself": lambda: others.pop(0),
        "iterator": lambda: next(returned),
    }
    return kept[block.how]().square().sum()


class KeepsAside(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.blocks = nn.ModuleList(Aside(how) for _ in range(3))

    def forward(self, x, reads):
        others, returned = [], []
        for block in self.blocks:
            x, more = block(x, others)
            returned.append(more)
        if not reads:
            return x.square().mean()
        norms = [read_aside(b, others, r) for b, r in zip(self.blocks, returned, strict=True)]
        return x.square().mean() + sum(norms) / 3


ASIDE = ("attribute", "list of the caller", "parameter itself", "iterator")
TOLD = r"unit 'blocks.0'.*'blocks.0.linear.weight'.*was kept.*clone\(\)"
CAN_TELL = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")


def aside(how):
    """By stage: the losses in training and without a graph, as in DDP, or the error."""
    found = []
    for stage in SOME_STAGES:
        torch.manual_seed(0)
        model = KeepsAside(how)
        replica = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine, optimizer = start(model, optimizer, stage=stage, units=["Aside"])
        for number, context in enumerate((torch.no_grad(), torch.inference_mode(), torch.enable_grad())):
            x = numbers(number, 5, WIDTH)
            with context:
                want = replica(x, True).item()
                try:
                    loss = engine(x, True)
                except RuntimeError as error:
                    found.append(str(error))
                    continue
            if loss.item() != want:
                found.append(f"stage {stage}: {loss.item()} is not {want}")
            if loss.requires_grad:
                loss.backward()
        for _ in range(2):  # the engine goes on
            loss, x = engine(x, False), numbers(5, 5, WIDTH)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            is_same = engine(x, False).item() == replica(x, False).item()
        if not is_same:
            found.append(f"stage {stage}: then it is another model")
    return found, engine.memory_report().unsharded


@pytest.mark.skipif(not CAN_TELL, reason="needs a torch that can clear the message, as 2.14")
@pytest.mark.parametrize("how", ASIDE)
def test_views_of_parameters_that_leave_beside_the_outputs_are_right_or_raise_by_name(ranks, how):
    assert ranks(1, aside, how) == [([], 0)]
    for found, num_bytes in ranks(2, aside, how):
        assert len(found) == 3, found
        for message in found:
            assert re.search(TOLD, message), message
        assert num_bytes == 0
