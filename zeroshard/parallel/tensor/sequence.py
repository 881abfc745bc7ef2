"""Regions between divided layers, of which each tensor rank computes a part of the sequence.

    x --split--> [ norm ] --gather--> [ columns | rows ] --sum and split--> + x --> [ norm ] --gather--> head
      parts of the sequence           whole; parts of heads                parts                    whole

Norms, dropout and sums with residuals are computed once instead of by every rank, and keep 1 / ranks of their
activations. A gather and a reduce-scatter send what the all-reduce in their place sends.

A norm gathers its output itself: the layers after it, also those that look at shapes and positions, find
whole values. The gather has two results with the same memory. Divided layers take the second one. Their
gradients are summands, which one reduce-scatter adds up for all layers that take it. The gradient of the
first result is whole, as from a router that each rank computes.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 4.2.2.

The steps of activations between layers that are divided over the tensor ranks, with their backward.

A tensor is, over these ranks, the same on each (whole), a part of a dimension on each (part), or a summand on
each. A move leads from one to another. Its backward leads the gradient the opposite way:

    move               forward            backward of the gradient
    COPY               whole              a summand on each: sum
    SUM                summands: sum      whole
    GATHER             parts: gather      whole: split
    SPLIT              whole: split       parts: gather
    SUM_TO_PARTS       sum and split      parts: gather

COPY and SUM stand around a pair of layers, the first one divided by its columns, the second one by its rows
(Shoeybi et al. 2019, "Megatron-LM", section 3: f and g). SUM_TO_PARTS, and the gather of a norm, take their
place where the regions between such pairs are divided along the sequence (Korthikanti et al. 2022, section
4.2.2).

Exchanges of activations over one axis: a tensor in, a tensor out, when the values are there.

The axis is the axis of tensor parallelism, whose ranks compute parts of the same layer. All ranks of the axis
make the same calls in the same order, with the same shapes and dtypes. The results are the same bits on all
ranks, or parts of one tensor that is. Sums are taken at least in float32 and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import ALL_REDUCE
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.watch.status import TENSOR
from zeroshard.internals.autograd import is_in_backward
from zeroshard.parallel.tensor.styles import BY_ROWS, OF_SEQUENCE, Divided, LayerPlan, Split, named_by
from zeroshard.sharding.context import Changes

_Value = TypeVar("_Value")


class Copied(NamedTuple):
    """An input of divided layers."""

    of: Tensor
    version: int
    """Its version counter then."""
    copy: Tensor
    """The same values; its gradient is added up over the ranks."""


class Activations:
    """Sums, gathers and splits tensors over the ranks of an axis.

    Args:
        axis: the axis.
        tag: a tag of this engine that no other exchange uses. One exchange of activations follows another, so
            one tag serves them all.
    """

    def __init__(self, axis: Axis, tag: int) -> None:
        self.rank, self.size, self.device = axis.rank, axis.size, axis.device
        self._axis, self._tag = axis, tag
        self.last: Copied | None = None
        """The input that a divided layer was given last; None after the pair of layers."""
        self._pool = BufferPool(axis.device)

    def sum(self, value: Tensor, label: str) -> Tensor:
        """Return the sum of a tensor over the ranks, of the same shape and dtype."""
        if not value.numel():
            return value
        if not self._axis.exchanges:
            total = value.contiguous().clone()
            self._axis.all_reduce(total, label).wait()
            return total
        if self.size == 2:
            return self._sum_of_two(value.contiguous(), label)
        num = value.numel()
        flat = value.new_empty(-(-num // self.size) * self.size)
        flat[:num].copy_(value.reshape(-1))
        flat[num:].zero_()
        own = flat.chunk(self.size)[self.rank]
        own.copy_(self._scattered(flat, label))
        self._axis.all_gather(flat, own, tag=self._tag, label=label).wait()
        return flat[:num].view(value.shape)

    def _sum_of_two(self, own: Tensor, label: str) -> Tensor:
        """Return the sum over two ranks: each sends all it has, which is no more than two halves are.

        One exchange in place of two that follow each other. The bits are the same on both ranks: a + b is
        b + a.
        """
        axis, peer = self._axis, 1 - self.rank
        label = axis.note(label, TENSOR, ALL_REDUCE, own.nbytes)
        other = self._pool.take(own.dtype, own.numel())
        axis.exchange({peer: own.view(-1)}, {peer: other}, self._tag, label, ALL_REDUCE).wait()
        total = own + other.view(own.shape)
        self._pool.give(other)
        return total

    def gather(self, value: Tensor, dim: int, label: str) -> Tensor:
        """Return the tensors of all ranks, in rank order, as one along `dim`."""
        own = value.contiguous()
        flat = value.new_empty(self.size * own.numel())
        self._axis.all_gather(flat, own.view(-1), tag=self._tag, label=label).wait()
        parts = flat.view(self.size, *own.shape)
        return parts.flatten(0, 1) if dim == 0 and own.dim() else torch.cat(parts.unbind(), dim)

    def split(self, value: Tensor, dim: int) -> Tensor:
        """Return this rank's part along `dim`, a copy. Raises ValueError for a size that does not divide."""
        if value.shape[dim] % self.size:
            raise ValueError(
                f"expected a multiple of the {self.size} tensor-parallel ranks in dimension {dim}, "
                f"got {value.shape[dim]} of shape {list(value.shape)}"
            )
        return value.chunk(self.size, dim)[self.rank].contiguous()

    def scatter(self, value: Tensor, dim: int, label: str) -> Tensor:
        """Return this rank's part along `dim` of the sum over the ranks.

        Raises:
            ValueError: the size does not divide.
        """
        own = self.split(value, dim)
        flat = torch.stack(value.chunk(self.size, dim)).view(-1)
        return self._scattered(flat, label).view(own.shape)

    def first(self, value: _Value, label: str) -> _Value:
        """Return the small picklable value of the first rank. The hosts wait for it, devices do not."""
        everyone: list[_Value] = self._axis.all_gather_object(value, label)
        return everyone[0]

    def _scattered(self, flat: Tensor, label: str) -> Tensor:
        """Return this rank's part of the sum of `flat`, [size * K], which is used up: [K]."""
        wide = torch.promote_types(flat.dtype, torch.float32)
        own = flat.new_empty(flat.numel() // self.size, dtype=wide)
        self._axis.reduce_scatter(flat, own, self._pool, tag=self._tag, label=label).wait()
        return own.to(flat.dtype)


class Comm(Enum):
    """The moves: (way of a tensor in the forward, way of its gradient in the backward)."""

    COPY = ("keep", "sum")
    SUM = ("sum", "keep")
    GATHER = ("gather", "split")
    SPLIT = ("split", "gather")
    SUM_TO_PARTS = ("sum and split", "gather")


_WAYS: dict[str, Callable[[Tensor, Activations, int, str], Tensor]] = {
    "keep": lambda value, over, dim, label: value.view_as(value),
    "sum": lambda value, over, dim, label: over.sum(value, label),
    "gather": lambda value, over, dim, label: over.gather(value, dim, label),
    "split": lambda value, over, dim, label: over.split(value, dim),
    "sum and split": lambda value, over, dim, label: over.scatter(value, dim, label),
}


def move(value: Tensor, how: Comm, over: Activations, label: str, dim: int = -1) -> Tensor:
    """Move a tensor over the tensor ranks.

    Args:
        value: the tensor; the same shape and dtype on all ranks.
        how: the move.
        over: the exchanges of the tensor ranks.
        label: the name of the layer, for messages.
        dim: the dimension of the parts.

    Raises:
        ValueError: the ranks do not divide the dimension.
    """
    if over.size == 1:
        return value
    moved: Tensor = _Moved.apply(value, how, over, label, dim)
    return moved


Sum = Callable[[Tensor, Activations, str], Tensor]
"""(summand, exchanges, name of the layer) -> the sum over the tensor ranks, or a part of it."""


def add_up(value: Tensor, over: Activations, label: str) -> Tensor:
    """Return the sum over the tensor ranks."""
    return move(value, Comm.SUM, over, label)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, how: Comm, over: Activations, label: str, dim: int) -> Tensor:
        ctx.how, ctx.over, ctx.label, ctx.dim = how, over, label, dim
        there, _ = how.value
        moved = _WAYS[there](value, over, dim, f"{there} of activations of {label}")
        # Autograd refuses to add to a view in place, as some models do. A kept or split value shares memory.
        return moved if there in ("keep", "split") else moved.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, back = ctx.how.value
        label = f"{back} of gradients of activations of {ctx.label}"
        return _WAYS[back](gradient, ctx.over, ctx.dim, label), None, None, None, None


