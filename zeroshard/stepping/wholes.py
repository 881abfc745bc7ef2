"""Whole tensors for optimizers whose update of an element needs all elements of a matrix.

A step asks for the updates of all its matrices in one call, so that ranks may divide them. Where ranks
share the parameters, `WholesOverRanks` gives each tensor one rank that computes its update:

    inward     slices of the tensors go to their owners, in one all-to-all; none where ranks hold them whole
    compute    each owner puts its tensors together and computes their updates
    outward    slices of the updates return, in one all-to-all

A range that the owner holds itself is not sent; `plan/owners.py` chooses owners and lists what is sent. The
ranks are those that hold the same part of the model. So shard groups that hold the same slices share the
work, and so do the ranks of a tensor group.

During a call a rank has in memory, in the dtype of the tensors: the tensors that it owns, their updates, what
it sends and what it receives. With N ranks each of these is about 1/N of all elements. At stage 0 a rank
receives all updates but its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable
from zlib import crc32

import torch
from torch import Tensor

from zeroshard.comm import moves
from zeroshard.comm.collectives import all_to_all
from zeroshard.comm.mesh import Axes
from zeroshard.comm.watch.status import REDUCE, WHOLES
from zeroshard.parameters.parts import part_of, whole_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan.cuts import Cut
from zeroshard.plan.layout import Layout, Span
from zeroshard.plan.owners import Item, Send, choose_owners, inward, outward
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.stepping.norms import name_of, place_among, refuse_slices

Shape = tuple[int, ...]


class Key(NamedTuple):
    """Names a whole tensor in a call."""

    parameter: int
    """The number of its parameter in the call."""
    part: int
    """Its number among the tensors of the parameter."""


Compute = Callable[[list[Tensor], list[Key]], Sequence[Tensor]]
"""(whole tensors, their keys) -> the update of each, of its shape and dtype. The tensors are contiguous
copies on the device that computes, and may be changed."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """A tensor that is made only on ranks that compute with it, or send some of it."""

    make: Callable[[], Tensor]
    like: Tensor
    """A tensor of its shape, on its device."""
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape."""
        return self.like.shape


Given = Tensor | Deferred

Cost = Callable[[Shape], int]
"""(shape) -> the cost of the update of a tensor, in any unit."""


Wholes = Callable[..., list[Tensor]]
"""Computes updates from whole tensors, with the arguments of `wholes_here`."""


@runtime_checkable
class UsesWholes(Protocol):
    """An optimizer whose update of an element needs whole tensors.

    `compute` may keep state of a tensor on its owner: a tensor has the same owner in all steps. Checkpoints
    hold the states in `optimizer.state` that are element-wise or few values, and refuse others by their
    names. They know nothing of state that is kept elsewhere.
    """

    wholes_of: Wholes
    """The function that computes with whole tensors: `wholes_here` until ranks share the parameters."""


@torch.no_grad()
def wholes_here(
    parameters: Sequence[Tensor],
    tensors: Sequence[Given],
    compute: Compute,
    *,
    shapes: Sequence[Sequence[Shape]] | None = None,
    cost: Cost = math.prod,
) -> list[Tensor]:
    """Return the updates of slices; collective where ranks share the parameters, with the same ones on all.

    This one is for a process that holds every parameter whole.

    Args:
        parameters: the parameters. A rank may hold slices of them, [n].
        tensors: for each slice a tensor of its shape, of the same dtype on all ranks, or a deferred one.
            `compute` gets the whole of it.
        compute: the computation. A rank calls it for the tensors that it owns.
        shapes: the tensors that each parameter consists of, one after another in its memory. Each of them
            has an owner of its own. None: one, of the shape of the parameter.
        cost: the cost of an update; all ranks get the same costs if possible. The default is the number
            of elements.

    Returns:
        The update of each slice, of the shape, dtype and device of its tensor.

    Raises:
        ValueError: shapes that do not fill a parameter, or updates of other shapes or dtypes.
        RuntimeError: slices of a parameter whose other slices are not known.
    """
    refuse_slices(parameters, "updates from whole parameters")
    asked = shapes_asked(parameters, shapes)
    keys = [Key(number, part) for number, own in enumerate(asked) for part in range(len(own))]
    wholes = [
        whole for tensor, own in zip(tensors, asked, strict=True) for whole in divide(made(tensor), own)
    ]
    updates = iter(checked_updates(compute, wholes, keys))
    return [
        join([next(updates) for _ in own]).view(tensor.shape)
        for tensor, own in zip(tensors, asked, strict=True)
    ]


