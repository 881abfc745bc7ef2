"""Pieces of memory through which values pass on their way to a step, and back to where they rest.

A parcel has places at rest whose values pass through a piece together:

    read      parcel 2            parcel 3            parcel 4
    step                parcel 1            parcel 2            parcel 3
    write               parcel 0            parcel 1            parcel 2

A step asks for all parcels of a unit at once, so those of the next unit are read ahead, if memory allows.

For values in pinned memory of the host, copies run on a stream for each direction, and compute alone waits
for them; the host waits when somebody looks. Values in files come to pinned memory of the host, past the page
cache, and go on from there; the host waits for reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.comm import moves, streams
from zeroshard.comm.streams import Mark, Streams
from zeroshard.plan.buffers import BufferPlan, lie_in_files
from zeroshard.plan.pieces import NUM_OTHERS, most_ahead
from zeroshard.plan.tiers import Tier
from zeroshard.stores import swapfile
from zeroshard.stores.files import FileTransfer
from zeroshard.stores.store import TierMemory

ALIGNMENT = 64
"""Bytes: states side by side begin at a multiple, for loads of vectors."""

Places = Sequence[tuple[Tensor, slice]]
"""Places at rest, uint8, each with its range of bytes in a piece."""


class Parcel(Protocol):
    """Values that pass through a piece together."""

    def lay_out(self) -> int:
        """Give each place a range of a piece; return the bytes of all."""

    def sources(self, piece: Piece) -> Places:
        """The values that are read into a piece: of places at rest, or of where the device has them, too."""


class Piece:
    """Memory in which a part is stepped, with the copies and transfers that use it."""

    def __init__(self) -> None:
        self.memory = self.on_host = torch.empty(0, dtype=torch.uint8)
        """Of the device that steps; and of the host, between files and that device."""
        self.filled = slice(0, 0)
        """The bytes in use."""
        self.transfers: list[FileTransfer] = []
        self.copies: list[Mark] = []
        self.read = Mark(None)
        """The end of the last copies into it."""

    def follow_read(self) -> None:
        """Let the current stream wait for the copies into it."""
        self.read.wait()

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


class HostPieces:
    """Pieces for values that rest in pinned memory of the host, which waits for nothing in between.

    Args:
        memory: the memory of the rank.
        streams: the side streams of the engine.
    """

    is_direct = True
    """True if values come to a piece from where they rest, and so may come from the device as well."""
    alignment = ALIGNMENT
    """A value begins at the same byte of a block of this size at rest and in a piece."""

    def __init__(self, memory: TierMemory, streams: Streams) -> None:
        self.memory, self.streams = memory, streams
        self._pieces = [Piece() for _ in range(NUM_OTHERS + 1)]
        """The one that was used longest ago comes first."""

        self._expected: Sequence[Parcel] = ()
        """The parcels that will be fetched next, probably."""
        self._ahead: list[tuple[Parcel, Piece]] = []
        """The parcels that are read ahead of their step, and where."""
        self._most_ahead = 1

    def expect(self, parcels: Sequence[Parcel], num_ahead: int = 1) -> None:
        """Begin to read the first parcels; each later one is read while one before it is stepped.

        Args:
            parcels: in their probable order. Others may be fetched, too.
            num_ahead: the number of parcels to be read ahead, if they have the bytes of earlier steps.
        """
        self.end_writes()  # of an earlier step
        largest = max((parcel.lay_out() for parcel in parcels), default=0) if num_ahead > 1 else 0
        self._most_ahead = most_ahead(num_ahead, largest)
        self._expected, self._ahead = parcels, []
        self._read_ahead()

    def fetch(self, parcel: Parcel) -> Piece:
        """Return a piece with the values of a parcel, and begin to read the one that is expected next.

        Raises:
            RuntimeError: a file could not be read, or written before that; the message names the folder.
        """
        if parcel in self._expected:  # others were left out
            self._expected, self._ahead = self._expected[self._expected.index(parcel) + 1 :], []
        ahead = [one for one, _ in self._ahead]
        if parcel in ahead:
            del self._ahead[: ahead.index(parcel)]
        else:
            self._ahead.insert(0, self._read_into_next(parcel))
        _, piece = self._ahead.pop(0)
        self._use_last(piece)
        self.arrive(piece)
        self._read_ahead()
        return piece

    def _read_ahead(self) -> None:
        while self._expected and len(self._ahead) < self._most_ahead:
            parcel, self._expected = self._expected[0], self._expected[1:]
            self._ahead.append(self._read_into_next(parcel))

    def _use_last(self, piece: Piece) -> None:
        """Use a piece again after all others."""
        self._pieces = [*(one for one in self._pieces if one is not piece), piece]

    def _read_into_next(self, parcel: Parcel) -> tuple[Parcel, Piece]:
        """Start to read a parcel into the piece that was used longest ago, or into a new one."""
        ahead = {piece for _, piece in self._ahead}
        others = [piece for piece in self._pieces if piece not in ahead]
        piece = others[0] if len(others) > NUM_OTHERS else Piece()
        self._use_last(piece)
        num_bytes = parcel.lay_out()
        sources = parcel.sources(piece)
        with torch.no_grad(), self.streams.to_device.after_compute():
            self.reserve(piece, num_bytes)
            self.read(sources, piece)
        return parcel, piece

    @contextmanager
    def writing(self, places: Places, piece: Piece) -> Iterator[None]:
        """Start to write values, after all compute so far; what is issued inside follows their copies."""
        with self.streams.to_host.after_compute():
            self.send(places, piece)
            yield
        self.sent(places, piece)

    def end_writes(self) -> None:
        """Let later reads follow all writes so far; the host does not wait."""
        for piece in self._pieces:
            piece.follow()

    def wait(self) -> None:
        """Let the host wait until all values are at rest.

        Raises:
            RuntimeError: a file could not be written; the message names the folder.
        """
        for _, piece in self._ahead:
            piece.join()  # nobody needs what was read, nor its error
        if failure := self.join():
            raise RuntimeError(failure)

    def join(self) -> str:
        """End all copies and transfers; return the message of the first error, or "".

        Reads of a range whose write has failed will raise its error.
        """
        self._expected, self._ahead = (), []
        return next(filter(None, [piece.join() for piece in self._pieces]), "")

    def end_copies(self) -> None:
        """Let the host wait for copies, whose memory may go then; a transfer keeps its memory itself."""
        for copy in (copy for piece in self._pieces for copy in piece.copies):
            copy.synchronize()

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
        piece.read = self.streams.to_device.mark()
        piece.copies.append(piece.read)

    def arrive(self, piece: Piece) -> None:
        """Let the current stream wait for what was read."""
        piece.follow()

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory at rest, [size]."""
        return self.memory.empty(size, dtype, Tier.HOST if self.is_direct else Tier.DISK)

    def near(self, value: Tensor) -> Tensor:
        """Return a gradient, or a state that is at no place of the store, where its parameter is stepped."""
        near = moves.to_device(value, self.memory.device)
        return near.clone() if self.memory.is_in_files(near) else near

    def send(self, places: Places, piece: Piece) -> None:
        """Copy values to the host, on the current stream: the stream of copies to the host."""
        for rest, span in places:
            rest.copy_(piece.memory[span], non_blocking=True)

    def sent(self, places: Places, piece: Piece) -> None:
        """Note that all values were sent."""
        piece.copies.append(self.streams.to_host.mark())


