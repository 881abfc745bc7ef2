"""What the runtime takes for granted about autograd, and how it looks into outputs."""

import collections
import dataclasses
import types
from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
import torch
import torch.utils.flop_counter
from hypothesis import given
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from zeroshard.internals.autograd import (
    at_end_of_backward,
    hook_if_made,
    is_recorded,
    next_node,
    outermost_checkpoint,
    will_accumulate,
)
from zeroshard.internals.nested import cast_inputs, find_tensors


class HookError(Exception):
    pass


def leaf(value=1.0):
    return torch.tensor(value, requires_grad=True)


def fail(*_):
    raise HookError


# -------------------------------------------------------------------------------------- end of backward


def at_end(callback):
    """As a hook: its own result would be taken for a gradient."""
    at_end_of_backward(callback)


def test_a_callback_runs_once_after_the_last_gradient():
    seen, x, z = [], leaf(), leaf()
    y = x * z
    y.register_hook(lambda gradient: at_end(lambda: seen.append((x.grad, z.grad))))
    for parameter in (x, z):
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    y.backward()
    assert seen == ["accumulated", "accumulated", (x.grad, z.grad)]
    (leaf() * 2).backward()
    assert len(seen) == 3


@pytest.mark.parametrize("fails", [True, False])
def test_the_end_of_a_backward_is_known_also_after_an_exception(fails):
    is_running, ended = [], []
    y = leaf() * 2
    z = y * 3
    z.register_hook(lambda gradient: is_running.append(at_end_of_backward(lambda: ended.append(True))))
    y.register_hook(fail if fails else lambda gradient: is_running.append(is_running[0]() is not None))
    with pytest.raises(HookError) if fails else nullcontext():
        z.backward()
    assert is_running[0]() is None
    assert is_running[1:] == ([] if fails else [True])
    (leaf() * 2).backward()
    assert ended == ([] if fails else [True])


# ------------------------------------------------------------------------------------ order of a backward


@st.composite
def graphs(draw):
    """For each node, which of the ones before it are its inputs; -1 is a leaf."""
    num_nodes = draw(st.integers(1, 12))
    inputs = [
        sorted(draw(st.sets(st.integers(-1, number - 1), min_size=1, max_size=3)))
        for number in range(num_nodes)
    ]
    return inputs, draw(st.permutations(range(num_nodes)))


@given(graphs())
def test_when_an_outputs_gradient_is_there_all_that_was_made_after_it_has_run(graph):
    """The parameters of what ran after a unit have their gradients when the hook on its output runs."""
    inputs, order_of_sum = graph
    log, nodes = [], []
    for number, sources in enumerate(inputs):
        weight = leaf()
        weight.register_post_accumulate_grad_hook(lambda _, number=number: log.append(("gradient", number)))
        total = sum(leaf() if source < 0 else nodes[source] for source in sources)
        nodes.append(total * weight)
        nodes[-1].register_hook(lambda _, number=number: log.append(("output", number)))
    torch.stack([nodes[number] for number in order_of_sum]).sum().backward()
    expected = [(what, number) for number in reversed(range(len(nodes))) for what in ("output", "gradient")]
    assert log == expected


# ---------------------------------------------------------------------------------- looking into outputs

A, B, C = torch.zeros(1), torch.zeros(2), torch.zeros(3)


@dataclasses.dataclass
class Plain:
    logits: object
    rest: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    logits: object


@dataclasses.dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    extra: tuple[torch.Tensor, ...] | None = None


Named = collections.namedtuple("Named", ["first", "second"])


class Opaque:
    def __init__(self, value):
        self.value = value


def each_other():
    """Two dataclasses that refer to each other."""
    first, second = Plain(A), Plain(B)
    first.rest, second.rest = second, first
    return first


TRANSPARENT = {
    "each other": (each_other(), [A, B]),
    "tensor": (A, [A]),
    "nothing": (None, []),
    "numbers and names": ((1, 2.5, "name", b"", True, None, torch.float32, torch.Size((1,))), []),
    "tuple": ((A, [B, {"c": C}]), [A, B, C]),
    "nested dict": ({"x": {"y": A, "z": [B]}, "w": (C,)}, [A, B, C]),
    "default dict": (collections.defaultdict(list, {"a": [A, B]}), [A, B]),
    "named tuple": (Named(A, Named(B, C)), [A, B, C]),
    "dataclass in a dict in a dataclass": (Plain({"x": Plain(A, [B])}, C), [A, B, C]),
    "frozen dataclass with slots": (Frozen((A, B)), [A, B]),
    "output of transformers": ([Output(loss=A, extra=(B, C)), Output()], [A, B, C]),
    "the same tensor twice": ((A, A), [A]),
}


OPAQUE = {
    "generator": ((each for each in [A]), []),
    "array": (A.numpy(), []),
    "object among tensors": ((A, Opaque(B), C), [A, C]),
    "object in a dataclass": (Plain(A, Opaque(B)), [A]),
    "user dict": (collections.UserDict(a=A), []),
    "namespace": (types.SimpleNamespace(a=A), []),
    "set": ({A}, []),
}


