"""The run of a model without memory: what its modules compute, leave for the backward and send.

A forward and a backward run on the meta device. All that estimates, plans and pipelines know of a model's
cost comes from `count`, which gives bytes, operations and messages of each module that has a row.

    forward  | embedding | unit | unit | unit | head, loss |   counters are read where a module begins and
    backward | embedding | unit | unit | unit | head, loss |   ends, and where the gradient of its output is

Attention is fused, as on GPUs and CPUs: `scaled_dot_product_attention` saves its inputs, its output and a
float32 for each query and head (Dao et al. 2022, "FlashAttention", section 3.1). A model that computes
attention by other operations is counted with these.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.forwards.quantized import is_quantized
from zeroshard.internals import pytree
from zeroshard.internals.nested import find_tensors

META = torch.device("meta")

LossOf = Callable[[nn.Module], Tensor]
"""(model on the meta device) -> the loss of a micro-batch. Tensors that it makes are on the meta device."""
Modules = Mapping[str, nn.Module]
"""Modules that have a row, by its name; the root first."""


@dataclass(slots=True)
class ModuleCounts:
    """The counters of a module, without what is in rows inside of it."""

    forward: Any
    backward: Any
    most: Any
    """The most by which the counters have grown inside of a forward."""
    begin: Any
    """The counters when the last forward began."""
    made: int = 0
    """Bytes of the outputs."""


class Trace:
    """Gives each change of some counters to the row in whose forward or backward it happens.

    What is in no other row, such as the loss, is in the first row, the root.

    Args:
        modules: the modules that have a row.
        read: the counters now.
        sampled: modules at whose end the largest counters are noted.
    """

    def __init__(self, modules: Modules, read: Callable[[], Any], sampled: Iterable[nn.Module] = ()) -> None:
        self._read, self._names = read, list(modules)
        for module in sampled:  # before a row ends
            module.register_forward_hook(self.sample)
        for name, module in list(modules.items())[1:]:
            module.register_forward_pre_hook(partial(self._enter, name))
            module.register_forward_hook(self._leave)

    def run(self, loss_of: Callable[[], Tensor]) -> None:
        """Run a forward and a backward; the rows then have what has happened."""
        self.last = self.end_of_rows = self.peak = self._read()
        zeros = np.zeros(len(self.last))
        self.rows = {name: ModuleCounts(zeros.copy(), zeros.copy(), zeros, zeros) for name in self._names}
        self._within, self._is_backward = self._names[:1], False
        loss = loss_of()
        self._note()
        self.sample()
        self.peak_of_forward, self._is_backward = self.peak, True
        loss.backward()
        self._note()

    def sample(self, *_: Any) -> None:
        """Note the largest counters so far, and inside of the row whose forward runs; a forward hook."""
        now, row = self._read(), self.rows[self._within[-1]]
        self.peak = np.maximum(self.peak, now)
        if not self._is_backward:
            row.most = np.maximum(row.most, now - row.begin)

    def _note(self) -> None:
        now, row = self._read(), self.rows[self._within[-1]]
        into = row.backward if self._is_backward else row.forward
        into += now - self.last
        self.last = now

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._note()
        self._within.append(name)
        self.rows[name].begin = self.last

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._note()
        name, made = self._within.pop(), find_tensors(output)[0]
        self.end_of_rows = self.last
        self.rows[name].made += sum(one.nbytes for one in made)
        for one in made:
            if one.requires_grad:
                one.register_hook(partial(self._begin_backward_of, name))

    def _begin_backward_of(self, name: str, gradient: Tensor) -> None:
        self._note()
        self._within[-1] = name


FLOPS, PRODUCTS, TRAFFIC, ALIVE, SENT, CALLS = range(6)
"""The counters of `count`: operations of products; those of fused attention, in forwards alone; bytes that
other operations read and write; bytes alive; bytes sent to other tensor ranks, and exchanges."""


def count(
    model: nn.Module, modules: Modules, loss_of: LossOf, over: Any = None, *, fuses: bool = True
) -> Trace:
    """Run a forward and a backward of a model without memory.

    Args:
        model: the model on the meta device; its modules get hooks.
        modules: the modules that have a row.
        loss_of: computes the loss.
        over: counts what the model sends, in `sent` and `calls`; None without tensor ranks.
        fuses: False computes attention by products.

    Returns:
        The trace of the counters.
    """
    work, attention = LiveBytes([*model.parameters(), *model.buffers()]), FusedAttention()

    def read() -> Any:
        sent = (0, 0) if over is None else (over.sent, over.calls)
        return np.array([work.flops, attention.products, work.traffic, work.now, *sent], dtype=float)

    trace = Trace(modules, read, model.modules())
    collects = gc.isenabled()
    gc.disable()  # a collection in the middle would end garbage that another run counts to its end
    try:
        with META, torch.enable_grad(), attention if fuses else nullcontext(), work:
            trace.run(lambda: loss_of(model))
    finally:
        if collects:
            gc.enable()
    return trace


class LiveBytes(TorchDispatchMode):
    """Counts the storages of the results of operations, each once, on any device.

    It counts operations of products, too, and bytes that all other operations read and write. torch's own
    counter of operations keeps their tensors alive.

    Args:
        left_out: tensors whose storages do not count, such as parameters.
    """

    def __init__(self, left_out: Iterable[Tensor] = ()) -> None:
        from torch.utils.flop_counter import flop_registry  # it loads much of torch

        super().__init__()  # type: ignore[no-untyped-call]
        self._registry: Any = flop_registry
        self.now = self.flops = self.traffic = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in left_out:
            self._note(tensor.untyped_storage(), 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, count it and note its results."""
        is_condition = func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool
        # On values that are not there a condition is true: no token is padding, for example.
        results = True if is_condition and args[0].is_meta else func(*args, **(kwargs or {}))
        made = [one for one in pytree.tree_leaves(results) if isinstance(one, Tensor)]
        for result in made:
            storage = result.untyped_storage()
            self._note(storage, storage.nbytes())
        if (count := self._registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=results)
        elif not func.is_view:
            given = [one for one in pytree.tree_leaves(args) if isinstance(one, Tensor)]
            self.traffic += sum(one.nbytes for one in (*given, *made))
        return results

    def _note(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        # The storage of a tensor is one Python object while it lives, so its id is its own.
        key = id(storage)
        if key in self._alive:
            return

        def drop(_: Any) -> None:
            del self._alive[key]
            self.now -= num_bytes

        self._alive[key] = weakref.ref(storage, drop)
        self.now += num_bytes


def without_memory(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a model on the meta device; layers with codes are layers with numbers there.

    Args:
        model: the model; it does not change, and is not read.
        dtype: the dtype of floating-point parameters; None: each one's own.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        own = dtype if parameter.is_floating_point() else None
        empty = torch.empty_like(parameter, device=META, dtype=own)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    layers: Iterable[Any] = filter(is_quantized, model.modules())
    for layer in layers:  # a frozen layer of plain numbers keeps what one with codes keeps
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, META)
        memo[id(layer)] = plain.requires_grad_(False)
    return copy.deepcopy(model, memo)


class FusedAttention(TorchFunctionMode, ContextDecorator):
    """Attention without scores in memory; the meta device has only the kernel that keeps them.

    A context, or the decorator of a function that runs in it.
    """

    products = 0
    """The operations of its forwards so far."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            factor = 2 if kwargs and kwargs.get("is_causal") else 4
            self.products += factor * query.numel() * key.shape[-2]
            return _Attention.apply(query, key, value)
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """[..., heads, queries, size], [..., heads or fewer, keys, size] twice -> [..., heads, queries, size]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *batch, heads, length, _ = query.shape
        output = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-3, -2)  # as kernels do
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))  # like the query, the keys and the values