class FilePieces(HostPieces):
    """Pieces for values that rest in files; they move past the page cache.

    Args:
        memory: the memory of the rank.
        streams: the side streams of the engine.
    """

    is_direct = False
    alignment = swapfile.PAGE

    def end_writes(self) -> None:
        """Let the host wait until all values are in files.

        Raises:
            RuntimeError: a file could not be written; the message names the folder.
        """
        self.wait()

    def reserve(self, piece: Piece, num_bytes: int) -> None:
        """Make a piece as large as that; the host waits.

        Raises:
            RuntimeError: an earlier transfer has failed; the message names the folder.
        """
        piece.wait()
        if piece.on_host.numel() < num_bytes:
            self.memory.staging_bytes += num_bytes - piece.on_host.nbytes
            if piece.memory is piece.on_host:
                piece.memory = piece.memory.new_empty(0)
            piece.on_host = piece.on_host.new_empty(0)  # before the larger one is taken
            piece.on_host = self.memory.host(num_bytes)
        piece.filled = slice(0, num_bytes)
        if streams.has_streams(self.memory.device):
            super().reserve(piece, num_bytes)
        else:
            piece.memory = piece.on_host

    def read(self, places: Places, piece: Piece) -> None:
        """Start to read."""
        for rest, span in places:
            piece.transfers.append(self.memory.swap.read(rest, piece.on_host[span]))

    def arrive(self, piece: Piece) -> None:
        """Let the host wait for what was read, and the current stream for the copy of it.

        Raises:
            RuntimeError: a read has failed; the message names the folder.
        """
        piece.wait()
        if piece.memory is not piece.on_host:
            with self.streams.to_device.here():  # compute has let go of the piece: the host has waited
                piece.memory[piece.filled].copy_(piece.on_host[piece.filled], non_blocking=True)
            piece.copies.append(self.streams.to_device.mark())
            piece.follow()

    def send(self, places: Places, piece: Piece) -> None:
        """Copy values to the host, if they are stepped elsewhere."""
        for _, span in places if piece.memory is not piece.on_host else ():
            piece.on_host[span].copy_(piece.memory[span], non_blocking=True)

    def sent(self, places: Places, piece: Piece) -> None:
        """Start to write; the threads of the files wait for copies from the device."""
        super().sent(places, piece)
        for rest, span in places:
            is_there = piece.copies[-1].synchronize
            piece.transfers.append(self.memory.swap.write(rest, piece.on_host[span], is_there))


def pieces_for(plans: Iterable[BufferPlan], memory: TierMemory, streams: Streams) -> HostPieces:
    """Return pieces for optimizer states of some buffers: in files, if any lie there, else on the host."""
    return (FilePieces if lie_in_files(plans) else HostPieces)(memory, streams)