def made(tensor: Given) -> Tensor:
    """Return a tensor, which is made now if it is deferred."""
    return tensor.make() if isinstance(tensor, Deferred) else tensor.detach()


def whole_shape(parameter: Tensor) -> Shape:
    """Return the shape of the parameter of the model, of which a rank may hold a slice."""
    return tuple(parameter.full_shape if isinstance(parameter, ShardedParameter) else parameter.shape)


def shapes_asked(
    parameters: Sequence[Tensor], shapes: Sequence[Sequence[Shape]] | None
) -> list[tuple[Shape, ...]]:
    """Return the shapes of the tensors of each parameter.

    Raises:
        ValueError: they do not fill the parameter.
    """
    if shapes is None:
        return [(whole_shape(parameter),) for parameter in parameters]
    asked = [tuple(tuple(shape) for shape in own) for own in shapes]
    for parameter, own in zip(parameters, asked, strict=True):
        if sum(map(math.prod, own)) != math.prod(whole_shape(parameter)):
            raise ValueError(
                f"updates from whole tensors: expected shapes that fill {name_of(parameter)} of shape "
                f"{whole_shape(parameter)}, got {list(own)}"
            )
    return asked


def divide(whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Copy the tensors of a parameter into memory of their own.

    Each begins at an address that the allocator gives, at any number of ranks: kernels may sum in another
    order at another alignment.
    """
    pieces = whole.reshape(-1).split([math.prod(shape) for shape in shapes])
    return [piece.clone().view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def join(updates: Sequence[Tensor]) -> Tensor:
    """Return updates one after another, [n]."""
    flat = [update.reshape(-1) for update in updates]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def checked_updates(compute: Compute, wholes: list[Tensor], keys: list[Key]) -> list[Tensor]:
    """Call `compute`, unless there is nothing to compute.

    Raises:
        ValueError: it returns another number of updates, or updates of other shapes or dtypes.
    """
    if not wholes:
        return []
    forms = [(whole.shape, whole.dtype) for whole in wholes]
    updates = list(compute(wholes, keys))
    if len(updates) != len(forms):
        raise ValueError(f"updates from whole tensors: expected {len(forms)} updates, got {len(updates)}")
    for (shape, dtype), update, key in zip(forms, updates, keys, strict=True):
        if (update.shape, update.dtype) != (shape, dtype):
            raise ValueError(
                f"updates from whole tensors: expected {list(shape)} {dtype} for {key}, got "
                f"{list(update.shape)} {update.dtype}"
            )
    return updates


_MOST_PLANS = 256
"""Plans that are kept. A run has one for each set of parameters that step together."""


class _BufferPlace(NamedTuple):
    """The place of a sharded parameter in its flat buffer."""

    layout: Layout
    """Over the ranks that hold a slice each; over one rank where each holds all."""
    number: int
    cut: Cut | None

    def held(self, shard_rank: int, tp_rank: int) -> Span:
        """The range that a rank holds, in the parts of all tensor ranks one after another."""
        own = self.layout.owned(self.number, shard_rank % self.layout.num_ranks)
        return own.shifted(tp_rank * self.layout.sizes[self.number]) if self.cut is not None else own


class _OwnedPart(NamedTuple):
    """Tensors of one parameter with one owner: one tensor, or all of a parameter that tensor ranks cut."""

    parameter: int
    first: int
    """The number of the first of them in the parameter."""
    shapes: tuple[Shape, ...]
    cut: Cut | None
    own: Span
    """The range that this rank holds of them."""
    place: slice
    """The place of this range in the slice of the parameter."""


class _CallPlan(NamedTuple):
    """A call: its tensors with their owners, and what this rank sends and receives."""

    parts: list[_OwnedPart]
    owned: list[int]
    """The numbers of the parts that this rank owns."""
    inward: list[Send] | None
    """What this rank sends or receives; None where no rank does."""
    outward: list[Send] | None
    label: str


class WholesOverRanks:
    """`Wholes` of sharded parameters: at most one all-to-all each way a call, on all ranks alike.

    Results do not depend on owners. So they are the same bits at any number of ranks, where `compute` gives
    the same bits for the same tensor.

    Args:
        buffers: the buffers of the parameters.
        axes: the axes of the mesh.
    """

    def __init__(self, buffers: Iterable[FlatBuffer], axes: Axes) -> None:
        self._axis, self._device = axes.everyone, axes.everyone.device
        self._ranks = axes.places
        self._places = {
            p: _BufferPlace(layout, index, buffer.originals[index].cut)
            for buffer in buffers
            for layout in [buffer.layout if buffer.is_partial else replace(buffer.layout, num_ranks=1)]
            for index, p in enumerate(buffer.sharded)
        }
        self._owners: dict[tuple[int, int, tuple[Shape, ...]], int] = {}
        """The owners so far: they stay, with the state that they may have."""
        self._plans: dict[object, _CallPlan] = {}

    @torch.no_grad()
    def __call__(
        self,
        parameters: Sequence[Tensor],
        tensors: Sequence[Given],
        compute: Compute,
        *,
        shapes: Sequence[Sequence[Shape]] | None = None,
        cost: Cost = math.prod,
    ) -> list[Tensor]:
        """Return the updates of slices; see `wholes_here`."""
        if not any(isinstance(p, ShardedParameter) for p in parameters):
            return wholes_here(parameters, tensors, compute, shapes=shapes, cost=cost)
        asked = shapes_asked(parameters, shapes)
        costs = [tuple(map(cost, own)) for own in asked]
        key = (*map(id, parameters), *asked, *costs)
        if key not in self._plans:
            if len(self._plans) == _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = self._make_plan(parameters, asked, costs)
        plan = self._plans[key]
        # Without an agreement ranks with other tensors or owners would take pieces of one tensor for pieces
        # of another, or expect other sizes than are sent, for which Gloo ends the process.
        self._axis.ledger.note(f"{WHOLES} {plan.label}", REDUCE)
        agreed = self._axis.any([False], "agreement on whole tensors", compares=True)
        if plan.inward is not None:
            agreed()
        updates = self._compute(plan, tensors, compute)
        if plan.inward is None:  # the agreement ran during the computation
            agreed()
        pieces: list[list[tuple[slice, Tensor]]] = [[] for _ in parameters]
        for number in plan.owned:
            part = plan.parts[number]
            if part.own.size:
                pieces[part.parameter].append((part.place, updates[number][part.own.slice]))
        outward = self._exchange(
            plan, plan.outward, lambda m: updates[m.item][m.span.slice], tensors, "updates"
        )
        for move, values in outward:
            part = plan.parts[move.item]
            place = move.span.shifted(part.place.start - part.own.start).slice
            pieces[part.parameter].append((place, values))
        results = [_joined(*own, self._device) for own in zip(tensors, pieces, strict=True)]
        places = [tensor.like if isinstance(tensor, Deferred) else tensor for tensor in tensors]
        return list(map(moves.beside, results, places))

    def _compute(self, plan: _CallPlan, tensors: Sequence[Given], compute: Compute) -> dict[int, Tensor]:
        """Return the updates of the parts that this rank owns, [n] each, by number."""
        flat: dict[int, Tensor] = {}

        @functools.cache
        def given(number: int) -> Tensor:
            return moves.to_device(made(tensors[number]), self._device).reshape(-1)

        for number in plan.owned:
            part = plan.parts[number]
            values = given(part.parameter)
            flat[number] = values.new_empty(sum(map(math.prod, part.shapes)))
            flat[number][part.own.slice] = values[part.place]

        def source(move: Send) -> Tensor:
            part = plan.parts[move.item]
            return given(part.parameter)[part.place][move.span.shifted(-part.own.start).slice]

        for move, values in self._exchange(plan, plan.inward, source, tensors, "slices"):
            flat[move.item][move.span.slice].view(torch.uint8).copy_(values)
        given.cache_clear()
        wholes: list[Tensor] = []
        keys: list[Key] = []
        for number in plan.owned:
            part = plan.parts[number]
            wholes += _wholes_of(flat.pop(number), part)
            keys += (Key(part.parameter, part.first + at) for at in range(len(part.shapes)))
        found = iter(checked_updates(compute, wholes, keys))
        del wholes
        return {
            number: _flat_of([next(found) for _ in plan.parts[number].shapes], plan.parts[number])
            for number in plan.owned
        }

    def _exchange(
        self,
        plan: _CallPlan,
        exchanged: Sequence[Send] | None,
        source: Callable[[Send], Tensor],
        tensors: Sequence[Given],
        what: str,
    ) -> list[tuple[Send, Tensor]]:
        """Send and receive ranges.

        Args:
            plan: the call.
            exchanged: what this rank sends or receives; None where no rank does.
            source: gives the values of a range that this rank sends.
            tensors: the tensors of the call.
            what: a word for what is sent, in errors.

        Returns:
            The ranges that this rank receives, [n] uint8 each.
        """
        if exchanged is None:
            return []
        axis = self._axis
        sent: list[list[Tensor]] = [[] for _ in range(axis.size)]
        expected: list[list[tuple[Send, int]]] = [[] for _ in range(axis.size)]
        for move in exchanged:
            if move.source == axis.rank:
                sent[move.target].append(source(move))
            else:
                num_bytes = move.span.size * tensors[plan.parts[move.item].parameter].dtype.itemsize
                expected[move.source].append((move, num_bytes))
        totals = [sum(num_bytes for _, num_bytes in own) for own in expected]
        received = all_to_all(axis, sent, totals, label=f"all-to-all of the {what} of {plan.label}")
        return [
            (move, piece)
            for own, values in zip(expected, received, strict=True)
            for (move, _), piece in zip(own, values.split([size for _, size in own]), strict=True)
        ]

    def _make_plan(
        self,
        parameters: Sequence[Tensor],
        shapes: Sequence[tuple[Shape, ...]],
        costs: Sequence[tuple[int, ...]],
    ) -> _CallPlan:
        """Return the plan for a call; what ranks share is planned alike on all of them."""
        items: list[Item] = []
        parts: list[_OwnedPart] = []
        alone: list[_OwnedPart] = []
        names: list[object] = []
        rank = self._axis.rank
        for number, (p, own, own_costs) in enumerate(zip(parameters, shapes, costs, strict=True)):
            if not isinstance(p, ShardedParameter):  # each rank holds it whole, with a gradient of its own
                whole = Span(0, p.numel())
                alone.append(_OwnedPart(number, 0, own, None, whole, whole.slice))
                continue
            place = place_among(self._places, p, "updates from whole parameters")
            held = [place.held(*at) for at in self._ranks]
            together = 1 if place.cut is None else len(own) or 1  # parts of tensor ranks have one owner
            start = 0
            for first in range(0, len(own), together):
                run = own[first : first + together]
                whole = Span(start, start + sum(map(math.prod, run)))
                start = whole.stop
                if not whole.size:
                    continue
                ranges = tuple(one.intersect(whole).shifted(-whole.start) for one in held)
                inside = held[rank].intersect(whole).shifted(-held[rank].start).slice
                items.append(Item(whole.size, sum(own_costs[first : first + together]), ranges))
                parts.append(_OwnedPart(number, first, run, place.cut, ranges[rank], inside))
            names.append((p.fqn, own))
        keys = [(id(parameters[part.parameter]), part.first, part.shapes) for part in parts]
        kept = {at: owner for at, key in enumerate(keys) if (owner := self._owners.get(key)) is not None}
        owners = choose_owners(items, self._axis.size, kept)
        self._owners |= zip(keys, owners, strict=True)
        digest = crc32(repr((names, owners)).encode())
        return _CallPlan(
            parts=[*parts, *alone],
            owned=[number for number, owner in enumerate([*owners, *[rank] * len(alone)]) if owner == rank],
            inward=_of_rank(inward(items, owners), rank),
            outward=_of_rank(outward(items, owners), rank),
            label=f"{len(parts)} whole tensors ({digest:08x})",
        )


def _joined(given: Given, pieces: Sequence[tuple[slice, Tensor]], device: torch.device) -> Tensor:
    """Return the update of a tensor from its pieces, each with its place in the slice and perhaps as bytes.

    One piece that is all of it is not copied.
    """
    shape, dtype = given.shape, given.dtype
    if len(pieces) == 1:
        ((_, values),) = pieces
        is_aligned = values.storage_offset() * values.element_size() % dtype.itemsize == 0
        if is_aligned and values.nbytes == shape.numel() * dtype.itemsize:
            return values.view(dtype).view(shape)
    result = torch.empty(shape, dtype=dtype, device=device)
    for place, values in pieces:
        result[place].view(torch.uint8).copy_(values.view(torch.uint8))
    return result


def _of_rank(all_moves: Sequence[Send], rank: int) -> list[Send] | None:
    """Return the moves from and to a rank; None if there are no moves at all."""
    return [move for move in all_moves if rank in (move.source, move.target)] if all_moves else None


def _wholes_of(flat: Tensor, part: _OwnedPart) -> list[Tensor]:
    """Return the tensors of a part, in memory of their own."""
    cut = part.cut
    whole = flat if cut is None else whole_of(flat.view(cut.num_ranks, *cut.local_shape).unbind(), cut)
    return [whole.view(part.shapes[0])] if len(part.shapes) == 1 else divide(whole, part.shapes)


def _flat_of(updates: Sequence[Tensor], part: _OwnedPart) -> Tensor:
    """Return updates as `_wholes_of` got their tensors, [n]."""
    flat, cut = join(updates), part.cut
    if cut is None:
        return flat
    return join([part_of(flat.view(cut.shape), cut, rank) for rank in range(cut.num_ranks)])