DIM = 1
"""The dimension of the sequence: [batch, sequence, hidden]."""
_TWIN = "_summands_of_gradient"
"""The attribute of a gathered tensor, a `_Twin`."""


class _Twin(NamedTuple):
    """The tensors that a gathered one goes with."""

    result: Tensor
    """The second result of the gather."""
    version: int
    """The version of the memory of both results then."""


def _twin_of(value: Tensor) -> _Twin | None:
    """Return the twin of a tensor that was gathered and not changed since."""
    twin: _Twin | None = getattr(value, _TWIN, None)
    return twin if twin is not None and twin.version == value._version else None


class Regions:
    """The switch of a model's regions: they are divided, except in evaluation without gradients.

    There a sequence may have any length, as the single tokens of a generation. Gradients always come from
    parts: gradients of norms are added up over the ranks.

    Args:
        embeds_parts: True if embeddings give parts.
    """

    def __init__(self, *, embeds_parts: bool) -> None:
        self._are_divided = True
        self._embeds_parts = embeds_parts

    @property
    def are_divided(self) -> bool:
        """True if the values of regions are parts now; always in a recomputation."""
        return self._are_divided or is_in_backward()

    def sum_of(self, layer: Divided) -> Sum:
        """Return the sum at the end of a layer that is divided by rows."""
        is_whole = isinstance(layer.module, nn.Embedding) and not self._embeds_parts
        return add_up if is_whole else self.sum

    def follow(self, model: nn.Module, changes: Changes) -> None:
        """Take the mode of a model at each of its forwards. Recomputation keeps the mode of the last one."""

        def before(module: nn.Module, args: Any) -> None:
            self._are_divided = module.training or torch.is_grad_enabled()

        changes.hook(model.register_forward_pre_hook(before, prepend=True))

    def sum(self, value: Tensor, over: Activations, label: str) -> Tensor:
        """Add up the summands of a layer: this rank's part of the sum, or the whole of it."""
        if not self.are_divided:
            return move(value, Comm.SUM, over, label)
        _check(value, over, label)
        return move(value, Comm.SUM_TO_PARTS, over, label, DIM)

    def split(self, value: Tensor, over: Activations, label: str) -> Tensor:
        """Take this rank's part of values that are the same on all ranks."""
        if not self.are_divided:
            return value
        _check(value, over, label)
        return move(value, Comm.SPLIT, over, label, DIM)

    def gather(self, part: Tensor, over: Activations, label: str) -> Tensor:
        """Gather parts; divided layers use the second result of the gather by `copied`."""
        if not self.are_divided or over.size == 1:
            return part
        whole, twin = _Gathered.apply(part, over, label)
        if not whole.is_inference():  # else it has no version, and no gradient
            setattr(whole, _TWIN, _Twin(twin, whole._version))
        return cast(Tensor, whole)


