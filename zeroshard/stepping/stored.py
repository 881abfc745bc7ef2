"""Values that rest on a farther tier: they are read to where they are stepped, and written back.

    read      part 2           part 3           part 4
    step               part 1           part 2           part 3
    write              part 0           part 1           part 2

Between steps a main parameter and its states are tensors at rest, which anybody may read and write. For their
part of a step they are ranges of one of three pieces of memory, on the device that steps. A store moves them:

    HostStore    from pinned memory of the host. Copies run on a stream for each direction, and compute alone
                 waits for them. The host waits at the end of the step
    FileStore    from files to pinned memory of the host, past the page cache, and on from there. The host
                 waits for reads

Main parameters that lie on the device anyway are stepped where they are. States that are new, or come from
elsewhere, get a place at rest after their step, side by side for each part. A large parameter is moved in
pieces, and each of its states has a place of its own (see `parts.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import moves
from zeroshard.comm.streams import Mark, Streams, mark_here
from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan.layout import Span, round_up
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.stepping.parts import Home, per_element, show
from zeroshard.tiers.files import FileTransfer
from zeroshard.tiers.places import TierMemory

NUM_PIECES = 3
"""Pieces of memory: one is read, one is stepped, one is written."""
_ALIGNMENT = 64
"""Bytes: states side by side begin at a multiple, for loads of vectors."""

Key = tuple[ShardedParameter, str]
"""A state: its parameter and its name."""
Places = Sequence[tuple[Tensor, slice]]
"""Places at rest, uint8, each with its range of bytes in a piece."""


class Piece:
    """Memory in which a part is stepped, with the copies and transfers that use it."""

    def __init__(self) -> None:
        self.memory = self.on_host = torch.empty(0, dtype=torch.uint8)
        """Of the device that steps; and of the host, between files and that device."""
        self.filled = slice(0, 0)
        """The bytes in use."""
        self.transfers: list[FileTransfer] = []
        self.copies: list[Mark] = []

    def follow(self) -> None:
        """Let the current stream wait for the copies."""
        for copy in self.copies:
            copy.wait()

    def join(self) -> str:
        """Let the host wait for copies and transfers; return the message of the first error, or ""."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.synchronize()
        transfers, self.transfers = self.transfers, []
        return next(filter(None, [transfer.join() for transfer in transfers]), "")

    def wait(self) -> None:
        """Let the host wait; raise the first error, after all transfers have ended."""
        if failure := self.join():
            raise RuntimeError(failure)


class HostStore:
    """Pinned memory of the host; the host waits for nothing in between.

    Args:
        memory: the memory of the rank.
        streams: the side streams of the engine.
    """

    tier = Tier.HOST
    alignment = _ALIGNMENT
    """A value begins at the same byte of a block of this size at rest and in a piece."""

    def __init__(self, memory: TierMemory, streams: Streams) -> None:
        self.memory, self.streams = memory, streams

    def reserve(self, piece: Piece, num_bytes: int) -> None:
        """Make a piece as large as that, when its copies and transfers so far have ended."""
        piece.follow()
        piece.copies.clear()
        if piece.memory.numel() < num_bytes:
            self.memory.piece_bytes += num_bytes - piece.memory.nbytes
            piece.memory = piece.memory.new_empty(0)  # before the larger one is taken
            piece.memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.memory.device)

    def read(self, places: Places, piece: Piece) -> None:
        """Start to read, on the stream of copies to the device."""
        for rest, span in places:
            piece.memory[span].copy_(rest, non_blocking=True)
        piece.copies.append(self.streams.to_device.mark())

    def arrive(self, piece: Piece) -> None:
        """Let the current stream wait for what was read."""
        piece.follow()

    def near(self, value: Tensor) -> Tensor:
        """Return a gradient, or a state that is at no place of the store, where its parameter is stepped."""
        return moves.to_device(value, self.memory.device)

    def write(self, block: _Block, places: Places, piece: Piece) -> None:
        """Start to write main parameters, if they travel, and states, after copies out of their places."""
        source = block.buffer.source
        with self.streams.to_host.after_compute():
            source.follow_copies()
            self._send(places, piece)
            if block.main:
                source.stepped(block.main_in(piece.memory), block.start)
        piece.copies.append(self.streams.to_host.mark())

    def _send(self, places: Places, piece: Piece) -> None:
        """Copy values to the host."""
        for rest, span in places:
            rest.copy_(piece.memory[span], non_blocking=True)


