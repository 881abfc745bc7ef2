"""Objects that forwards return with parameters in them, and parameters that leave beside the outputs."""

import copy
import re
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.training import STAGES, differences, finish, numbers, replicate, start, step

WIDTH = 7


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


class Ordered(OrderedDict):
    pass


class Defaults(defaultdict):
    pass


class Listed(list):
    pass


class Queue(deque):
    pass


class Elements(set):
    pass


class Pair(NamedTuple):
    out: Tensor
    bias: Tensor


class NamedPair(Pair):
    """A subclass of a named tuple, which is no named tuple to torch."""


class OwnMapping(Mapping):
    """Keeps its values where it likes."""

    def __init__(self, values):
        self._values = values

    def __getitem__(self, key):
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)


class Slotted:
    __slots__ = ("bias", "out")

    def __init__(self, out, bias):
        self.out, self.bias = out, bias


class Selfish:
    """Refers to itself."""

    def __init__(self, out, bias):
        self.out, self.inner, self.me = out, {"bias": [bias]}, self


class Text(str):
    """A string with attributes."""


def as_text(out, bias):
    text = Text("result")
    text.out, text.bias = out, bias
    return text


def as_set(kind):
    return lambda out, bias: kind([out, bias])


def of_set(found):
    return next(t for t in found if t.dim() == 2), next(t for t in found if t.dim() == 1)


def by_key(found):
    return found["out"], found["bias"]


def by_index(found):
    return found[0], found[1]


def by_name(found):
    return found.out, found.bias


RETURNS = {
    "dict subclass": (lambda out, bias: AttributeDict(out=out, bias=bias), by_name),
    "ordered dict subclass": (lambda out, bias: Ordered(out=out, bias=bias), by_key),
    "default dict subclass": (lambda out, bias: Defaults(list, out=out, bias=bias), by_key),
    "counter": (lambda out, bias: Counter({"out": out, "bias": bias}), by_key),
    "user dict": (lambda out, bias: UserDict(out=out, bias=bias), by_key),
    "chain map": (lambda out, bias: ChainMap({"out": out}, {"bias": bias}), by_key),
    "mapping": (lambda out, bias: OwnMapping({"out": out, "bias": bias}), by_key),
    "list subclass": (lambda out, bias: Listed([out, bias]), by_index),
    "user list": (lambda out, bias: UserList([out, bias]), by_index),
    "deque": (lambda out, bias: deque([out, bias], maxlen=2), by_index),
    "deque subclass": (lambda out, bias: Queue([out, bias]), by_index),
    "set": (as_set(set), of_set),
    "frozen set": (as_set(frozenset), of_set),
    "set subclass": (as_set(Elements), of_set),
    "named tuple subclass": (NamedPair, by_name),
    "namespace": (lambda out, bias: SimpleNamespace(out=out, bias=bias), by_name),
    "object with slots": (Slotted, by_name),
    "object in itself": (Selfish, lambda found: (found.out, found.inner["bias"][0])),
    "string with attributes": (as_text, by_name),
}


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
        for stage in STAGES:
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


@pytest.mark.long
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_results_and_parameters_in_any_container_or_object_are_those_of_ddp(ranks, num_ranks, is_view):
    assert ranks(num_ranks, returned, list(RETURNS), is_view, timeout=150) == [[]] * num_ranks


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
        elif self.how == "object":
            others.append(SimpleNamespace(row=row))
        y = torch.tanh(self.linear(x))
        if self.how == "iterator":
            return y, iter([row])
        if self.how == "function":
            return y, lambda: row
        return y, None


def read_aside(block, others, returned):
    kept = {
        "attribute": lambda: block.kept,
        "list of the caller": lambda: others.pop(0),
        "parameter itself": lambda: others.pop(0),
        "object": lambda: others.pop(0).row,
        "iterator": lambda: next(returned),
        "function": lambda: returned(),
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


ASIDE = ("attribute", "list of the caller", "parameter itself", "object", "iterator", "function")
TOLD = r"unit 'blocks.0'.*'blocks.0.linear.weight'.*was kept.*clone\(\)"
CAN_TELL = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")


def aside(how):
    """By stage: the losses in training and without a graph, as in DDP, or the error."""
    found = []
    for stage in STAGES:
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
    num_errors = {"attribute": 1, "list of the caller": 1, "parameter itself": 3, "object": 1}
    for found, num_bytes in ranks(2, aside, how):
        assert len(found) == num_errors.get(how, 0), found
        for message in found:
            assert re.search(TOLD, message), message
        assert num_bytes == 0
