"""Values that rest on a farther tier: they are read to where they are stepped, and written back.

    read      part 2           part 3           part 4
    step               part 1           part 2           part 3
    write              part 0           part 1           part 2

Between steps a main parameter and its states are tensors at rest, which anybody may read and write. For a
part of a step, parameters and the states of a twin of the optimizer are ranges of one of three pieces of
memory, on the device that steps. A store moves the values:

    HostStore    from pinned memory of the host. Copies run on a stream for each direction, and compute alone
                 waits for them. The host waits at the end of the step
    FileStore    from files to pinned memory of the host, past the page cache, and on from there. The host
                 waits for reads

Main parameters that lie on the device anyway are stepped where they are. States that are new, or come from
elsewhere, get a place at rest after their step, side by side for each part. A large parameter is moved in
pieces, and each of its states has a place of its own (see `parts.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import moves
from zeroshard.comm.streams import Mark, Streams, mark_here
from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan.layout import BLOCK, Span, round_up
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.stepping.parts import Home, part_of, per_element, show
from zeroshard.tiers import swapfile
from zeroshard.tiers.files import FileTransfer
from zeroshard.tiers.places import TierMemory

NUM_PIECES = 3
"""Pieces of memory: one is read, one is stepped, one is written."""
_ALIGNMENT = 64
"""Bytes: states side by side begin at a multiple, for loads of vectors."""

Key = tuple[ShardedParameter, str]
"""A state: its parameter and its name."""
States = MutableMapping[Any, dict[str, Any]]
"""The states of an optimizer by parameter and name."""
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
    alignment = swapfile.BLOCK

    def __init__(self, memory: TierMemory, streams: Streams, steps_on: Tier) -> None:
        super().__init__(memory, streams)
        self._steps_on = steps_on

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
    """Steps the main parameters of some flat buffers that rest on a farther tier, or whose states do.

    Args:
        parts: the buffers, each with the indices of parameters that are fetched together, and the pieces of
            them; one that is None has all.
        store: the store of the tier.
        starts: the first element of each slice, counted in the whole parameter; for the time of a piece it is
            the first element of the piece.
    """

    def __init__(
        self,
        parts: Iterable[tuple[FlatBuffer, range, Sequence[Span | None]]],
        store: HostStore,
        starts: MutableMapping[ShardedParameter, int],
    ) -> None:
        self._store, self._starts = store, starts
        self._blocks_of: dict[ShardedParameter, list[_Block]] = {}
        for buffer, indices, pieces in parts:
            wholes: dict[str, Tensor] = {}
            blocks = [_Block(buffer, indices, store, piece, wholes) for piece in pieces]
            self._blocks_of |= {buffer.sharded[index]: blocks for index in indices}
        self._expected: list[_Block] = []
        """The blocks that will be fetched next, probably."""
        self._pieces = [Piece() for _ in range(NUM_PIECES)]
        self._ahead: tuple[_Block, Piece] | None = None
        """The block that is read ahead of its step, and where."""

    def expect(self, parts: Sequence[Sequence[ShardedParameter]]) -> None:
        """Begin to read the first part; each later one is read while the part before it is stepped.

        Args:
            parts: the parameters that are fetched together, in their probable order. Others may come, too.
        """
        self.end_step()  # of an earlier step
        self._expected = [block for part in parts for block in self._blocks(part)]
        self._read_ahead()

    def num_pieces(self, parameters: Sequence[ShardedParameter]) -> int:
        """Return the number of pieces in which a part is stepped."""
        return max(1, len(self._blocks(parameters)))

    @contextmanager
    def fetched(
        self, stepped: Optimizer, parameters: Sequence[ShardedParameter], number: int
    ) -> Iterator[None]:
        """Hold values, gradients and states where they are stepped; write them back at the end.

        The optimizer gets a dict of states of its own. After an exception nothing is written back.

        Raises:
            RuntimeError: a file could not be read or written; the message names it.
        """
        if not (blocks := self._blocks(parameters)):
            yield
            return
        block, states = blocks[number], stepped.state
        # torch wants these counters on the device of their parameters.
        counting = [group for group in stepped.param_groups if group.get("fused") or group.get("capturable")]
        counts = {p for group in counting for p in group["params"]}
        try:
            piece = self._fetch(block)
            stepped.state = near = block.hold(piece.memory, states, self._starts, counts)
            yield
            with torch.no_grad():
                self._store.write(block, block.pack(piece.memory, near, states), piece)
        except BaseException:
            self._join()
            mark_here(self._store.memory.device).synchronize()  # it may read states and gradients on the host
            raise
        finally:
            stepped.state = states
            block.release(self._starts)

    def _fetch(self, block: _Block) -> Piece:
        """Wait for a block, and begin to read the one that is expected next."""
        if self._ahead is None or self._ahead[0] is not block:
            self._ahead = self._read(block)
        (_, piece), self._ahead = self._ahead, None
        self._store.arrive(piece)
        if block in self._expected:
            del self._expected[: self._expected.index(block) + 1]
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
        self._expected, self._ahead = [], None
        return next(filter(None, [piece.join() for piece in self._pieces]), "")

    def _blocks(self, parameters: Sequence[ShardedParameter]) -> list[_Block]:
        """The blocks of a part: one, or one for each piece of a parameter; none if it does not travel."""
        return self._blocks_of.get(parameters[0], []) if parameters else []

    def _read_ahead(self) -> None:
        if self._expected:
            self._ahead = self._read(self._expected[0])

    def _read(self, block: _Block) -> tuple[_Block, Piece]:
        """Start to read a block into the piece that was used longest ago."""
        piece = self._pieces.pop(0)
        self._pieces.append(piece)
        with torch.no_grad(), self._store.streams.to_device.after_compute():
            self._store.reserve(piece, block.lay_out())
            self._store.read(block.places(), piece)
        return block, piece


class _Block:
    """Main parameters that lie side by side in a flat buffer, and their states: two places.

    A block of a piece has a range of one parameter, and of each of its states: a place each.

    Args:
        wholes: the states of a parameter in pieces, at rest; all of its blocks have the same dict.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        indices: range,
        store: HostStore,
        piece: Span | None,
        wholes: dict[str, Tensor],
    ) -> None:
        self.buffer, self._store, self._piece, self._wholes = buffer, store, piece, wholes
        own = {buffer.sharded[index]: buffer.sharded_span(index) for index in indices}
        spans = {p: span if piece is None else piece.shifted(span.start) for p, span in own.items()}
        is_whole = len(indices) == len(buffer.sharded) and piece is None
        filled = [span for span in spans.values() if span.size]
        self.start = 0 if is_whole else min((span.start for span in filled), default=0)
        """The first element, counted in the main parameters of the buffer."""
        stop = buffer.main.numel() if is_whole else max((span.stop for span in filled), default=0)
        self._main = buffer.main[self.start : stop]
        travels = buffer.plan.main_tier is not Tier.DEVICE
        self.main = [self._main.data.view(torch.uint8)] if travels else []
        """The place of the main parameters; none if they are stepped where they are."""
        self._at_rest = {p: buffer.main[span.slice] for p, span in own.items()}
        """The main parameters of each parameter, all pieces of them."""
        self._span_of = {
            p: span.shifted(-self.start).slice if span.size else slice(0, 0) for p, span in spans.items()
        }
        """The elements of each parameter, counted from the first one here."""
        self._states: list[Tensor] = []
        """The places of states."""
        self._spans: list[slice] = []
        """The ranges of bytes of all places in a piece."""
        self._places: dict[Key, tuple[int, int, Tensor]] = {}
        """Of each state the number of its place, its first byte there, and its tensor at rest."""
        self._held: set[Key] = set()
        """The states of the step under way that were read from their places."""
        self._gradients: dict[ShardedParameter, Tensor | None] = {}
        """The gradients as they were, while parameters show other values."""

    def lay_out(self) -> int:
        """Give each place a range of a piece; return the bytes of all."""
        self._spans, at = [], 0
        for rest in (*self.main, *self._states):
            start = round_up(at, self._store.alignment) + int(rest.storage_offset()) % self._store.alignment
            at = start + rest.nbytes
            self._spans.append(slice(start, at))
        return at

    def places(self) -> list[tuple[Tensor, slice]]:
        """The places at rest, each with its range in a piece."""
        return list(zip((*self.main, *self._states), self._spans, strict=False))

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
            starts: the first element of each slice in the whole parameter; it becomes that of the piece.
            counts: the parameters whose counters of steps lie with them.
        """
        self._held.clear()
        for p, span in self._span_of.items() if self.main or self._piece is not None else ():
            self._gradients[p] = gradient = gradient_of(p)
            starts[p] += 0 if self._piece is None else self._piece.start
            if gradient is not None:
                gradient = self._store.near(gradient if self._piece is None else gradient[self._piece.slice])
            show(p, self.main_in(memory)[span] if self.main else self._main, gradient)
        near = defaultdict[Any, dict[str, Any]](dict)
        for p in self._span_of:
            for name, value in states[p].items() if p in states else ():
                near[p][name] = self._near(memory, (p, name), value, p in counts)
        return near

    def _near(self, memory: Tensor, key: Key, value: Any, counts: bool) -> Any:
        """A state where it is stepped."""
        size = self._at_rest[key[0]].numel()
        if not isinstance(value, Tensor):
            return value
        if per_element(value, size) is None:
            own = value if self._piece is None else value.clone()  # each piece counts from the same number
            return self._store.near(own) if value.dim() or counts else own
        part = value if self._piece is None else part_of(value, self._piece, size)
        is_ours = self._piece is None or value is self._wholes.get(key[1])
        if is_ours and key in self._places and part.data_ptr() == self._places[key][2].data_ptr():
            self._held.add(key)
            return self._in_piece(memory, key)
        self._store.memory.check(value)
        return self._store.near(part.contiguous())

    def _in_piece(self, memory: Tensor, key: Key) -> Tensor:
        """A state that has a place, in a piece."""
        place, start, resting = self._places[key]
        return _over(memory, self._spans[place].start + start, resting)

    def release(self, starts: MutableMapping[ShardedParameter, int]) -> None:
        """Let parameters show their values at rest."""
        gradients, self._gradients = self._gradients, {}
        for p, gradient in gradients.items():
            show(p, self._at_rest[p], gradient)
            starts[p] -= 0 if self._piece is None else self._piece.start

    def pack(self, memory: Tensor, near: States, states: States) -> list[tuple[Tensor, slice]]:
        """Put states that are not in `memory` into their ranges there, or to a new place at rest.

        Args:
            memory: the memory of the piece.
            near: the states where they were stepped.
            states: the states at rest, which get what is new; of a parameter in pieces with the last one.

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
            mark_here(self._store.memory.device).synchronize()  # it has read the places that go
            del written[len(self.main) :]
            self._states, self._places = [], {}
            if self._piece is None:
                self._move(present)
            else:
                self._write(present, states)
        for p, state in near.items():
            if self._piece is None or self._piece.stop == self._at_rest[p].numel():
                resting = {name: self._resting((p, name)) for name in state if (p, name) in present}
                own = state | resting
                states[p].clear()  # code of the user may hold it
                states[p].update(own)
        return written

    def _resting(self, key: Key) -> Tensor:
        """A state at rest, all pieces of it."""
        return self._places[key][2] if self._piece is None else self._wholes[key[1]]

    def _move(self, present: Mapping[Key, Tensor]) -> None:
        """Write states to a new place, side by side."""
        if not present:
            return
        starts, end = {}, 0
        for key, value in present.items():
            starts[key] = end
            end += round_up(value.nbytes, _ALIGNMENT)
        place = self._store.memory.empty(round_up(end, self._store.alignment), torch.uint8, self._store.tier)
        self._store.memory.fill(place, [(starts[key], value) for key, value in present.items()])
        self._states = [place]
        self._places = {
            key: (len(self.main), starts[key], _over(place, starts[key], value))
            for key, value in present.items()
        }

    def _write(self, present: Mapping[Key, Tensor], states: States) -> None:
        """Write states of a piece to their part of the whole ones, which the first piece makes."""
        assert self._piece is not None
        memory = self._store.memory
        for (p, name), value in present.items():
            size = self._at_rest[p].numel()
            num = size if value.shape[-1] == self._piece.size else -(-size // BLOCK)
            shape, whole = (*value.shape[:-1], num), self._wholes.get(name)
            is_there = whole is not None and (whole.shape, whole.dtype) == (shape, value.dtype)
            if not self._piece.start and not (is_there and states.get(p, {}).get(name) is whole):
                self._wholes[name] = memory.empty(math.prod(shape), value.dtype, self._store.tier).view(shape)
            target = part_of(self._wholes[name], self._piece, size)
            if target.dim() > 1:
                target.copy_(value)
            else:
                memory.fill(target.view(torch.uint8), [(0, value)])
                self._places[p, name] = (len(self.main) + len(self._states), 0, target)
                self._states.append(target.view(torch.uint8))


def _is_alike(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and value.dtype == other.dtype


def _over(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A view of bytes from `start` on, with the dtype and shape of another tensor."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