class FileStore(HostStore):
    """Files, past the page cache.

    Args:
        memory: the memory of the rank.
        streams: the side streams of the engine.
        steps_on: the tier whose memory is stepped, the host or the device.
    """

    tier = Tier.DISK

    def __init__(self, memory: TierMemory, streams: Streams, steps_on: Tier) -> None:
        super().__init__(memory, streams)
        self._steps_on = steps_on

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """Bytes of a block of the files."""
        return self.memory.swap.alignment

    def reserve(self, piece: Piece, num_bytes: int) -> None:
        """Make a piece as large as that; the host waits.

        Raises:
            RuntimeError: an earlier transfer has failed; the message names the file.
        """
        piece.wait()
        if piece.on_host.numel() < num_bytes:
            self.memory.staging_bytes += num_bytes - piece.on_host.nbytes
            piece.on_host = piece.on_host.new_empty(0)  # before the larger one is taken
            piece.memory = piece.on_host if self._steps_on is Tier.HOST else piece.memory
            piece.on_host = self.memory.host(num_bytes)
        piece.filled = slice(0, num_bytes)
        if self._steps_on is Tier.HOST:
            piece.memory = piece.on_host
        else:
            super().reserve(piece, num_bytes)

    def read(self, places: Places, piece: Piece) -> None:
        """Start to read."""
        for rest, span in places:
            piece.transfers.append(self.memory.swap.read(rest, piece.on_host[span]))

    def arrive(self, piece: Piece) -> None:
        """Let the host wait for what was read, and the current stream for the copy of it.

        Raises:
            RuntimeError: a read has failed; the message names the file.
        """
        piece.wait()
        if self._steps_on is Tier.DEVICE:
            with self.streams.to_device.here():  # compute has let go of the piece: the host has waited
                piece.memory[piece.filled].copy_(piece.on_host[piece.filled], non_blocking=True)
            piece.copies.append(self.streams.to_device.mark())
            piece.follow()

    def write(self, block: _Block, places: Places, piece: Piece) -> None:
        """Start to write; the threads of the files wait for copies from the device."""
        super().write(block, places, piece)
        for rest, span in places:
            is_there = piece.copies[-1].synchronize
            piece.transfers.append(self.memory.swap.write(rest, piece.on_host[span], is_there))

    def near(self, value: Tensor) -> Tensor:
        """Return it where its parameter is stepped."""
        if self._steps_on is Tier.DEVICE:
            return super().near(value)
        return value.clone() if self.memory.is_in_files(value) else value

    def _send(self, places: Places, piece: Piece) -> None:
        for _, span in places if self._steps_on is Tier.DEVICE else ():
            piece.on_host[span].copy_(piece.memory[span], non_blocking=True)


