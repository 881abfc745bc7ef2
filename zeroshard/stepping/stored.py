"""Values that rest on a farther tier: they are read to where they are stepped, and written back.

    read      unit 2           unit 3           unit 4
    step               unit 1           unit 2           unit 3
    write              unit 0           unit 1           unit 2

Between steps a main parameter and its states are tensors at rest, which anybody may read and write. For its
part of a step they are views of one of three pieces of memory. A `Store` knows the places at rest and the
pieces, and moves values between them:

    HostStore    from pinned memory of the host to pieces on the device, which steps. Copies run on a stream
                 for each direction, and compute alone waits for them. The host waits at the end of the step.
                 Main parameters that lie on the device anyway are stepped where they are
    FileStore    from files to pieces in host memory, past the page cache; the host steps and waits

States that are new, or come from elsewhere, get a place at rest after their step, side by side for each flat
buffer. A large parameter on the host is moved in pieces, and each of its states has a place of its own (see
`parts.py`). A unit in files that is much larger than the others is stepped at rest.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import moves
from zeroshard.comm.streams import Mark, Streams, mark_here
from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan.layout import Span, round_up
from zeroshard.plan.pieces import StepPiece
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.stepping.parts import Home, per_element, pieces_of, show
from zeroshard.tiers.files import Extent, FileTransfer
from zeroshard.tiers.places import TierMemory

NUM_PIECES = 3
"""Pieces of memory: one is read, one is stepped, one is written."""
_ALIGNMENT = 64
"""Bytes: each value in a piece begins at a multiple, for loads of vectors."""

Key = tuple[ShardedParameter, str]
"""A state: its parameter and its name."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A place of values at rest."""

    values: Tensor
    """uint8, [bytes]"""
    extent: Extent | None = None
    """Its extent in the files."""

    @property
    def padded(self) -> int:
        """Bytes that are moved."""
        return self.values.nbytes if self.extent is None else self.extent.padded


class Piece:
    """Memory in which a part is stepped, with the copies and transfers that use it."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.transfers: list[FileTransfer] = []
        self.copies: list[Mark] = []

    def join(self) -> list[FileTransfer]:
        """Let the host wait for copies and transfers; return the transfers without their errors."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.synchronize()
        transfers, self.transfers = self.transfers, []
        for transfer in transfers:
            transfer.join()
        return transfers

    def wait(self) -> None:
        """Let the host wait; raise the error of the first transfer that failed, after all have ended."""
        for transfer in self.join():
            transfer.wait()

    def divide(self, blocks: Sequence[_Block]) -> list[Tensor]:
        """The memory of each block."""
        sizes = [block.size for block in blocks]
        return list(self.memory[: sum(sizes)].split(sizes))


