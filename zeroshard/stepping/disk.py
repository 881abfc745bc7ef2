"""The tier of files: units are read into host memory, stepped there, and written back.

    read      unit 2           unit 3           unit 4
    step               unit 1           unit 2           unit 3
    write              unit 0           unit 1           unit 2

Between steps a main parameter and its states are tensors over the files, which anybody may read and write.
For its part of a step they are views of one of three buffers, into which whole extents were read past the
page cache. States that are new, or come from elsewhere, are put into the files after their step, side by
side for each flat buffer.

A unit that is much larger than the others is not read into buffers; see `parts.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm.streams import Mark
from zeroshard.parameters.gradient import move_values
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.stepping.parts import Home, per_element
from zeroshard.tiers.files import Extent, FileTransfer
from zeroshard.tiers.places import TierMemory

NUM_BUFFERS = 3
"""Host buffers: one is read, one is stepped, one is written."""
_ALIGNMENT = 64

Key = tuple[ShardedParameter, str]
"""A state: its parameter and its name."""


class DiskHome(Home):
    """Steps the main parameters of some flat buffers that lie in files.

    Args:
        optimizer: the optimizer that steps them.
        buffers: the buffers.
        memory: the memory of the rank.
    """

    def __init__(self, optimizer: Optimizer, buffers: Sequence[FlatBuffer], memory: TierMemory) -> None:
        self._memory, self._optimizer = memory, weakref.ref(optimizer)
        blocks = [_DiskBlock(buffer, memory) for buffer in buffers]
        self._block_of = {p: block for block in blocks for p in block.buffer.sharded}
        self._parts: list[list[_DiskBlock]] = []
        """The blocks of the parts that are expected, and were not fetched yet."""
        self._staging = [_Staging() for _ in range(NUM_BUFFERS)]
        self._ahead: tuple[list[_DiskBlock], _Staging] | None = None
        """The blocks that are read ahead of their step, and where."""

    def expect(self, parts: Sequence[Sequence[ShardedParameter]]) -> None:
        """Begin to read the first part; each later one is read while the part before it is stepped.

        Args:
            parts: the parameters that are fetched together, in their probable order. Others may come, too.
        """
        self._settle()  # of steps before
        self._parts = [blocks for blocks in map(self._blocks, parts) if blocks]
        self._read_ahead()

    @contextmanager
    def fetched(self, parameters: Sequence[ShardedParameter]) -> Iterator[None]:
        """Hold parameters and states in host memory; write them back at the end, but not after an exception.

        Raises:
            RuntimeError: a file could not be read or written; the message names it.
        """
        optimizer, blocks = self._optimizer(), self._blocks(parameters)
        assert optimizer is not None, "it takes a step"
        if not blocks:
            yield
            return
        states = optimizer.state
        try:
            staging = self._fetch(blocks)
            places = staging.divide(blocks)
            for block, (main, packed) in zip(blocks, places, strict=True):
                block.hold(main, packed, states)
            yield
            with torch.no_grad():
                for block, (main, packed) in zip(blocks, places, strict=True):
                    self._write_back(block, main, packed, staging)
        except BaseException:
            self._abandon()
            raise
        finally:
            for block in blocks:
                block.rest(states)

    def end_step(self) -> None:
        """Wait until all parts are in the files.

        Raises:
            RuntimeError: a part could not be written; the message names the file.
        """
        self._settle()

    def _fetch(self, blocks: list[_DiskBlock]) -> _Staging:
        """Wait for the blocks of a part, and begin to read those of the part that is expected next."""
        if self._ahead is None or self._ahead[0] != blocks:
            self._ahead = self._read(blocks)
        (_, staging), self._ahead = self._ahead, None
        staging.wait()
        if blocks in self._parts:
            del self._parts[: self._parts.index(blocks) + 1]
        self._read_ahead()
        return staging

    def _write_back(self, block: _DiskBlock, main: Tensor, packed: Tensor, staging: _Staging) -> None:
        optimizer, swap = self._optimizer(), self._memory.swap
        assert optimizer is not None, "it takes a step"
        values = main.view(block.buffer.plan.main_dtype)[: block.numel]
        staging.copies.append(block.buffer.source.stepped(values))
        staging.transfers.append(swap.write(block.main_extent, main))
        is_moved = block.pack(packed, optimizer.state, self._memory)
        if not is_moved and block.states_extent is not None:
            staging.transfers.append(swap.write(block.states_extent, packed))

    def _settle(self) -> None:
        if self._ahead is not None:
            self._ahead[1].join()  # nobody needs what was read, nor its error
        self._parts, self._ahead = [], None
        try:
            for staging in self._staging:
                staging.wait()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """End all transfers. Reads of an extent whose write has failed will raise its error."""
        self._parts, self._ahead = [], None
        for staging in self._staging:
            staging.join()

    def _blocks(self, parameters: Sequence[ShardedParameter]) -> list[_DiskBlock]:
        blocks = (self._block_of.get(p) for p in parameters)
        return list(dict.fromkeys(block for block in blocks if block is not None))

    def _read_ahead(self) -> None:
        if self._parts:
            self._ahead = self._read(self._parts[0])

    def _read(self, blocks: list[_DiskBlock]) -> tuple[list[_DiskBlock], _Staging]:
        """Start to read blocks into the buffer that was used longest ago."""
        staging = self._staging.pop(0)
        self._staging.append(staging)
        staging.wait()
        staging.reserve(sum(block.num_bytes for block in blocks), self._memory)
        for block, (main, packed) in zip(blocks, staging.divide(blocks), strict=True):
            staging.transfers.append(self._memory.swap.read(block.main_extent, main))
            if block.states_extent is not None:
                staging.transfers.append(self._memory.swap.read(block.states_extent, packed))
        return blocks, staging


class _Staging:
    """One host buffer, with the copies and transfers that use it."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.transfers: list[FileTransfer] = []
        self.copies: list[Mark] = []
        """The ends of copies to the device."""

    def wait(self) -> None:
        """Wait for copies and transfers; raise the error of the first that failed, after all have ended."""
        for transfer in self.join():
            transfer.wait()

    def join(self) -> list[FileTransfer]:
        """Wait for copies and transfers, and return the transfers without their errors."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.synchronize()
        transfers, self.transfers = self.transfers, []
        for transfer in transfers:
            transfer.join()
        return transfers

    def reserve(self, num_bytes: int, memory: TierMemory) -> None:
        if self.memory.numel() < num_bytes:
            memory.staging_bytes += num_bytes - self.memory.nbytes
            self.memory = self.memory.new_empty(0)  # before the larger one is taken
            self.memory = memory.host(num_bytes)

    def divide(self, blocks: Sequence[_DiskBlock]) -> list[tuple[Tensor, Tensor]]:
        """The memory of the main parameters and of the states of each block."""
        sizes = [size for block in blocks for size in block.sizes]
        parts = iter(self.memory[: sum(sizes)].split(sizes))
        return [(next(parts), next(parts)) for _ in blocks]


class _DiskBlock:
    """The main parameters and the states of one flat buffer, in two extents."""

    def __init__(self, buffer: FlatBuffer, memory: TierMemory) -> None:
        self.buffer, self.numel = buffer, buffer.main.numel()
        extent = memory.swap.extent_of(buffer.main)
        assert extent is not None, "its plan says that it lies in files"
        self.main_extent: Extent = extent
        self.states_extent: Extent | None = None
        self._states = torch.empty(0, dtype=torch.uint8)
        """The states in the files, at rest."""
        self._places: dict[Key, tuple[int, Tensor]] = {}
        """The first byte of each state in its extent, and its tensor at rest."""
        self._held: set[Key] = set()
        """The states that are views of host memory now, or are to go back into the files."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes in memory of main parameters and of states."""
        return self.main_extent.padded, 0 if self.states_extent is None else self.states_extent.padded

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(self.sizes)

    def hold(self, main: Tensor, packed: Tensor, states: Mapping[Any, dict[str, Any]]) -> None:
        """Make parameters and states views of host memory, [bytes] of uint8 each."""
        values = main.view(self.buffer.plan.main_dtype)
        for index, parameter in enumerate(self.buffer.sharded):
            move_values(parameter, values[self.buffer.sharded_span(index).slice])
        for (parameter, name), (start, resting) in self._places.items():
            value = states.get(parameter, {}).get(name)
            if isinstance(value, Tensor) and value.data_ptr() == resting.data_ptr():
                value.data = _over(packed, start, resting)
                self._held.add((parameter, name))

    def rest(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Make parameters and states views of the files again; after an exception, those that were held."""
        for index, parameter in enumerate(self.buffer.sharded):
            move_values(parameter, self.buffer.main[self.buffer.sharded_span(index).slice])
        held, self._held = self._held, set()
        for parameter, name in held:
            value, (_, resting) = states.get(parameter, {}).get(name), self._places[parameter, name]
            if isinstance(value, Tensor) and _is_alike(value, resting):
                value.data = resting

    def pack(self, packed: Tensor, states: Mapping[Any, dict[str, Any]], memory: TierMemory) -> bool:
        """Put states that are not in `packed` into their places there, or into new ones in the files.

        Returns:
            True if the states have got another extent, which holds their present values.
        """
        present = {
            (parameter, name): value
            for parameter in self.buffer.sharded
            if parameter in states
            for name, value in states[parameter].items()
            if per_element(value, parameter.numel()) is not None
        }
        is_moved = not self._fill(packed, present)
        if is_moved:
            self._move(present, states, memory)
        self._held = set(present)
        return is_moved

    def _fill(self, packed: Tensor, present: Mapping[Key, Tensor]) -> bool:
        """Copy states into their places; False, and nothing is copied, if they are others than before."""
        if present.keys() != self._places.keys():
            return False
        new: list[tuple[Tensor, Tensor]] = []
        for key, value in present.items():
            start, resting = self._places[key]
            target = _over(packed, start, resting)
            if not _is_alike(value, resting):
                return False
            if value.data_ptr() != target.data_ptr():
                if value.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr():
                    return False  # states have changed places
                new.append((target, value))
        for target, value in new:
            target.copy_(value)
        return True

    def _move(
        self, present: Mapping[Key, Tensor], states: Mapping[Any, dict[str, Any]], memory: TierMemory
    ) -> None:
        """Write states into a new extent, side by side."""
        starts, end = {}, 0
        for key, value in present.items():
            starts[key] = end
            end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        extent = memory.swap.allocate(end)
        values = memory.host(extent.padded)
        for key, value in present.items():
            _over(values, starts[key], value).copy_(value)
            memory.rest(value)
        memory.swap.write(extent, values).wait()
        for (parameter, name), value in present.items():
            if value._is_view():  # of a tensor that would stay in memory with it
                states[parameter][name] = value.data
        self._states, self.states_extent = memory.swap.map(extent), extent
        self._places = {
            key: (starts[key], _over(self._states, starts[key], value)) for key, value in present.items()
        }


def _is_alike(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and value.dtype == other.dtype and value.device == other.device


def _over(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A view of bytes from `start` on, with the dtype and shape of another tensor."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
