"""Activations on the host. Tensors move on the pretend device; values are compared with those of a CPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.pretend.device import pretend_device
from tests.pretend.scenarios.offloaded import HOST, num_copies, of_any_size
from tests.pretend.trace import Trace
from tests.ranks import on_ranks


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.between: Callable[[Tensor], Tensor] = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x))).exp()


class Stack(nn.Module):
    """Blocks whose last operation saves its own output; `edit` sees the outputs."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.edit: Callable[[int, Tensor], None] = lambda number, x: None
        self.around: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.around(block, x)
            self.edit(number, x)
        return x.sum()


def stack(offload: dict[str, Any] = HOST) -> tuple[Stack, Any]:
    torch.manual_seed(0)
    model = Stack()
    for parameter in model.parameters():
        parameter.data.mul_(0.1)
    config = {"stage": 3, "units": ["Block"]} | offload
    return model, zeroshard.initialize(model, sgd, config).engine


X = torch.linspace(-1, 1, 16 * 32).view(16, 32)


NUM_COPIED, NUM_FREED = 5 + 4, 4 + 3
"""Of 6 blocks, each saves the output of its first layer, and its own output, which is the input of the next.
When the last one begins, its input is not copied; copies that have just begun are not freed."""


def bytes_on_the_device(trace: Trace, offload: dict[str, Any]) -> list[int]:
    """Bytes that a forward, and a backward whose graph is kept, leave on the device."""
    _, engine = stack(offload)
    engine(X).backward()
    engine.zero_grad()
    gc.collect()  # of an engine before this one
    before = trace.device_bytes()
    loss = engine(X)
    after_forward = trace.device_bytes() - before
    loss.backward(retain_graph=True)
    engine.zero_grad()
    return [after_forward, trace.device_bytes() - before, engine.memory_report().host]


@on_ranks(1)
def test_the_device_has_what_two_units_have_saved_and_the_host_the_rest() -> None:
    with of_any_size(), pretend_device() as trace:
        kept, moved = (bytes_on_the_device(trace, offload) for offload in ({}, HOST))
    # After a backward that keeps its graph, all is on the device again.
    num_bytes = [NUM_FREED * X.nbytes, 0, -NUM_COPIED * 4096]
    assert [before - after for before, after in zip(kept, moved, strict=True)] == num_bytes


def edits(kind: str) -> Callable[[int, Tensor], None]:
    """An edit in place of a tensor that autograd has saved."""
    kept: list[Tensor] = []

    def edit(number: int, x: Tensor) -> None:
        if number == 1:
            kept.append(x.detach().view(-1) if kind == "a view, later" else x)
        if (kind == "at once" and number == 1) or (kind.endswith("later") and number == 4):
            kept[0].add_(1)

    return edit


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = x.exp()
        out.detach().add_(1)
        return out


def outcome(kind: str, offload: dict[str, Any]) -> str:
    """The error of a backward, or its gradient."""
    model, engine = stack(offload)
    model.edit = edits(kind)
    if kind == "inside":
        model.blocks[2].between = AddOne()
    try:
        engine(X).backward()
    except RuntimeError as error:
        return str(error).split(":")[0]
    return f"{next(engine.parameters()).grad.norm():.6e}"


KINDS = ("none", "inside", "at once", "later", "a view, later")


@on_ranks(1)
def test_a_saved_tensor_that_was_modified_in_place_is_the_error_that_torch_has() -> None:
    """With offload also of tensors that are too small to move."""
    plain = {kind: outcome(kind, {}) for kind in KINDS}
    with pretend_device():
        assert {kind: outcome(kind, HOST) for kind in KINDS} == plain
        with of_any_size():
            assert {kind: outcome(kind, HOST) for kind in KINDS} == plain
    message = "one of the variables needed for gradient computation has been modified"
    assert [kind for kind in KINDS if not plain[kind].startswith(message)] == ["none"]


class _Views(torch.autograd.Function):
    """Saves views of one memory, and notes if they come back as they were."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[bool]) -> Tensor:
        base = x.detach().clone()
        ctx.save_for_backward(
            base, base, base.t(), base[1:, ::2], base.view(-1).as_strided((3, 4), (0, 2), 5)
        )
        ctx.expected, ctx.notes = [(t.clone(), t.stride()) for t in ctx.to_save], notes
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        saved = zip(ctx.saved_tensors, ctx.expected, strict=True)
        ctx.notes.append(all(t.stride() == s and torch.equal(t, values) for t, (values, s) in saved))
        return gradient, None


class SavesViews(nn.Module):
    def __init__(self, notes: list[bool]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        return _Views.apply(x, self.notes)


@on_ranks(1)
def test_memory_that_is_saved_several_times_moves_once_and_views_are_as_they_were() -> None:
    notes: list[bool] = []
    with of_any_size(), pretend_device() as trace:
        model, engine = stack()
        model.blocks[1].between = SavesViews(notes)
        engine(X).backward()
        assert num_copies(trace) == (NUM_COPIED + 1, NUM_FREED + 1)
    assert notes == [True]


def under_no_grad(model: Stack, engine: Any) -> Tensor:
    engine.eval()
    with torch.no_grad():
        return engine(X)


def twice_differentiated(model: Stack, engine: Any) -> Tensor:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(engine(x), x, create_graph=True)
    gradient.square().sum().backward()
    return next(engine.parameters()).grad.clone()


def kept_and_looked_at(model: Stack, engine: Any) -> Tensor:
    loss = engine(X)
    node = loss.grad_fn.next_functions[0][0]
    assert torch.equal(node._saved_result, node._saved_result)
    loss.backward(retain_graph=True)
    engine(X + 1).backward()
    loss.backward()
    return next(engine.parameters()).grad.clone()


def inside_checkpoints(model: Stack, engine: Any) -> Tensor:
    model.around = lambda block, x: checkpoint(block, x, use_reentrant=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine(X).backward()
    expected = ["Block"] if engine.config.offload.activations == "cpu" else []
    assert [str(w.message).split(": ")[0].split()[-1] for w in caught] == expected
    return next(engine.parameters()).grad.clone()


MODES = {
    under_no_grad: False,
    twice_differentiated: True,
    kept_and_looked_at: True,
    inside_checkpoints: False,
}
"""Ways to use a model, and True for those in which activations move."""


@on_ranks(1)
def test_graphs_of_all_kinds_have_the_values_of_a_cpu() -> None:
    for run, moves in MODES.items():
        plain = run(*stack({}))
        with of_any_size(), pretend_device() as trace:
            assert torch.equal(plain, run(*stack())), run.__name__
            assert (min(num_copies(trace)) > 0) is moves, run.__name__
