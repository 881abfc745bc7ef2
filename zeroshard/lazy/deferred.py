"""Tensors on the meta device with known values: in a file, or computed by recorded operations.

The storage of such a tensor carries a `DeferredStorage`. It has the values of a file (`source`), and
the operations that change them, recorded while the model was built (`ops`, see `recording.py`). A
parameter is read from its part of the file, or by running again the operations that it depends on:

    weight.untyped_storage().deferred -> DeferredStorage(ops=[empty, uniform_, normal_])
                                         only normal_ is run: it overwrites all earlier values

Of a weight that is quantized when it is read, each rank quantizes its own part. bitsandbytes quantizes a
weight block by block, and a block has one scale. A block has some elements of the flattened weight with 4
bits, and a row with 8 bits. So the codes of a range follow from the blocks that it touches, and are the same
bits as the codes of the whole weight:

    weight    |--block--|--block--|--block--|--block--|
    range            |-----------|                         reads two blocks, and keeps their scales
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroshard.internals import pytree
from zeroshard.plan.layout import Span
from zeroshard.stores.host import host_memory


class ValueSource(Protocol):
    """A contiguous tensor outside of memory, such as one in a file, that can be read in parts."""

    @property
    def numel(self) -> int:
        """The number of its elements."""

    def read(self, *spans: Span) -> Tensor:
        """Return ranges of the flattened tensor, one after the other: [elements], on the CPU."""


@dataclass(eq=False, slots=True)
class DeferredStorage:
    """The origin of the values of one storage."""

    num_bytes: int
    source: ValueSource | None = None
    ops: list[Op] = field(default_factory=list)
    """The operations that wrote to it, in order."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor over a deferred storage, as an argument of a recorded operation."""

    deferred: DeferredStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor, deferred: DeferredStorage) -> View:
        """Return the view that `tensor` is of a deferred storage."""
        offset = int(tensor.storage_offset())
        return View(deferred, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    @property
    def is_whole(self) -> bool:
        """True if every byte of the storage belongs to it."""
        return math.prod(self.shape) * self.dtype.itemsize == self.deferred.num_bytes

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the same view of a storage with memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """A recorded operation, with all that it needs to run again with the same outcome."""

    number: int
    """The number of the operation in the order of all operations."""
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Arguments by name. As in `args`, a `View` stands for each deferred tensor."""
    creates: dict[int, View]
    """Outputs with storage of their own, by their index among the flattened outputs."""
    reads: frozenset[DeferredStorage]
    overwrites: frozenset[DeferredStorage]
    """The storages whose values do not depend on earlier ones afterwards."""
    default_dtype: torch.dtype
    rng_state: Tensor | None
    """The state of the CPU generator for a random operation."""


def has_memory(tensor: Tensor) -> bool:
    """True if a tensor is on a device, also while a model is recorded (see `recording._AsOnCPU`)."""
    with torch._C.DisableTorchFunction():
        return tensor.device.type != "meta"


def deferred_of(tensor: Tensor) -> DeferredStorage | None:
    """Return the origin of the values of a tensor without memory; None: unknown, or it has memory."""
    return getattr(tensor.untyped_storage(), "deferred", None) if not has_memory(tensor) else None


def defer(tensor: Tensor, source: ValueSource | None = None) -> DeferredStorage:
    """Give a meta tensor the values of `source`; None: operations that are yet to be recorded make them."""
    storage = tensor.untyped_storage()
    storage.deferred = deferred = DeferredStorage(storage.nbytes(), source)  # type: ignore[attr-defined]
    return deferred


def is_known(tensor: Tensor) -> bool:
    """True if a tensor has values, in memory or deferred ones."""
    deferred = deferred_of(tensor)
    return has_memory(tensor) or (deferred is not None and _needed(deferred) is not None)


def is_stored(tensor: Tensor) -> bool:
    """True if the values of a meta tensor come from files alone: each rank can read its part by itself."""
    deferred = deferred_of(tensor)
    ops = None if deferred is None else _needed(deferred)
    if deferred is None or ops is None:
        return False
    origins = [deferred, *(read for op in ops.values() for read in op.reads)]
    is_random = any(op.rng_state is not None for op in ops.values())
    sources = [origin.source for origin in origins if origin.source is not None]
    weights = [source.weight for source in sources if isinstance(source, Codes)]
    return not is_random and bool(sources) and all(map(is_stored, weights))


def is_changed(parameter: Tensor, version: int | None = None) -> bool:
    """True if a deferred parameter was changed when nothing was recorded, so that the change is lost.

    Args:
        parameter: the parameter.
        version: of a parameter that no recording has noted; None: unknown.
    """
    version = getattr(parameter, "recorded_version", version)
    return not has_memory(parameter) and version is not None and version != parameter._version


def describe_origin(tensor: Tensor) -> str:
    """Return a text about the origin of the values of a meta tensor, the same on all ranks."""
    source = readable(tensor)
    if source is not None:
        return str(source)
    if is_stored(tensor):
        return "computed from files"
    return "deferred" if is_known(tensor) else "on the meta device"


def read_part(tensor: Tensor, *spans: Span) -> Tensor:
    """Return ranges of a flattened tensor: [elements], on the CPU. Reads no other elements if possible."""
    if (source := readable(tensor)) is not None:
        return source.read(*spans)
    values = values_of(tensor).reshape(-1)
    return values[spans[0].slice] if len(spans) == 1 else torch.cat([values[span.slice] for span in spans])


def readable(tensor: Tensor) -> ValueSource | None:
    """Return the source of a tensor that no operation has changed."""
    deferred = deferred_of(tensor)
    if deferred is None or deferred.ops or not tensor.is_contiguous():
        return None
    return deferred.source if View.of(tensor, deferred).is_whole else None


def values_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor: itself if it has memory, otherwise a new tensor on the CPU."""
    deferred = deferred_of(tensor)
    if deferred is None:
        return tensor.detach()
    return View.of(tensor, deferred).over(_replay(deferred))


def values_in(tree: Any) -> Any:
    """Return the same nested arguments with the values of deferred tensors."""
    return pytree.tree_map_only(Tensor, values_of, tree)


def _needed(target: DeferredStorage) -> dict[int, Op] | None:
    """Return the operations that the values of `target` depend on, by number; None: unknown values."""
    found: dict[int, Op] = {}
    pending: list[tuple[DeferredStorage, float]] = [(target, math.inf)]
    while pending:
        deferred, before = pending.pop()
        for op in reversed(deferred.ops):
            if op.number < before:
                if op.number not in found:
                    found[op.number] = op
                    pending += [(read, op.number) for read in op.reads]
                if deferred in op.overwrites:
                    break
        else:
            if deferred.source is None:
                return None
    return found


@torch.no_grad()
def _replay(target: DeferredStorage) -> torch.UntypedStorage:
    """Run the operations that a storage depends on, in order."""
    ops = _needed(target)
    if ops is None:
        raise RuntimeError("expected a tensor whose values are known, got one on the meta device")
    storages: dict[DeferredStorage, torch.UntypedStorage] = {}

    def storage(deferred: DeferredStorage) -> torch.UntypedStorage:
        if deferred not in storages:
            source = deferred.source
            # Not of malloc, which would keep it: small objects settle in the hole.
            values = source.read(Span(0, source.numel)) if source else host_memory(deferred.num_bytes, False)
            storages[deferred] = values.untyped_storage()
        return storages[deferred]

    last_uses = {deferred: number for number in sorted(ops) for deferred in ops[number].reads}
    for number, op in sorted(ops.items()):
        args, kwargs = pytree.tree_map_only(View, lambda v: v.over(storage(v.deferred)), (op.args, op.kwargs))
        with _as_recorded(op):
            outputs = pytree.tree_leaves(op.call(*args, **kwargs))
        for place, view in op.creates.items():
            storages[view.deferred] = _lay_out(outputs[place], view)
        for deferred in op.reads - {target}:
            if last_uses[deferred] == number:
                del storages[deferred]  # a stack of experts needs its parts no longer
    return storage(target)


def _lay_out(output: Tensor, view: View) -> torch.UntypedStorage:
    """Return the storage of an output with the recorded strides."""
    if View.of(output, view.deferred) == view:
        return output.untyped_storage()
    storage = torch.empty(view.deferred.num_bytes, dtype=torch.uint8).untyped_storage()
    view.over(storage).copy_(output)
    return storage


@contextmanager
def _as_recorded(op: Op) -> Iterator[None]:
    """Set the default dtype and the generator to their state when the operation was recorded."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(op.default_dtype)
    try:
        with torch.random.fork_rng(devices=(), enabled=op.rng_state is not None):
            if op.rng_state is not None:
                torch.set_rng_state(op.rng_state)
            yield
    finally:
        torch.set_default_dtype(dtype)


@dataclass(eq=False)
class Codes:
    """The codes of a weight, flattened, as a source of values."""

    weight: Tensor
    """The weight that is quantized: a tensor with memory, or with deferred values."""
    block_size: int
    """The elements of the weight that have one scale."""
    per_code: int
    """The elements of the weight in one element of the codes."""
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    """[n] elements, from the start of a block -> (codes [n / per_code], scales [blocks])."""
    _scales: Tensor | None = field(default=None, init=False)

    @property
    def scales(self) -> Tensor:
        """[blocks], float32, on the CPU: the scales of the blocks that were read; 0 for others."""
        if self._scales is None:  # not while the model is built: it would get no memory
            num = -(-self.weight.numel() // self.block_size)
            self._scales = torch.zeros(num, dtype=torch.float32, device="cpu")
        return self._scales

    @property
    def numel(self) -> int:
        """The number of codes."""
        return -(-self.weight.numel() // self.per_code)

    def blocks_of(self, span: Span) -> Span:
        """Return the blocks that a range of codes touches."""
        stop = min(span.stop * self.per_code, self.weight.numel())
        return Span(span.start * self.per_code // self.block_size, -(-stop // self.block_size))

    def read(self, *spans: Span) -> Tensor:
        """Return ranges of the codes, one after the other: [elements], on the CPU."""
        return torch.cat([self._read(span) for span in spans])

    def _read(self, span: Span) -> Tensor:
        blocks, size = self.blocks_of(span), self.weight.numel()
        elements = Span(blocks.start * self.block_size, min(blocks.stop * self.block_size, size))
        codes, self.scales[blocks.slice] = self.quantize(read_part(self.weight, elements))
        first = elements.start // self.per_code
        return codes.reshape(-1)[span.start - first : span.stop - first]

    def __str__(self) -> str:
        """Describe it in the same words on all ranks."""
        return f"quantized in blocks of {self.block_size}: {describe_origin(self.weight)}"
