"""Steps of units in files that are taken in pieces, because buffers of their size would be too large.

    part       the parameters of one unit
    piece      ranges of their slices: step, step, ... over the files, through the page cache
    at rest    tensors over the files, before and after

For each piece the optimizer sees the same parameters with fewer elements: ranges of their values, gradients
and states. Before each piece but the first, counters and other states without elements get their values of
before the step. So an optimizer that steps each element by itself gives the same bits as in one step. Pieces
are not read into buffers: they are stepped where they lie, and the system reads the next one ahead. Only the
pages of one piece are in use at a time.

The system writes pages later, and a failure would show nowhere. So the files are flushed after each step, and
the next step waits for that.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.gradient import gradient_of, set_gradient
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan import pieces
from zeroshard.plan.layout import BLOCK
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.stepping.parts import Parts
from zeroshard.stepping.twin import twin_of
from zeroshard.tiers.files import Transfer
from zeroshard.tiers.places import TierMemory


class _Place(NamedTuple):
    """The place of a parameter at rest."""

    buffer: FlatBuffer
    start: int
    """Its first element in the main parameters of the buffer."""
    size: int

    @property
    def values(self) -> Tensor:
        """Its main parameters in the files, [size]."""
        return self.buffer.main[self.start : self.start + self.size]


class _Held(NamedTuple):
    """The state of a parameter from before its first piece on."""

    gradient: Tensor
    """[size]"""
    start: int
    """The first element of the slice, counted in the whole parameter."""
    files: dict[str, Tensor]
    """States with values for each element or block, in the files."""
    new: dict[str, Tensor]
    """The same for states that this step makes."""
    others: dict[str, Any] | None
    """Copies of other states; None if the parameter had no state."""


class PieceTier:
    """Holds pieces of the main parameters of some flat buffers that lie in files.

    Args:
        buffers: the buffers of the units that are stepped in pieces.
        memory: the memory of the rank.
        starts: the first element of each slice, counted in the whole parameter; for the time of a piece it is
            that of the piece.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        memory: TierMemory,
        starts: MutableMapping[ShardedParameter, int],
    ) -> None:
        self._memory, self._starts = memory, starts
        self._places: dict[ShardedParameter, _Place] = {}
        for buffer in buffers:
            for index, parameter in enumerate(buffer.sharded):
                span = buffer.sharded_span(index)
                self._places[parameter] = _Place(buffer, span.start, span.size)
        self._flush = Transfer(())
        self._has_stepped = False

    def expect(self, parts: Sequence[Sequence[ShardedParameter]]) -> None:
        """Wait until the pages of the last step are in the files.

        Raises:
            RuntimeError: they could not be written; the message names the file. Every use of these values
                raises the error again until they are written anew, as by a load.
        """
        flush, self._flush = self._flush, Transfer(())
        if flush.join():
            for buffer in {place.buffer for place in self._places.values()}:
                self._memory.has_failed(buffer.main, flush)
        flush.wait()

    def fetched(self, parameters: Sequence[ShardedParameter]) -> AbstractContextManager[None]:
        """Fetch nothing: `of` does so for each piece."""
        return nullcontext()

    def end_step(self) -> None:
        """Begin to flush the files."""
        if self._has_stepped:
            self._flush, self._has_stepped = self._memory.swap.flush(), False

    def has(self, parameters: Sequence[ShardedParameter]) -> bool:
        """True if these are the parameters of a unit that is stepped in pieces."""
        return any(p in self._places for p in parameters)

    def of(
        self, parameters: Sequence[ShardedParameter], states: MutableMapping[Any, dict[str, Any]]
    ) -> Generator[list[ShardedParameter], None, None]:
        """Yield the parameters of each piece while they have its elements alone.

        Raises:
            RuntimeError: values are lost; the message names the file.
        """
        places = [self._places[p] for p in parameters]
        itemsize = max(place.buffer.plan.main_dtype.itemsize for place in places)
        cuts = pieces.cut([place.size for place in places], max(BLOCK, pieces.PIECE_BYTES // itemsize))
        held: dict[ShardedParameter, _Held] = {}
        whole: set[ShardedParameter] = set()
        """Parameters whose pieces have all been stepped."""
        self._put_into_files(set(self._places) - set(parameters), states)
        try:
            for number, together in enumerate(cuts):
                for piece in together:
                    p = parameters[piece.parameter]
                    if piece.start == 0:
                        held[p] = self._hold(p, states)
                    self._narrow(p, held[p], piece, states)
                for piece in cuts[number + 1] if number + 1 < len(cuts) else ():
                    self._read_ahead(parameters[piece.parameter], held, piece)
                yield [parameters[piece.parameter] for piece in together]
                for piece in together:
                    p = parameters[piece.parameter]
                    self._put_back(p, held, piece, states)
                    if piece.stop == self._places[p].size:
                        whole.add(p)
            self._has_stepped = True
        finally:
            for p, before in held.items():
                self._rest(p, before, states, is_whole=p in whole)

    def _hold(self, p: ShardedParameter, states: Mapping[Any, dict[str, Any]]) -> _Held:
        """Note the state of a parameter; states of elements that are elsewhere are put into files."""
        gradient = gradient_of(p)
        assert gradient is not None, "it is stepped because of it"
        files: dict[str, Tensor] = {}
        others: dict[str, Any] | None = None
        if p in states:
            size, others = self._places[p].size, {}
            for name, value in states[p].items():
                if _per_element(value, size) is None:
                    others[name] = value.clone() if isinstance(value, Tensor) else value
                else:
                    files[name] = self._in_files(value)
        return _Held(gradient, self._starts.get(p, 0), files, {}, others)

    def _put_into_files(
        self, parameters: set[ShardedParameter], states: Mapping[Any, dict[str, Any]]
    ) -> None:
        """Put states of elements that are elsewhere into files; these parameters have no gradient now."""
        for p in parameters & states.keys():
            for name, value in states[p].items():
                if _per_element(value, self._places[p].size) is not None:
                    states[p][name] = self._in_files(value)

    def _read_ahead(
        self, p: ShardedParameter, held: Mapping[ShardedParameter, _Held], piece: pieces.StepPiece
    ) -> None:
        place = self._places[p]
        self._memory.fetch(place.values[piece.start : piece.stop])
        for whole in held[p].files.values() if p in held else ():
            if whole.dim() == 1:
                self._memory.fetch(_part(whole, piece, place.size))

    def _in_files(self, value: Tensor) -> Tensor:
        if self._memory.is_in_files(value):
            return value
        found = self._new(value.shape, value.dtype).copy_(value)
        self._memory.rest(found)
        return found

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._memory.empty(torch.Size(shape).numel(), dtype, Tier.DISK).view(shape)

    def _narrow(
        self,
        p: ShardedParameter,
        held: _Held,
        piece: pieces.StepPiece,
        states: MutableMapping[Any, dict[str, Any]],
    ) -> None:
        """Show the optimizer the elements of one piece."""
        place = self._places[p]
        if place.size:
            self._memory.check(place.buffer.main)
        _show(p, place.values[piece.start : piece.stop], held.gradient[piece.start : piece.stop])
        if p in self._starts:
            self._starts[p] = held.start + piece.start
        if held.others is None:
            if piece.start:
                states.pop(p, None)  # it begins with each piece
            return
        state = states[p]
        for name in held.new:
            state.pop(name, None)
        for name, value in held.others.items():
            state[name] = value.clone() if isinstance(value, Tensor) else value
        for name, whole in held.files.items():
            self._memory.check(whole)
            state[name] = _part(whole, piece, place.size).contiguous()

    def _put_back(
        self,
        p: ShardedParameter,
        held: Mapping[ShardedParameter, _Held],
        piece: pieces.StepPiece,
        states: Mapping[Any, dict[str, Any]],
    ) -> None:
        """Write the values of a piece into the files, where they are not there already."""
        place, files, new = self._places[p], held[p].files, held[p].new
        values = place.values[piece.start : piece.stop]
        for name, value in states[p].items() if p in states else ():
            length = _per_element(value, piece.stop - piece.start)
            if length is None:
                continue
            if name not in files and name not in new:
                ratio = 1 if length == piece.stop - piece.start else BLOCK
                new[name] = self._new((*value.shape[:-1], -(-place.size // ratio)), value.dtype)
            whole = files[name] if name in files else new[name]
            target = _part(whole, piece, place.size)
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
            self._memory.rest(whole)
        if values.numel():
            place.buffer.source.stepped(values, place.start + piece.start)
            self._memory.rest(values)

    def _rest(
        self, p: ShardedParameter, held: _Held, states: MutableMapping[Any, dict[str, Any]], *, is_whole: bool
    ) -> None:
        """Show all elements again; after an exception without new states, which some pieces do not have."""
        _show(p, self._places[p].values, held.gradient)
        if p in self._starts:
            self._starts[p] = held.start
        if is_whole:
            if held.files or held.new:
                states[p].update(held.files | held.new)
        elif held.others is None:
            states.pop(p, None)
        else:
            states[p] = held.others | held.files


class PieceParts(Parts):
    """Steps units in pieces where a tier asks for it. Arguments as `Parts` has them.

    Args:
        pieces: the tier of these units, one of `tiers`.
    """

    def __init__(self, *args: Any, pieces: PieceTier, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces = pieces

    def _step_part(self, optimizer: Optimizer, part: list[ShardedParameter]) -> None:
        if not self._pieces.has(part):
            super()._step_part(optimizer, part)
            return
        with closing(self._pieces.of(part, optimizer.state)) as all_pieces:  # ends at once after an exception
            for present in all_pieces:
                chosen = set(present)
                groups = [[p for p in group["params"] if p in chosen] for group in optimizer.param_groups]
                super()._step_part(twin_of(optimizer, groups), present)


def _show(p: ShardedParameter, values: Tensor, gradient: Tensor) -> None:
    set_gradient(p, None)  # torch wants one of the same shape
    with past_guards():
        p.data = values
    set_gradient(p, gradient)


def _per_element(value: Any, size: int) -> int | None:
    """The last dimension of a state with a value for each element or block of a slice; None for others."""
    if not isinstance(value, Tensor) or not value.dim() or not value.numel():
        return None
    length = value.shape[-1]
    return length if length in (size, -(-size // BLOCK)) else None


def _part(whole: Tensor, piece: pieces.StepPiece, size: int) -> Tensor:
    """The part of a state that belongs to a piece."""
    ratio = 1 if whole.shape[-1] == size else BLOCK
    return whole[..., piece.start // ratio : -(-piece.stop // ratio)]