def copied(value: Tensor, over: Activations, label: str) -> Tensor:
    """Give a divided layer its whole input, whose gradient will be added up over the ranks."""
    twin = _twin_of(value)
    if twin is not None:
        return twin.result
    # Queries, keys and values take one input: one sum adds up the gradients of all three.
    if over.last is not None and over.last.of is value and over.last.version == value._version:
        return over.last.copy
    moved = move(value, Comm.COPY, over, label)
    if moved.requires_grad and not torch.compiler.is_compiling():
        over.last = Copied(value, value._version, moved)
    return moved


class _Gathered(torch.autograd.Function):
    """[.., part, ..] -> two results: for layers that each rank computes whole, and for divided ones."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, over: Activations, label: str) -> tuple[Tensor, Tensor]:
        ctx.over, ctx.label = over, label
        ctx.set_materialize_grads(False)
        whole = over.gather(part, DIM, f"gather of activations of {label}").contiguous()
        storage, shape, strides = whole.untyped_storage(), whole.shape, whole.stride()
        return whole, whole.new_empty(0).set_(storage, whole.storage_offset(), shape, strides)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_whole: Tensor | None, of_twin: Tensor | None) -> tuple[Tensor | None, ...]:
        total = None if of_whole is None else ctx.over.split(of_whole, DIM)
        if of_twin is not None:
            label = f"sum and split of gradients of activations of {ctx.label}"
            of_part = ctx.over.scatter(of_twin, DIM, label)
            total = of_part if total is None else total + of_part
        return total, None, None


def _check(value: Tensor, over: Activations, label: str) -> None:
    if value.dim() < 3 or value.shape[DIM] % over.size:
        raise ValueError(
            f"'{label}': a sequence is divided over mesh.tp={over.size} ranks, except in evaluation under "
            f"no_grad: expected [batch, a multiple of {over.size}, hidden], got shape {list(value.shape)}"
        )


def install_regions(layers: Sequence[Divided], over: Activations, changes: Changes) -> Regions | None:
    """Have layers gather or split what they work on; return the switch, or None without such layers.

    Raises:
        ValueError: blocks that follow each other would each split their input.
    """
    ways = {layer.style.way for layer in layers}
    if not ways.intersection(OF_SEQUENCE):
        return None
    first = {layer.name: layer.parent for layer in layers if layer.style.way is Split.SEQUENCE_SPLIT}
    if len(set(first.values())) < len(first):
        raise ValueError(f"tp_plan: expected 'sequence_split' for the first block only, got {[*first]}")
    regions = Regions(embeds_parts=Split.SEQUENCE_SPLIT not in ways)
    for layer in layers:
        if layer.style.way is Split.SEQUENCE:
            changes.around(layer.module, "sequence", functools.partial(_gathering, layer, regions, over))
        elif layer.style.way is Split.SEQUENCE_SPLIT:
            before = functools.partial(_split_first, layer.name, regions, over)
            changes.hook(layer.module.register_forward_pre_hook(before))
    return regions


def _gathering(
    layer: Divided, regions: Regions, over: Activations, forward: Callable[..., Any]
) -> Callable[..., Any]:
    def gathering(*args: Any, **kwargs: Any) -> Any:
        return regions.gather(forward(*args, **kwargs), over, layer.name)

    return gathering


def _split_first(name: str, regions: Regions, over: Activations, module: nn.Module, args: Any) -> Any:
    """Split the first argument of a module."""
    if not (args and isinstance(args[0], Tensor)):
        raise ValueError(f"tp_plan: '{name}': expected a tensor as first argument, to split its sequence")
    return (regions.split(args[0], over, name), *args[1:])


def blocks_of(layers: Iterable[Divided]) -> list[nn.Module]:
    """Return the modules that hold norms and no others that do: all values in them are parts of something."""
    holders = list(dict.fromkeys(layer.parent for layer in layers if layer.style.way in OF_SEQUENCE))
    return [one for one in holders if not any(other in set(one.modules()) - {one} for other in holders)]


def check_coverage(model: nn.Module, patterns: Collection[str]) -> None:
    """Refuse parameters that no pattern names: a rank may use them for a part, or for all values.

    Raises:
        ValueError: there is such a parameter.
    """
    known = named_by(patterns, model)
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and name not in known:
                full = f"{name}.{attribute}" if name else attribute
                raise ValueError(
                    f"tp_plan: with 'sequence' each layer with parameters needs an entry, and '{full}' has "
                    "none: 'sequence' or 'sequence_parts' if it works on a part of the sequence, 'replicate' "
                    "if on all of it, 'replicated_with_grad_allreduce' if on some of the heads"
                )


_PRE_NORM = ("gemma", "gpt_neox", "llama", "mistral", "phi", "qwen2", "qwen3")
"""Models of transformers whose blocks have norms before attention and MLP only, by their `model_type`."""


def with_sequence(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a model of transformers with entries for its norms and its first block.

    Raises:
        ValueError: it is none of the models that are known.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    by_rows = [pattern for pattern, word in plan.items() if LayerPlan.of(word, pattern).way in BY_ROWS]
    rows = named_by(by_rows, model)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(layer.startswith(f"{name}.0.") for layer in rows)
    ]
    if kind not in _PRE_NORM or len(lists) != 1:
        raise ValueError(
            f"mesh.sequence: expected a model of transformers of a type among {', '.join(_PRE_NORM)}, got "
            f"{type(model).__name__}: give a tp_plan with 'sequence' for its norms and 'sequence_split' for "
            "its first block"
        )
    ((name, blocks),) = lists
    outer = name.rpartition(".")[0]
    whole = dict(plan) | {f"{name}.0": "sequence_split"}
    for prefix, holder in ((f"{name}.*", blocks[0]), (outer, model.get_submodule(outer))):
        for child, module in holder.named_children():
            if "Norm" in type(module).__name__:
                whole[f"{prefix}.{child}" if prefix else child] = "sequence"
    known = named_by(whole, model)
    for other, module in model.named_modules():
        is_outside = not other.startswith(f"{name}.") and any(True for _ in module._parameters.values())
        if is_outside and other not in known:
            whole[other] = "replicate"
    return whole
