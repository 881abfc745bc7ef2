"""Values that rest on a farther tier: they are read to where they are stepped, and written back.

Between steps a main parameter and its states are tensors at rest, which anybody may read and write. For a
part of a step, parameters and the states of a twin of the optimizer are ranges of a piece of
memory, on the device that steps; `stores/pieces.py` moves the values.

Main parameters that lie on the device anyway are stepped where they are. States that are new, or come from
elsewhere, get a place at rest after their step, side by side for each part. A large parameter is moved in
pieces, and each of its states has a place of its own (see `parts.py`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import streams
from zeroshard.comm.streams import mark_here
from zeroshard.parameters.sharded import ShardedParameter, gradient_of
from zeroshard.plan.layout import BLOCK, Span, round_up
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.unit import Unit
from zeroshard.stepping.clipping import scale_
from zeroshard.stepping.parts import Home, part_of, per_element, show
from zeroshard.stores.pieces import ALIGNMENT, HostPieces, Piece

Key = tuple[ShardedParameter, str]
"""A state: its parameter and its name."""
States = MutableMapping[Any, dict[str, Any]]
"""The states of an optimizer by parameter and name."""


class StoreHome(Home):
    """Steps the main parameters of some flat buffers that rest on a farther tier, or whose states do.

    Args:
        parts: units with buffers of theirs, each with the indices of parameters that are fetched together,
            and the ranges of a large one that are stepped by themselves; [None]: all at once.
        pieces: the pieces of memory for the tier.
        starts: the first element of each slice, counted in the whole parameter; for the time of a range it is
            the first element of the range.
    """

    def __init__(
        self,
        parts: Iterable[tuple[Unit, FlatBuffer, range, Sequence[Span | None]]],
        pieces: HostPieces,
        starts: MutableMapping[ShardedParameter, int],
    ) -> None:
        self._pieces, self._starts = pieces, starts
        self._parcels_of: dict[ShardedParameter, list[_StepParcel]] = {}
        numbers: Counter[str] = Counter()
        for unit, buffer, indices, ranges in parts:
            wholes: dict[str, Tensor] = {}
            parcels = [_StepParcel(unit, buffer, indices, pieces, one, wholes) for one in ranges]
            self._parcels_of |= {buffer.sharded[index]: parcels for index in indices}
            numbers[buffer.unit_name] += len(parcels)
        self._num_ahead = max((num for unit, num in numbers.items() if unit), default=1)
        """The parcels of a unit, but for the root: those of the next one are read while this one computes."""

    def expect(
        self, parts: Sequence[Sequence[ShardedParameter]], gradients: Mapping[ShardedParameter, Tensor]
    ) -> None:
        """Begin to read the first part; each later one is read while the part before it is stepped.

        Args:
            parts: the parameters that are fetched together, in their probable order. Others may come, too.
            gradients: their gradients, which are read along with them if they lie on the host.
        """
        parcels = [parcel for part in parts for parcel in self._parcels(part)]
        for parcel in parcels:
            parcel.bring(gradients)
        is_first = not all(one.state_places for one in parcels if one.size)  # they will need more memory
        self._pieces.expect(parcels, 1 if is_first else self._num_ahead)

    def num_pieces(self, parameters: Sequence[ShardedParameter]) -> int:
        """Return the number of pieces in which a part is stepped."""
        return max(1, len(self._parcels(parameters)))

    @contextmanager
    def fetched(
        self, stepped: Optimizer, parameters: Sequence[ShardedParameter], number: int
    ) -> Iterator[None]:
        """Hold values, gradients and states where they are stepped; write them back at the end.

        The optimizer gets a dict of states of its own. After an exception nothing is written back.

        Raises:
            RuntimeError: a file could not be read or written; the message names the folder.
        """
        if not (parcels := self._parcels(parameters)):
            yield
            return
        parcel, states = parcels[number], stepped.state
        # torch wants these counters on the device of their parameters.
        counting = [group for group in stepped.param_groups if group.get("fused") or group.get("capturable")]
        counts = {p for group in counting for p in group["params"]}
        try:
            piece = self._pieces.fetch(parcel)
            stepped.state = near = parcel.hold(piece.memory, states, self._starts, counts)
            store, before = parcel.buffer.store, parcel.buffer.store.version
            yield
            with torch.no_grad():
                written = parcel.pack(piece.memory, near, states)
                with self._pieces.streams.to_host.here():
                    store.follow_copies()
                with self._pieces.writing(written, piece):
                    if parcel.main:
                        store.stepped(parcel.main_in(piece.memory), parcel.start, before)
        except BaseException:
            self._pieces.join()
            mark_here(self._pieces.memory.device).synchronize()  # it may read states and gradients there
            raise
        finally:
            stepped.state = states
            parcel.release(self._starts)

    def end_step(self) -> None:
        """End the writes to files; copies to the host may be under way.

        Raises:
            RuntimeError: a part could not be written; the message names the folder.
        """
        self._pieces.end_writes()

    def wait(self) -> None:
        """Let the host wait until all parts are at rest."""
        self._pieces.wait()

    def _parcels(self, parameters: Sequence[ShardedParameter]) -> list[_StepParcel]:
        """The parcels of a part: one, or one for each range of a parameter; none if it does not travel."""
        return self._parcels_of.get(parameters[0], []) if parameters else []


class _StepParcel:
    """Main parameters that lie side by side in a flat buffer, and their states: two places.

    The parcel of a range has a range of one parameter, and of each of its states: a place each.

    Args:
        pieces: the pieces of memory for the tier.
        within: the range of a large parameter that it has; None: it has all of its parameters.
        wholes: the states of a parameter in ranges, at rest; all of its parcels have the same dict.
    """

    def __init__(
        self,
        unit: Unit,
        buffer: FlatBuffer,
        indices: range,
        pieces: HostPieces,
        within: Span | None,
        wholes: dict[str, Tensor],
    ) -> None:
        self.buffer, self._pieces, self._range, self._wholes = buffer, pieces, within, wholes
        self._unit, self._own = unit, slice(None) if within is None else within.slice
        own = {buffer.sharded[index]: buffer.sharded_span(index) for index in indices}
        spans = {p: span if within is None else within.shifted(span.start) for p, span in own.items()}
        is_whole = len(indices) == len(buffer.sharded) and within is None
        filled = [span for span in spans.values() if span.size]
        self.start = 0 if is_whole else min((span.start for span in filled), default=0)
        """The first element, counted in the main parameters of the buffer."""
        stop = buffer.main.numel() if is_whole else max((span.stop for span in filled), default=0)
        self._main = buffer.main[self.start : stop]
        self.main = [] if buffer.store.is_near else [self._main.data.view(torch.uint8)]
        """The place of the main parameters; none if they are stepped where they are."""
        self._at_rest = {p: buffer.main[span.slice] for p, span in own.items()}
        """The main parameters of each parameter, all ranges of them."""
        self._span_of = {
            p: span.shifted(-self.start).slice if span.size else slice(0, 0) for p, span in spans.items()
        }
        """The elements of each parameter, counted from the first one here."""
        self.state_places: list[Tensor] = []
        """The places of states."""
        self._spans: list[slice] = []
        """The ranges of bytes of all places in a piece."""
        self._places: dict[Key, tuple[int, int, Tensor]] = {}
        """Of each state the number of its place, its first byte there, and its tensor at rest."""
        self._held: set[Key] = set()
        """The states of the step under way that were read from their places."""
        self._brought: list[tuple[Tensor, Tensor]] = []
        """Gradients on the host that travel along with the values, and the part of each that does, uint8."""
        self._gradients: dict[ShardedParameter, Tensor | None] = {}
        """The gradients as they were, while parameters show other values."""

    @property
    def size(self) -> int:
        """The elements of its main parameters."""
        return self._main.numel()

    def lay_out(self) -> int:
        """Give each place a range of a piece; return the bytes of all."""
        self._spans, at = [], 0
        for rest in (*self.main, *self.state_places, *(part for _, part in self._brought)):
            start = round_up(at, self._pieces.alignment) + int(rest.storage_offset()) % self._pieces.alignment
            at = start + rest.nbytes
            self._spans.append(slice(start, at))
        return at

    def places(self) -> list[tuple[Tensor, slice]]:
        """The places at rest, each with its range in a piece."""
        return list(zip((*self.main, *self.state_places), self._spans, strict=False))

    def bring(self, gradients: Mapping[ShardedParameter, Tensor]) -> None:
        """Let gradients that lie on the host travel along with the values."""
        pieces = self._pieces
        travel = self.main and pieces.is_direct and streams.has_streams(pieces.memory.device)
        found = [gradients[p] for p in self._span_of if travel and p in gradients]
        self._brought = [(one, one[self._own].view(torch.uint8)) for one in found if one.stride() == (1,)]

    def sources(self, piece: Piece) -> list[tuple[Tensor, slice]]:
        """As `places`, and gradients; main parameters come from where they are gathered, if they are."""
        found = self.places()
        found += zip((part for _, part in self._brought), self._spans[len(found) :], strict=True)
        lends = self.main and self._pieces.is_direct
        near = self._unit.lend(self.buffer, piece.follow_read) if lends else None
        if near is not None:
            found[0] = near[self.start :][: self.size].view(torch.uint8), found[0][1]
        return found

    def main_in(self, memory: Tensor) -> Tensor:
        """The main parameters in a piece, [n]."""
        return memory[self._spans[0]].view(self._main.dtype)

    def hold(
        self, memory: Tensor, states: States, starts: MutableMapping[ShardedParameter, int], counts: set[Any]
    ) -> defaultdict[Any, dict[str, Any]]:
        """Let parameters show where they are stepped; return their states there.

        Args:
            memory: the memory of the piece, with the values of its places.
            states: the states at rest.
            starts: the first element of each slice in the whole parameter; it becomes that of the range.
            counts: the parameters whose counters of steps lie with them.
        """
        self._held.clear()
        spans = self._spans[len(self.main) + len(self.state_places) :]
        brought = {id(g): memory[s].view(g.dtype) for (g, _), s in zip(self._brought, spans, strict=True)}
        for p, span in self._span_of.items() if self.main or self._range is not None else ():
            self._gradients[p] = gradient = gradient_of(p)
            starts[p] += 0 if self._range is None else self._range.start
            if gradient is not None:
                near = brought.get(id(gradient))
                gradient = self._pieces.near(gradient[self._own]) if near is None else near
                if self.main and p.state.factor is not None:  # else it was scaled on the device
                    scale_([gradient], p.state.factor)
            show(p, self.main_in(memory)[span] if self.main else self._main, gradient)
        held = defaultdict[Any, dict[str, Any]](dict)
        for p in self._span_of:
            for name, value in states[p].items() if p in states else ():
                held[p][name] = self._near(memory, (p, name), value, p in counts)
        return held

    def _near(self, memory: Tensor, key: Key, value: Any, counts: bool) -> Any:
        """A state where it is stepped."""
        size = self._at_rest[key[0]].numel()
        if not isinstance(value, Tensor):
            return value
        if per_element(value, size) is None:
            own = value if self._range is None else value.clone()  # each range counts from the same number
            return self._pieces.near(own) if value.dim() or counts else own
        part = value if self._range is None else part_of(value, self._range, size)
        is_ours = self._range is None or value is self._wholes.get(key[1])
        if is_ours and key in self._places and part.data_ptr() == self._places[key][2].data_ptr():
            self._held.add(key)
            return self._in_piece(memory, key)
        self._pieces.memory.fetch(value)
        return self._pieces.near(part.contiguous())

    def _in_piece(self, memory: Tensor, key: Key) -> Tensor:
        """A state that has a place, in a piece."""
        place, start, resting = self._places[key]
        return _over(memory, self._spans[place].start + start, resting)

    def release(self, starts: MutableMapping[ShardedParameter, int]) -> None:
        """Let parameters show their values at rest."""
        gradients, self._gradients, self._brought = self._gradients, {}, []
        for p, gradient in gradients.items():
            show(p, self._at_rest[p], gradient)
            starts[p] -= 0 if self._range is None else self._range.start

    def pack(self, memory: Tensor, near: States, states: States) -> list[tuple[Tensor, slice]]:
        """Put states that are not in `memory` into their ranges there, or to a new place at rest.

        Args:
            memory: the memory of the piece.
            near: the states where they were stepped.
            states: the states at rest, which get what is new; of a parameter in ranges with the last one.

        Returns:
            The places that are to be written: of main parameters if they travel and, unless they have got a
            new place, of states.
        """
        present = {
            (p, name): value
            for p, state in near.items()
            for name, value in state.items()
            if per_element(value, p.numel()) is not None
        }
        written = self.places()
        if present.keys() == self._held and all(
            _is_alike(value, self._places[key][2]) for key, value in present.items()
        ):
            for key, value in present.items():
                if value.data_ptr() != (target := self._in_piece(memory, key)).data_ptr():
                    target.copy_(value)
        else:
            mark_here(self._pieces.memory.device).synchronize()  # it has read the places that go
            del written[len(self.main) :]
            self.state_places, self._places = [], {}
            if self._range is None:
                self._move(present)
            else:
                self._write(present, states)
        for p, state in near.items():
            if self._range is None or self._range.stop == self._at_rest[p].numel():
                resting = {name: self._resting((p, name)) for name in state if (p, name) in present}
                own = state | resting
                states[p].clear()  # code of the user may hold it
                states[p].update(own)
        return written

    def _resting(self, key: Key) -> Tensor:
        """A state at rest, all ranges of it."""
        return self._places[key][2] if self._range is None else self._wholes[key[1]]

    def _move(self, present: Mapping[Key, Tensor]) -> None:
        """Write states to a new place, side by side."""
        if not present:
            return
        starts, end = {}, 0
        for key, value in present.items():
            starts[key] = end
            end += round_up(value.nbytes, ALIGNMENT)
        place = self._pieces.empty(round_up(end, self._pieces.alignment), torch.uint8)
        self._pieces.memory.fill(place, [(starts[key], value) for key, value in present.items()])
        self.state_places = [place]
        self._places = {
            key: (len(self.main), starts[key], _over(place, starts[key], value))
            for key, value in present.items()
        }

    def _write(self, present: Mapping[Key, Tensor], states: States) -> None:
        """Write states of a range to their part of the whole ones, which the first range makes."""
        assert self._range is not None
        memory = self._pieces.memory
        for (p, name), value in present.items():
            size = self._at_rest[p].numel()
            num = size if value.shape[-1] == self._range.size else -(-size // BLOCK)
            shape, whole = (*value.shape[:-1], num), self._wholes.get(name)
            is_there = whole is not None and (whole.shape, whole.dtype) == (shape, value.dtype)
            if not self._range.start and not (is_there and states.get(p, {}).get(name) is whole):
                self._wholes[name] = self._pieces.empty(math.prod(shape), value.dtype).view(shape)
            target = part_of(self._wholes[name], self._range, size)
            if target.dim() > 1:
                target.copy_(value)
            else:
                memory.fill(target.view(torch.uint8), [(0, value)])
                self._places[p, name] = (len(self.main) + len(self.state_places), 0, target)
                self.state_places.append(target.view(torch.uint8))


def _is_alike(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and value.dtype == other.dtype


def _over(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A view of bytes from `start` on, with the dtype and shape of another tensor."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