@pytest.mark.parametrize("what", [*TRANSPARENT, *OPAQUE])
def test_every_tensor_in_containers_and_dataclasses_is_found_and_other_objects_are_reported(what):
    value, expected = (TRANSPARENT | OPAQUE)[what]
    tensors, is_opaque = find_tensors(value)
    assert sorted(map(id, tensors)) == sorted(map(id, expected))
    assert is_opaque == (what in OPAQUE)


def test_casting_changes_the_floats_in_nested_containers_and_nothing_else():
    whole, flag, rest = torch.tensor([1, 2]), torch.tensor(True), {"text": "as it is"}
    value = {"x": (A, [B.double(), whole]), "flag": flag, "plain": Plain(C, rest)}
    (cast,), named = cast_inputs(None, (value,), {"a": A, "again": A}, dtype=torch.bfloat16)
    assert [cast["x"][0].dtype, cast["x"][1][0].dtype, cast["plain"].logits.dtype] == [torch.bfloat16] * 3
    assert cast["x"][1][1] is whole
    assert cast["flag"] is flag
    assert cast["plain"].rest is rest
    assert named["a"] is named["again"] is cast["x"][0]
    (same,), _ = cast_inputs(None, (value["plain"],), {}, dtype=A.dtype)
    assert same is value["plain"]


def test_a_hook_is_registered_on_a_tensor_that_was_made_since_a_node():
    x = leaf(1.0)
    y = x * 2
    node = next_node()
    tensors = (x, y, y + 1, A)
    assert [hook_if_made(tensor, node, print) for tensor in tensors] == [False, False, True, False]
    assert [bool(tensor._backward_hooks) for tensor in tensors] == [False, False, True, False]
    y.mul_(2)
    assert hook_if_made(y, node, print)


def test_a_hook_that_comes_first_runs_before_the_earlier_ones_in_every_backward():
    x = leaf(1.0)
    y, calls = x * 2, []
    first = y.register_hook(lambda _: calls.append("of the user"))
    y.retain_grad()
    for name in ("a", "b"):
        assert hook_if_made(y, 0, lambda _, name=name: calls.append(name))
    y.backward(retain_graph=True)
    first.remove()
    y.backward()
    assert calls == ["b", "a", "of the user", "b", "a"]
    assert y.grad == 2


# --------------------------------------------------------------------------------- running checkpoints


def found_in(nested):
    """(the frame of the outer checkpoint, frames found inside of it)."""
    seen = []

    def inner(x):
        seen.append(outermost_checkpoint())
        return x * 2

    def outer(x):
        y = checkpoint(inner, x, use_reentrant=False) if nested else inner(x)
        seen.append(outermost_checkpoint())
        return y + inner(x)

    checkpoint(outer, torch.ones(2, requires_grad=True), use_reentrant=False)
    return seen


@pytest.mark.parametrize("nested", [True, False])
def test_the_outermost_checkpoint_is_one_frame_for_all_that_is_called_in_it(nested):
    first, *others = found_in(nested)
    assert first is not None
    assert all(frame is first for frame in others)
    assert first.f_code.co_name == "checkpoint"
    assert found_in(nested)[0] is not first


# ----------------------------------------------------------------------------- transforms and tracers


def test_each_tracer_is_noticed_and_a_mode_of_a_user_is_none():
    seen = []

    def function(x):
        seen.append(is_recorded())
        return x * 2

    torch.jit.trace(function, torch.ones(2), check_trace=False)
    make_fx(function)(torch.ones(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        function(torch.ones(2))
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        function(torch.ones(2))
    assert seen == [True, True, True, False]
    assert not is_recorded()


# ------------------------------------------------------------------------- chosen inputs of a backward


def accumulations(backward):
    """For each hook that a backward runs, in order: whether it may give gradients to the parameters."""
    layers = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    x = torch.ones(2, 3, requires_grad=True)
    hidden = layers[0](x).tanh()
    output, found = layers[1](hidden), []
    for tensor in (hidden, output):
        tensor.register_hook(lambda _: found.append(will_accumulate(parameters)))
    backward(output.sum(), x, hidden, parameters)
    return found


@pytest.mark.parametrize(
    ("backward", "want"),
    [
        (lambda loss, x, hidden, parameters: loss.backward(), [True, True]),
        (lambda loss, x, hidden, parameters: loss.backward(inputs=[x]), [False, False]),
        (lambda loss, x, hidden, parameters: loss.backward(inputs=parameters[:1]), [True, True]),
        (lambda loss, x, hidden, parameters: torch.autograd.grad(loss, x), [False, False]),
        (lambda loss, x, hidden, parameters: torch.autograd.grad(loss, hidden)[0], [False, True]),
        (lambda loss, x, hidden, parameters: torch.autograd.grad(loss, parameters), [False, False]),
    ],
)
def test_a_backward_for_chosen_inputs_is_known_by_whether_it_gives_gradients_to_parameters(backward, want):
    """The hook of a tensor that is asked for by itself cannot know; the first hook of a backward asks."""
    assert accumulations(backward) == want