class StoreHome(Home):
    """Steps the main parameters of some flat buffers that rest on a farther tier.

    Args:
        optimizer: the optimizer that steps them.
        parts: the buffers, each with the indices of parameters that are fetched together, and the pieces of
            them; one that is None has all.
        store: the store of the tier.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Iterable[tuple[FlatBuffer, range, Sequence[Span | None]]],
        store: HostStore,
    ) -> None:
        self._store, self._optimizer = store, weakref.ref(optimizer)
        self._blocks_of: dict[ShardedParameter, list[_Block]] = {}
        for buffer, indices, pieces in parts:
            blocks = [_Block(buffer, indices, store, piece) for piece in pieces]
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
        self.end_step()  # of an earlier step
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
            for block in blocks:
                block.hold(piece.memory, optimizer.state, self._counting)
            yield
            with torch.no_grad():
                for block in blocks:
                    self._store.write(block, block.pack(piece.memory, optimizer.state), piece)
        except BaseException:
            self._join()
            mark_here(self._store.memory.device).synchronize()  # it may read states and gradients on the host
            raise
        finally:
            for block in blocks:
                block.release(optimizer.state)

    def _fetch(self, blocks: list[_Block]) -> Piece:
        """Wait for the blocks of a part, and begin to read the blocks of the part that is expected next."""
        if self._ahead is None or self._ahead[0] != blocks:
            self._ahead = self._read(blocks)
        (_, piece), self._ahead = self._ahead, None
        self._store.arrive(piece)
        if blocks in self._parts:
            del self._parts[: self._parts.index(blocks) + 1]
        self._read_ahead()
        return piece

    def end_step(self) -> None:
        """Let the host wait until all parts are at rest.

        Raises:
            RuntimeError: a part could not be written; the message names the file.
        """
        if self._ahead is not None:
            self._ahead[1].join()  # nobody needs what was read, nor its error
        if failure := self._join():
            raise RuntimeError(failure)

    def _join(self) -> str:
        """End all transfers; return the message of the first error, or "".

        Reads of a range whose write has failed will raise its error.
        """
        self._parts, self._ahead = [], None
        return next(filter(None, [piece.join() for piece in self._pieces]), "")

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
        with torch.no_grad(), self._store.streams.to_device.after_compute():
            end = 0
            for block in blocks:
                end = block.lay_out(end)
            self._store.reserve(piece, end)
            self._store.read([place for block in blocks for place in block.places()], piece)
        return blocks, piece


class _Block:
    """Main parameters that lie side by side in a flat buffer, and their states: two places.

    A block of a piece has a range of one parameter, and of each of its states: a place each.
    """

    def __init__(self, buffer: FlatBuffer, indices: range, store: HostStore, piece: Span | None) -> None:
        self.buffer, self._store, self._piece = buffer, store, piece
        spans = [buffer.sharded_span(index) for index in indices]
        if piece is not None:
            spans = [piece.shifted(spans[0].start)]
        is_whole = len(indices) == len(buffer.sharded) and piece is None
        filled = [span for span in spans if span.size]
        self.start = 0 if is_whole else min((span.start for span in filled), default=0)
        """The first element, counted in the main parameters of the buffer."""
        stop = buffer.main.numel() if is_whole else max((span.stop for span in filled), default=0)
        self._main = buffer.main[self.start : stop]
        travels = buffer.plan.main_tier is not Tier.DEVICE
        self.main = [self._main.data.view(torch.uint8)] if travels else []
        """The place of the main parameters; none if they are stepped where they are."""
        self._states: list[Tensor] = []
        """The places of states."""
        self._spans: list[slice] = []
        """The ranges of bytes of all places in a piece."""
        self.span_of = {
            buffer.sharded[index]: span.shifted(-self.start).slice if span.size else slice(0, 0)
            for index, span in zip(indices, spans, strict=True)
        }
        """The elements of each parameter, counted from the first one here."""
        self._places: dict[Key, tuple[int, int, Tensor]] = {}
        """Of each state the number of its place, its first byte there, and its tensor at rest."""
        self._held: dict[Key, Tensor] = {}
        """The tensors at rest of states that are where they are stepped now, or are to go back."""
        self._gradients: dict[ShardedParameter, Tensor | None] = {}
        """The gradients as they were, while parameters are ranges of a piece."""

    def lay_out(self, at: int) -> int:
        """Give each place a range of a piece, from a byte on; return the end."""
        self._spans = []
        for rest in (*self.main, *self._states):
            start = round_up(at, self._store.alignment) + int(rest.storage_offset()) % self._store.alignment
            at = start + rest.nbytes
            self._spans.append(slice(start, at))
        return at

    def places(self) -> list[tuple[Tensor, slice]]:
        """The places at rest, each with its range in a piece."""
        return list(zip((*self.main, *self._states), self._spans, strict=False))

    def is_shown_by(self, p: ShardedParameter) -> bool:
        """True if its parameter shows its values, and no other piece."""
        start = p.data_ptr() - self.buffer.main.data_ptr()
        return start == self.start * self._main.itemsize

    def main_in(self, memory: Tensor) -> Tensor:
        """The main parameters in a piece, [n]."""
        return memory[self._spans[0]].view(self._main.dtype)

    def hold(self, memory: Tensor, states: Mapping[Any, dict[str, Any]], counting: set[Any]) -> None:
        """Make parameters and states ranges of a piece; and bring gradients there.

        Args:
            memory: the memory of the piece, with the values of its places.
            states: the states of the optimizer.
            counting: the parameters whose counters of steps lie with them.
        """
        for p, span in self.span_of.items():
            if self.main:
                self._gradients[p] = gradient = gradient_of(p)
                show(p, self.main_in(memory)[span], None if gradient is None else self._store.near(gradient))
            for name, value in states[p].items() if p in states else ():
                if not isinstance(value, Tensor):
                    continue
                if value.dim() == 1 or (value.dim() and self._piece is None):
                    self._held[p, name] = value.data
                resting = self._places[p, name][2] if (p, name) in self._places else None
                if resting is not None and value.data_ptr() == resting.data_ptr():
                    value.data = self._in_piece(memory, (p, name))
                elif (value.dim() or p in counting) and (near := self._store.near(value)) is not value:
                    value.data = near

    def _in_piece(self, memory: Tensor, key: Key) -> Tensor:
        """A state that has a place, in a piece."""
        place, start, resting = self._places[key]
        return _over(memory, self._spans[place].start + start, resting)

    def release(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Make parameters and states tensors at rest again; after an exception, those that were held."""
        for p, gradient in self._gradients.items():
            show(p, self._main[self.span_of[p]], gradient)
        held, self._held, self._gradients = self._held, {}, {}
        for (p, name), resting in held.items():
            value = states.get(p, {}).get(name)
            if isinstance(value, Tensor) and _is_alike(value, resting):
                value.data = resting

    def pack(self, memory: Tensor, states: Mapping[Any, dict[str, Any]]) -> list[tuple[Tensor, slice]]:
        """Put states that are not in `memory` into their ranges there, or to a new place at rest.

        Returns:
            The places that are to be written: of main parameters if they travel and, unless they have got a
            new place, of states. States of a piece that were not in `memory` are left for `PieceHome`.
        """
        present = {
            (p, name): value
            for p in self.span_of
            if p in states
            for name, value in states[p].items()
            if per_element(value, p.numel()) is not None
        }
        if self._fill(memory, present):
            self._held = {key: self._places[key][2] for key in present}
            return self.places()
        mark_here(self._store.memory.device).synchronize()  # it has read the places that go
        self._states = []
        written = self.places()
        if self._piece is None:
            self._held = self._move(present, states)
        else:
            resting, self._held = {key: v for key, v in self._held.items() if key in present}, {}
            self._places = {key: (n, 0, v) for n, (key, v) in enumerate(resting.items(), len(self.main))}
            self._states = [value.view(torch.uint8) for value in resting.values()]
        return written

    def _fill(self, memory: Tensor, present: Mapping[Key, Tensor]) -> bool:
        """Copy states into their ranges; False, and nothing is copied, if they are others than before."""
        if present.keys() != self._places.keys():
            return False
        new: list[tuple[Tensor, Tensor]] = []
        for key, value in present.items():
            target, resting = self._in_piece(memory, key), self._places[key][2]
            held = self._held.get(key)  # none if somebody has cleared the states
            is_there = held is not None and held.data_ptr() == resting.data_ptr()
            if not _is_alike(value, target) or not (self._piece is None or is_there):
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
        starts, end, self._places = {}, 0, {}
        if not present:
            return {}
        for key, value in present.items():
            starts[key] = end
            end += round_up(value.nbytes, _ALIGNMENT)
        place = self._store.memory.empty(round_up(end, self._store.alignment), torch.uint8, self._store.tier)
        self._store.memory.fill(place, [(starts[key], value) for key, value in present.items()])
        for (p, name), value in present.items():
            if value._is_view():  # of a tensor that would stay in memory with it
                states[p][name] = value.data
        resting = {key: _over(place, starts[key], value) for key, value in present.items()}
        self._places = {key: (len(self.main), starts[key], value) for key, value in resting.items()}
        self._states = [place]
        return resting


def _is_alike(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and value.dtype == other.dtype


def _over(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A view of bytes from `start` on, with the dtype and shape of another tensor."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