class Store(ABC):
    """Places at rest on one tier, and the way to the pieces.

    Args:
        memory: the memory of the rank.
    """

    def __init__(self, memory: TierMemory) -> None:
        self._memory, self.device = memory, memory.device

    @abstractmethod
    def place_of(self, main: Tensor) -> Place:
        """Return the place of main parameters."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Place:
        """Return a new place."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[None]:
        """Return the context in which pieces are made ready and values are read."""

    @abstractmethod
    def ready(self, piece: Piece) -> None:
        """Let nobody use a piece before the copies and transfers so far have ended."""

    @abstractmethod
    def reserve(self, piece: Piece, num_bytes: int) -> None:
        """Make a piece as large as that, in the context of `reading`."""

    @abstractmethod
    def read(self, place: Place, into: Tensor, piece: Piece) -> None:
        """Start to read, in the context of `reading`."""

    @abstractmethod
    def write(self, block: _Block, values: Sequence[tuple[Place, Tensor]], piece: Piece) -> None:
        """Start to write main parameters, the first of `values` if they travel, and states."""

    def near(self, value: Tensor) -> Tensor:
        """Return a gradient, or a state that is at no place of the store, where its parameter is stepped."""
        return value

    @abstractmethod
    def fill(self, place: Place, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Write states to a place that is new, each from a byte of it on; the host waits."""


class FileStore(Store):
    """Files; the host steps in memory of its own, and waits for reads and writes."""

    def place_of(self, main: Tensor) -> Place:
        """Return the place of main parameters."""
        extent = self._memory.swap.extent_of(main)
        assert extent is not None, "its plan says that it lies in files"
        return Place(main, extent)

    def allocate(self, num_bytes: int) -> Place:
        """Return a new place.

        Raises:
            RuntimeError: the disks are full.
        """
        swap = self._memory.swap
        extent = swap.allocate(num_bytes)
        return Place(swap.map(extent), extent)

    def reading(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def ready(self, piece: Piece) -> None:
        """Let the host wait; raise the error of the first transfer that failed, after all have ended."""
        piece.wait()

    def reserve(self, piece: Piece, num_bytes: int) -> None:
        """Make a piece as large as that."""
        if piece.memory.numel() < num_bytes:
            self._memory.staging_bytes += num_bytes - piece.memory.nbytes
            piece.memory = piece.memory.new_empty(0)  # before the larger one is taken
            piece.memory = self._memory.host(num_bytes)

    def read(self, place: Place, into: Tensor, piece: Piece) -> None:
        """Start to read."""
        assert place.extent is not None, "it is in files"
        piece.transfers.append(self._memory.swap.read(place.extent, into))

    def write(self, block: _Block, values: Sequence[tuple[Place, Tensor]], piece: Piece) -> None:
        """Start to write, and to copy main parameters to the device."""
        piece.copies.append(block.buffer.source.stepped(block.main_in(values[0][1])))
        for place, part in values:
            assert place.extent is not None, "it is in files"
            piece.transfers.append(self._memory.swap.write(place.extent, part))

    def fill(self, place: Place, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Write states into the files.

        Raises:
            RuntimeError: the disk fails; the message names the file.
        """
        assert place.extent is not None, "it is in files"
        values = self._memory.host(place.padded)
        for start, value in parts:
            _over(values, start, value).copy_(value)
            self._memory.evict(value)
        self._memory.swap.write(place.extent, values).wait()


class HostStore(Store):
    """Pinned memory of the host; the device steps, and the host waits for nothing in between.

    Args:
        memory: the memory of the rank.
        streams: the side streams of the engine.
    """

    def __init__(self, memory: TierMemory, streams: Streams) -> None:
        super().__init__(memory)
        self._streams = streams

    def place_of(self, main: Tensor) -> Place:
        """Return the place of main parameters."""
        return Place(main.data.view(torch.uint8))  # `Source` hears of writes, which count no version

    def allocate(self, num_bytes: int) -> Place:
        """Return a new place.

        Raises:
            RuntimeError: there is no such memory.
        """
        return Place(self._memory.host(num_bytes))

    def reading(self) -> AbstractContextManager[None]:
        """Return the context of the stream of copies to the device, after all compute so far."""
        return self._streams.to_device.after_compute()

    def ready(self, piece: Piece) -> None:
        """Let the current stream wait."""
        copies, piece.copies = piece.copies, []
        for copy in copies:
            copy.wait()

    def reserve(self, piece: Piece, num_bytes: int) -> None:
        """Make a piece as large as that."""
        if piece.memory.numel() < num_bytes:
            self._memory.piece_bytes += num_bytes - piece.memory.nbytes
            piece.memory = piece.memory.new_empty(0)  # before the larger one is taken
            piece.memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.device)

    def read(self, place: Place, into: Tensor, piece: Piece) -> None:
        """Start to copy to the device."""
        into.copy_(place.values, non_blocking=True)
        piece.copies.append(self._streams.to_device.mark())

    def write(self, block: _Block, values: Sequence[tuple[Place, Tensor]], piece: Piece) -> None:
        """Start to copy to the host, after the copies out of the main parameters that were started."""
        with self._streams.to_host.after_compute():
            block.buffer.source.follow_copies()
            for place, part in values:
                place.values.copy_(part, non_blocking=True)
            if block.main is not None:
                block.buffer.source.stepped(block.main_in(values[0][1]), block.start)
        piece.copies.append(self._streams.to_host.mark())

    def near(self, value: Tensor) -> Tensor:
        """Return it on the device, by a copy on the current stream."""
        return moves.to_device(value, self._memory.device)

    def fill(self, place: Place, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Copy states to the host."""
        with self._streams.to_host.after_compute():
            for start, value in parts:
                _over(place.values, start, value).copy_(value, non_blocking=True)
        self._streams.to_host.mark().synchronize()


class StoreHome(Home):
    """Steps the main parameters of some flat buffers that rest on a farther tier.

    Args:
        optimizer: the optimizer that steps them.
        ranges: the buffers, each with the indices of parameters that are fetched together.
        store: the store of the tier.
    """

    def __init__(
        self, optimizer: Optimizer, ranges: Iterable[tuple[FlatBuffer, range]], store: Store
    ) -> None:
        self._store, self._optimizer = store, weakref.ref(optimizer)
        self._blocks_of: dict[ShardedParameter, list[_Block]] = {}
        for buffer, indices in ranges:
            blocks = [_Block(buffer, indices, store, piece) for piece in pieces_of(buffer, indices)]
            self._blocks_of |= {buffer.sharded[index]: blocks for index in indices}
        self._parts: list[list[_Block]] = []
        """The blocks of the parts that are expected, and were not fetched yet."""
        self._counting: set[Any] = set()
        """The parameters whose counters of steps lie with them, in the step under way."""
        self._pieces = [Piece() for _ in range(NUM_PIECES)]
        self._ahead: tuple[list[_Block], Piece] | None = None
        """The blocks that are read ahead of their step, and where."""

    def expect(self, parts: Sequence[Sequence[ShardedParameter]]) -> None:
        """Begin to read the first part; each later one is read while the part before it is stepped.

        Args:
            parts: the parameters that are fetched together, in their probable order. Others may come, too.
        """
        self._wait()  # of steps before
        optimizer = self._optimizer()
        assert optimizer is not None, "it takes a step"
        # torch wants these counters on the device of their parameters.
        self._counting = {
            p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]
        }
        self._parts = [blocks for part in parts for blocks in self._blocks(part)]
        self._read_ahead()

    @contextmanager
    def fetched(self, parameters: Sequence[ShardedParameter]) -> Iterator[None]:
        """Hold parameters and states where they are stepped; write them back at the end.

        After an exception nothing is written back.

        Raises:
            RuntimeError: a file could not be read or written; the message names it.
        """
        optimizer, found = self._optimizer(), self._blocks(parameters)
        assert optimizer is not None, "it takes a step"
        if not found:
            yield
            return
        blocks = found[0] if len(found) == 1 else next(b for b in found if b[0].is_shown_by(parameters[0]))
        try:
            piece = self._fetch(blocks)
            parts = piece.divide(blocks)
            for block, memory in zip(blocks, parts, strict=True):
                block.hold(memory, optimizer.state, self._counting)
            yield
            with torch.no_grad():
                for block, memory in zip(blocks, parts, strict=True):
                    self._store.write(block, block.pack(memory, optimizer.state), piece)
        except BaseException:
            self._join()
            mark_here(self._store.device).synchronize()  # it may read states and gradients on the host
            raise
        finally:
            for block in blocks:
                block.release(optimizer.state)

    def end_step(self) -> None:
        """Let the host wait until all parts are at rest.

        Raises:
            RuntimeError: a part could not be written; the message names the file.
        """
        self._wait()

    def _fetch(self, blocks: list[_Block]) -> Piece:
        """Wait for the blocks of a part, and begin to read the blocks of the part that is expected next."""
        if self._ahead is None or self._ahead[0] != blocks:
            self._ahead = self._read(blocks)
        (_, piece), self._ahead = self._ahead, None
        self._store.ready(piece)
        if blocks in self._parts:
            del self._parts[: self._parts.index(blocks) + 1]
        self._read_ahead()
        return piece

    def _wait(self) -> None:
        if self._ahead is not None:
            self._ahead[1].join()  # nobody needs what was read, nor its error
        self._parts, self._ahead = [], None
        try:
            for piece in self._pieces:
                piece.wait()
        except BaseException:
            self._join()
            raise

    def _join(self) -> None:
        """End all transfers. Reads of an extent whose write has failed will raise its error."""
        self._parts, self._ahead = [], None
        for piece in self._pieces:
            piece.join()

    def _blocks(self, parameters: Sequence[ShardedParameter]) -> list[list[_Block]]:
        """The blocks that are fetched together: one list, or one for each piece of a parameter."""
        found = zip(*(self._blocks_of[p] for p in parameters if p in self._blocks_of), strict=True)
        return [list(dict.fromkeys(blocks)) for blocks in found]

    def _read_ahead(self) -> None:
        if self._parts:
            self._ahead = self._read(self._parts[0])

    def _read(self, blocks: list[_Block]) -> tuple[list[_Block], Piece]:
        """Start to read blocks into the piece that was used longest ago."""
        piece = self._pieces.pop(0)
        self._pieces.append(piece)
        with torch.no_grad(), self._store.reading():
            self._store.ready(piece)
            self._store.reserve(piece, sum(block.size for block in blocks))
            for block, memory in zip(blocks, piece.divide(blocks), strict=True):
                for place, part in block.places_in(memory):
                    self._store.read(place, part, piece)
        return blocks, piece


class _Block:
    """Main parameters that lie side by side in a flat buffer, and their states: two places.

    A block of a piece has a range of one parameter, and of each of its states: a place each.
    """

    def __init__(self, buffer: FlatBuffer, indices: range, store: Store, piece: StepPiece | None) -> None:
        self.buffer, self._store, self._piece = buffer, store, piece
        spans = [buffer.sharded_span(index) for index in indices]
        if piece is not None:
            spans = [Span(piece.start, piece.stop).shifted(spans[0].start)]
        is_whole = len(indices) == len(buffer.sharded) and piece is None
        filled = [span for span in spans if span.size]
        self.start = 0 if is_whole else min((span.start for span in filled), default=0)
        """The first element, counted in the main parameters of the buffer."""
        stop = buffer.main.numel() if is_whole else max((span.stop for span in filled), default=0)
        self._main = buffer.main[self.start : stop]
        travels = buffer.plan.main_tier is not Tier.DEVICE
        self.main = store.place_of(self._main) if travels else None
        """The place of the main parameters; None if they are stepped where they are."""
        self._states: list[Place] = []
        """The places of states."""
        self.span_of = {
            buffer.sharded[index]: span.shifted(-self.start).slice if span.size else slice(0, 0)
            for index, span in zip(indices, spans, strict=True)
        }
        """The elements of each parameter, counted from the first one here."""
        self._places: dict[Key, tuple[int, Tensor]] = {}
        """The first byte of each state in memory of a piece, and its tensor at rest."""
        self._held: dict[Key, Tensor] = {}
        """The tensors at rest of states that are where they are stepped now, or are to go back."""
        self._gradients: dict[ShardedParameter, Tensor | None] = {}
        """The gradients as they were, while parameters are views of a piece."""

    @property
    def _at_rest(self) -> list[Place]:
        return self._states if self.main is None else [self.main, *self._states]

    @property
    def size(self) -> int:
        """Bytes in a piece."""
        return sum(round_up(place.padded, _ALIGNMENT) for place in self._at_rest)

    def places_in(self, memory: Tensor) -> list[tuple[Place, Tensor]]:
        """The places of values, with their memory in a piece, side by side."""
        parts = memory[: self.size].split([round_up(place.padded, _ALIGNMENT) for place in self._at_rest])
        return [(place, part[: place.padded]) for place, part in zip(self._at_rest, parts, strict=True)]

    def is_shown_by(self, p: ShardedParameter) -> bool:
        """True if its parameter shows its values, and no other piece."""
        start = p.data_ptr() - self.buffer.main.data_ptr()
        return start == self.start * self._main.itemsize

    def main_in(self, memory: Tensor) -> Tensor:
        """The main parameters in memory of a piece, [n]."""
        return memory[: self._main.nbytes].view(self._main.dtype)

    def hold(self, memory: Tensor, states: Mapping[Any, dict[str, Any]], counting: set[Any]) -> None:
        """Make parameters and states views of a piece; and bring gradients there.

        Args:
            memory: [bytes] of uint8, with the values that were at their places.
            states: the states of the optimizer.
            counting: the parameters whose counters of steps lie with them.
        """
        for p, span in self.span_of.items():
            if self.main is not None:
                self._gradients[p] = gradient = gradient_of(p)
                near_gradient = None if gradient is None else self._store.near(gradient)
                show(p, self.main_in(memory)[span], near_gradient)
            for name, value in states[p].items() if p in states else ():
                if not isinstance(value, Tensor):
                    continue
                start, resting = self._places.get((p, name), (0, None))
                if value.dim() == 1:
                    self._held[p, name] = value.data
                if resting is not None and value.data_ptr() == resting.data_ptr():
                    value.data = _over(memory, start, resting)
                elif (value.dim() or p in counting) and (near := self._store.near(value)) is not value:
                    value.data = near

    def release(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Make parameters and states tensors at rest again; after an exception, those that were held."""
        for p, gradient in self._gradients.items():
            show(p, self._main[self.span_of[p]], gradient)
        held, self._held, self._gradients = self._held, {}, {}
        for (p, name), resting in held.items():
            value = states.get(p, {}).get(name)
            if isinstance(value, Tensor) and _is_alike(value, resting):
                value.data = resting

    def pack(self, memory: Tensor, states: Mapping[Any, dict[str, Any]]) -> list[tuple[Place, Tensor]]:
        """Put states that are not in `memory` into their places there, or to a new place at rest.

        Returns:
            The values that are to be written: main parameters if they travel and, unless they have got a new
            place, states. States of a piece that were not in `memory` are left for `PieceHome`.
        """
        present = {
            (p, name): value
            for p in self.span_of
            if p in states
            for name, value in states[p].items()
            if per_element(value, p.numel()) is not None
        }
        if self._fill(memory, present):
            self._held = {key: self._places[key][1] for key in present}
            return self.places_in(memory)
        self._states, self._places = [], {}
        written, first = self.places_in(memory), self.size
        if self._piece is None:
            resting = self._held = self._move(present, states)
        else:
            resting, self._held = {key: v for key, v in self._held.items() if key in present}, {}
            self._states = [Place(v.view(torch.uint8)) for v in resting.values()]
        starts, _ = _side_by_side(resting)
        self._places = {key: (first + starts[key], v) for key, v in resting.items()}
        return written

    def _fill(self, memory: Tensor, present: Mapping[Key, Tensor]) -> bool:
        """Copy states into their places; False, and nothing is copied, if they are others than before."""
        if present.keys() != self._places.keys():
            return False
        new: list[tuple[Tensor, Tensor]] = []
        for key, value in present.items():
            start, resting = self._places[key]
            target = _over(memory, start, resting)
            if not _is_alike(value, resting):
                return False
            if value.data_ptr() != target.data_ptr():
                if value.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                    return False  # states have changed places
                new.append((target, value))
        for target, value in new:
            target.copy_(value)
        return True

    def _move(self, present: Mapping[Key, Tensor], states: Mapping[Any, dict[str, Any]]) -> dict[Key, Tensor]:
        """Write states to a new place, side by side; return their tensors at rest."""
        starts, end = _side_by_side(present)
        place = self._store.allocate(end)
        self._store.fill(place, [(starts[key], value) for key, value in present.items()])
        for (p, name), value in present.items():
            if value._is_view():  # of a tensor that would stay in memory with it
                states[p][name] = value.data
        self._states = [place]
        return {key: _over(place.values, starts[key], value) for key, value in present.items()}


def _side_by_side(values: Mapping[Key, Tensor]) -> tuple[dict[Key, int], int]:
    """The first byte of each value where all lie one after the other, and the end."""
    starts, end = {}, 0
    for key, value in values.items():
        starts[key] = end
        end += round_up(value.nbytes, _ALIGNMENT)
    return starts, end


def _is_alike(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and value.dtype == other.dtype


def _over(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A view of bytes from `start` on, with the dtype and shape of another tensor."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
