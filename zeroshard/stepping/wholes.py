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
from itertools import zip_longest
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
from zeroshard.plan.layout import Span
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
    forms = [f"{list(whole.shape)} {whole.dtype}" for whole in wholes]
    updates = list(compute(wholes, keys))
    found = [f"{list(update.shape)} {update.dtype}" for update in updates]
    for key, form, update in zip_longest(keys, forms, found):
        if form != update:
            raise ValueError(f"updates from whole tensors: expected {form} for {key}, got {update}")
    return updates


_MOST_PLANS = 256
"""Plans that are kept. A run has one for each set of parameters that step together."""


class _OwnedPart(NamedTuple):
    """Tensors of one parameter with one owner: one tensor, or all of a parameter that tensor ranks cut."""

    parameter: int
    first: int
    """The number of the first of them in the parameter."""
    shapes: tuple[Shape, ...]
    cut: Cut | None
    start: int
    """The place of their first element, counted in the slice of this rank."""


class _Trip(NamedTuple):
    """The ranges that go to owners, or come back."""

    moves: list[Send]
    """The ranges that this rank sends or receives, and those that it keeps, by source and target."""
    label: str
    """The name in messages; "" where no rank sends anything."""


class _CallPlan(NamedTuple):
    """A call: its tensors with their owners, and what this rank sends and receives."""

    parts: list[_OwnedPart]
    owned: list[int]
    """The numbers of the parts that this rank owns."""
    inward: _Trip
    outward: _Trip
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
        self._places = {  # one rank holds all of a parameter where each does
            p: (layout, index, buffer.originals[index].cut)
            for buffer in buffers
            for layout in [buffer.layout if buffer.is_partial else replace(buffer.layout, num_ranks=1)]
            for index, p in enumerate(buffer.sharded)
        }
        """The layout of each parameter, its number there, and its cut."""
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
        self._axis.any([False], "agreement on whole tensors", compares=True)()
        updates = self._compute(plan, tensors, compute)
        pieces: list[list[tuple[slice, Tensor]]] = [[] for _ in parameters]
        for move, values in self._exchange(
            plan, plan.outward, tensors, lambda m: updates[m.item][m.span.slice]
        ):
            part = plan.parts[move.item]
            pieces[part.parameter].append((move.span.shifted(part.start).slice, values))
        results = [_joined(*own, self._device) for own in zip(tensors, pieces, strict=True)]
        places = [tensor.like if isinstance(tensor, Deferred) else tensor for tensor in tensors]
        return list(map(moves.beside, results, places))

    def _gather(self, plan: _CallPlan, tensors: Sequence[Given]) -> dict[int, Tensor]:
        """Return the values of the parts that this rank owns, [n] each, by number."""

        @functools.cache
        def given(number: int) -> Tensor:
            return moves.to_device(made(tensors[number]), self._device).reshape(-1)

        def source(move: Send) -> Tensor:
            part = plan.parts[move.item]
            return given(part.parameter)[move.span.shifted(part.start).slice]

        flat = {}
        for number in plan.owned:
            part = plan.parts[number]
            size, dtype = sum(map(math.prod, part.shapes)), tensors[part.parameter].dtype
            flat[number] = torch.empty(size, dtype=dtype, device=self._device)
        for move, values in self._exchange(plan, plan.inward, tensors, source):
            flat[move.item][move.span.slice].view(torch.uint8).copy_(values.view(torch.uint8))
        return flat

    def _compute(self, plan: _CallPlan, tensors: Sequence[Given], compute: Compute) -> dict[int, Tensor]:
        """Return the updates of the parts that this rank owns, [n] each, by number."""
        flat = self._gather(plan, tensors)
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
        self, plan: _CallPlan, trip: _Trip, tensors: Sequence[Given], source: Callable[[Send], Tensor]
    ) -> list[tuple[Send, Tensor]]:
        """Send and receive ranges.

        Args:
            plan: the call.
            trip: one of its exchanges.
            tensors: the tensors of the call.
            source: gives the values of a range that this rank has.

        Returns:
            The ranges that this rank has, and those that it receives as bytes, [n].
        """
        rank = self._axis.rank

        def num_bytes(move: Send) -> int:
            return move.span.size * tensors[plan.parts[move.item].parameter].dtype.itemsize

        here = [(move, source(move)) for move in trip.moves if move.source == rank]
        found = [(move, values) for move, values in here if move.target == rank]
        if trip.label:
            sent = [(move.target, values) for move, values in here if move.target != rank]
            moves_here = [move for move in trip.moves if move.source != rank]
            expected = [(move.source, num_bytes(move)) for move in moves_here]
            found += zip(moves_here, all_to_all(self._axis, sent, expected, label=trip.label), strict=True)
        return found

    def _make_plan(
        self,
        parameters: Sequence[Tensor],
        shapes: Sequence[tuple[Shape, ...]],
        costs: Sequence[tuple[int, ...]],
    ) -> _CallPlan:
        """Return the plan for a call; what ranks share is planned alike on all of them."""
        items: list[Item] = []
        parts: list[_OwnedPart] = []
        names: list[object] = []
        rank = self._axis.rank
        for number, (p, own, own_costs) in enumerate(zip(parameters, shapes, costs, strict=True)):
            layout, index, cut = place_among(self._places, p, "updates from whole parameters")
            held = [  # in the parts of all tensor ranks one after another
                layout.owned(index, at % layout.num_ranks).shifted(tp * layout.sizes[index] if cut else 0)
                for at, tp in self._ranks
            ]
            together = 1 if cut is None else len(own) or 1  # parts of tensor ranks have one owner
            start = 0
            for first in range(0, len(own), together):
                run = own[first : first + together]
                whole = Span(start, start + sum(map(math.prod, run)))
                start = whole.stop
                if not whole.size:
                    continue
                ranges = tuple(one.intersect(whole).shifted(-whole.start) for one in held)
                items.append(Item(whole.size, sum(own_costs[first : first + together]), ranges))
                parts.append(_OwnedPart(number, first, run, cut, whole.start - held[rank].start))
            names.append((name_of(p), own))
        keys = [(id(parameters[part.parameter]), part.first, part.shapes) for part in parts]
        kept = {at: owner for at, key in enumerate(keys) if (owner := self._owners.get(key)) is not None}
        owners = choose_owners(items, self._axis.size, kept)
        self._owners |= zip(keys, owners, strict=True)
        wholes = f"{len(parts)} whole tensors ({crc32(repr((names, owners)).encode()):08x})"
        spans = [item.held[rank] for item in items]
        owned = [number for number, owner in enumerate(owners) if owner == rank]
        kept_here = [Send(number, rank, rank, spans[number]) for number in owned if spans[number].size]

        def exchange(what: str, sends: Sequence[Send]) -> _Trip:
            moved = [*kept_here, *(move for move in sends if rank in (move.source, move.target))]
            label = f"all-to-all of the {what} of {wholes}" if sends else ""
            return _Trip(sorted(moved, key=lambda move: (move.source, move.target)), label)

        there, back = exchange("slices", inward(items, owners)), exchange("updates", outward(items, owners))
        return _CallPlan(parts, owned, there, back, wholes)


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
