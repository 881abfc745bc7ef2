"""This rank's part of a checkpoint: slices of named tensors.

The description of a weight with codes, which is a tensor of JSON in its state_dict.

Weights of bitsandbytes with 4 bits have one, and so have weights that were taken apart. Scales are
tensors of the state_dict, too, and are saved and loaded like buffers. The description is computed anew each
time. It has the kind of the codes, which must be the kind in the model, and with 4 bits the offset of
the scales, which belongs to the values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.files import MANIFEST
from zeroshard.checkpoint.manifest import Manifest, check_sizes, read_manifest
from zeroshard.checkpoint.places import Box, StoredBox, StoredTensor, boxes_of, file_of, split, whole
from zeroshard.codec import Damage, naming_damage, typed
from zeroshard.comm.mesh import Axes
from zeroshard.optim.eightbit.blocks import ABSMAX
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan.cuts import Cut
from zeroshard.plan.layout import BLOCK, Span, num_blocks
from zeroshard.plan.originals import counts
from zeroshard.safetensors import fill
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime

# The keys of all states of a parameter tell which of them belong together: codes and their scales.


def is_codes(key: str, keys: Container[str]) -> bool:
    """Return True for a quantized state."""
    return key + ABSMAX in keys


def is_scales(key: str, keys: Container[str]) -> bool:
    """Return True for a state that holds the scales of another state."""
    return key.endswith(ABSMAX) and key.removesuffix(ABSMAX) in keys


def shape_of(
    key: str, keys: Container[str], shape: Sequence[int], blocks: Cut | None = None
) -> tuple[int, ...]:
    """The shape of a state.

    Args:
        key: of the state.
        keys: of all states of the parameter.
        shape: of the parameter, or of a slice of it that starts on a block.
        blocks: the cut of the parameter, if each part of it has blocks of its own.
    """
    return (num_scales(shape, blocks),) if is_scales(key, keys) else tuple(shape)


def num_scales(shape: Sequence[int], cut: Cut | None = None) -> int:
    """The number of blocks of a parameter, each of whose parts begins with a block."""
    if cut is None:
        return num_blocks(math.prod(shape))
    return cut.num_ranks * num_blocks(math.prod(cut.local_shape))


def own_blocks(cut: Cut | None) -> Cut | None:
    """Return a cut if its parts have other blocks than the whole parameter; None if they are the same."""
    if cut is None or cut.num_ranks == 1:
        return None
    is_flat = len(cut.spans(0)) == 1 and math.prod(cut.shape[: cut.dim]) == 1
    return None if is_flat and not math.prod(cut.local_shape) % BLOCK else cut


def have_same_blocks(one: Cut | None, other: Cut | None) -> bool:
    """Return True if the blocks of two cuts of a parameter, as `own_blocks` gives them, are the same."""
    if one is None or other is None:
        return one is other
    return (one.dim, one.num_ranks, one.spans(0)) == (other.dim, other.num_ranks, other.spans(0))


def blocks_of(span: Span) -> Span:
    """The blocks of a range of elements that starts on one."""
    return Span(span.start // BLOCK, num_blocks(span.stop))


MAX_BOX_BYTES = 16 << 20
"""The most bytes of a box, so that a reader of another layout holds little at a time."""


class TensorPart(NamedTuple):
    """The part of a tensor that a rank of a tensor group holds."""

    cut: Cut
    rank: int

    def boxes(self, box: Box, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of the tensor that a box of the part consists of, with their values."""
        dim = self.cut.dim
        held = Span(box.offsets[dim], box.offsets[dim] + box.sizes[dim])
        for inside, place in self.cut.placed(self.rank, held):
            taken = values.narrow(dim, inside.start - held.start, inside.size)
            yield box.cut(dim, place.start, place.size), taken


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A flat range of a named tensor."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    start: int
    """The first element of the range."""
    data: Tensor
    """[n]"""
    part: TensorPart | None = None
    """The part of the tensor that the range lies in; None for a range of the whole tensor."""

    def boxes(self, max_bytes: int | None = None) -> Iterator[tuple[Box, Tensor]]:
        """The boxes that the range consists of, of at most `max_bytes` each, with their values [sizes].

        The values of a box are a view of `data`; in a part of several sections it may have gaps.
        """
        span = Span(self.start, self.start + self.data.numel())
        most = span.size if max_bytes is None else max(1, max_bytes // self.data.element_size())
        at = 0
        if not math.prod(self.shape):  # so that it is not missing for whoever reads by name
            yield whole(self.shape), self.data.view(self.shape)
        for box in boxes_of(self.shape if self.part is None else self.part.cut.local_shape, span):
            for piece in split(box, most):
                values = self.data[at : at + piece.numel].view(piece.sizes)
                at += piece.numel
                if self.part is None:
                    yield piece, values
                else:
                    yield from self.part.boxes(piece, values)

    def state(self, key: str, data: Tensor, skipped: int = 0) -> TensorSlice:
        """Return the slice of a state of this parameter: of the same elements, after some of them."""
        return replace(self, name=state_name(self.name, key), start=self.start + skipped, data=data)

    def scales(self, key: str, data: Tensor, skipped: int = 0) -> TensorSlice:
        """Return the slice of the scales of a state, [blocks]. Blocks are counted part by part."""
        cut, rank = self.part or (None, 0)
        before = 0 if cut is None else rank * num_blocks(math.prod(cut.local_shape))
        first = before + (self.start + skipped) // BLOCK
        return TensorSlice(state_name(self.name, key), (num_scales(self.shape, cut),), first, data)


States = Mapping[ShardedParameter, Mapping[str, Tensor]]
"""Tensors that belong to parameters, by parameter and key: of the shape of the sharded parameter, or scales
of its blocks. States of an optimizer have keys without "/". Others have their kind before it: "ema/slow"."""


def state_name(fqn: str, key: str) -> str:
    """The name of such a tensor in a checkpoint, KIND/PARAMETER/KEY; no module has such a parameter."""
    kind, _, own = key.rpartition("/")
    return f"{kind or 'optimizer'}/{fqn}/{own}"


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model's state_dict, by kind."""

    aliases: dict[str, tuple[str, ...]]
    """The other names of parameters that are tied."""
    buffers: dict[str, Tensor]
    """Persistent ones."""
    extra: dict[str, Any]
    """The values that modules' get_extra_state() gave."""
    ignored: dict[str, Tensor]
    """Parameters that are not sharded, each rank's own."""


def read_model(runtime: Runtime) -> ModelState:
    """Names and buffers, as the model's own state_dict() has them."""
    names = {id(parameter): parameter.fqn for parameter in runtime.parameters}
    state = ModelState(aliases={}, buffers={}, extra={}, ignored={})
    for name, value in runtime.module.state_dict(keep_vars=True).items():
        if (fqn := names.get(id(value))) is not None:
            if name != fqn:
                state.aliases[fqn] = (*state.aliases.get(fqn, ()), name)
        elif name.rpartition(".")[2] == "_extra_state":  # may be a tensor, and is no buffer even then
            state.extra[name] = value
        elif value in runtime.ignored:
            state.ignored[name] = value.detach()
        elif isinstance(value, Tensor):
            state.buffers[name] = value.detach()
    return state


def blocks_by_name(runtime: Runtime) -> dict[str, Cut | None]:
    """The cut of each parameter whose parts have blocks of their own, by its name; None for the others."""
    originals = (original for buffer in runtime.buffers for original in buffer.originals)
    return {original.fqn: own_blocks(original.cut) for original in originals}


def slices(
    runtime: Runtime, names: Mapping[str, str], states: States, *, written: bool = False
) -> Iterator[TensorSlice]:
    """Yield the slices of main parameters and their states on this rank.

    Args:
        runtime: of the model.
        names: what parameters are called in the checkpoint, by their names; others are left out.
        states: of the parameters.
        written: True gives the slices that this rank writes, over all ranks each element once; False gives
            all that it holds.
    """
    axes = runtime.context.axes
    wants_empty = written and axes.everyone.rank == 0
    for buffer in runtime.buffers:
        wanted = _written(buffer, axes) if written else buffer.main_span
        for index, sharded in enumerate(buffer.sharded):
            original, place = buffer.originals[index], buffer.layout.parameter(index)
            if sharded.fqn not in names or (written and not counts(original, axes.tp.rank, axes.pp.rank)):
                continue
            held = place.intersect(buffer.main_span)
            taken = held.intersect(wanted)
            if not taken.size and not (wants_empty and not place.size):
                continue
            inside = taken.shifted(-held.start)
            part = TensorSlice(
                names[sharded.fqn],
                tuple(buffer.whole_shapes[index]),
                taken.start - place.start if taken.size else 0,
                buffer.main.detach()[buffer.sharded_span(index).slice][inside.slice],
                None if original.cut is None else TensorPart(original.cut, axes.tp.rank),
            )
            yield part
            own = states.get(sharded, {})
            for key, value in own.items():
                if is_scales(key, own):
                    yield part.scales(key, value.detach()[blocks_of(inside).slice])
                else:
                    yield part.state(key, value.detach()[inside.slice])


def _written(buffer: FlatBuffer, axes: Axes) -> Span:
    """The flat range of a buffer that this rank writes."""
    shard = buffer.layout.shard(axes.dp_shard.rank)
    size = shard.size // axes.dp_replicate.size
    start = shard.start + axes.dp_replicate.rank * size
    return Span(start, start + size)


# ----------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint on disk."""

    directory: Path
    manifest: Manifest
    states: dict[str, dict[str, StoredTensor]]
    """The states of each parameter, under the keys of `States`."""

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The places of its tensors, by name."""
        return self.manifest.tensors

    def refusal(self, why: str) -> ValueError:
        """Return the error of a checkpoint that is whole, but not of this model or optimizer."""
        return ValueError(f"'{self.directory}': {why}")


def open_checkpoint(directory: Path) -> Stored:
    """Read the manifest of a checkpoint; no tensor is read.

    Raises:
        DamageError: a file is missing or shortened, or the manifest is damaged or says what cannot be.
    """
    manifest = read_manifest(directory)
    check_sizes(directory, manifest)
    states: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in manifest.tensors.items():
        kind, _, rest = name.partition("/")
        fqn, _, key = rest.rpartition("/")
        if fqn in manifest.parameters:
            states.setdefault(fqn, {})[key if kind == "optimizer" else f"{kind}/{key}"] = tensor
    for fqn, tensors in states.items():
        record = manifest.parameters[fqn]
        for key, tensor in tensors.items():
            form = tensor.dtype, tensor.shape
            dtype = torch.uint8 if is_codes(key, tensors) else tensor.dtype
            dtype = torch.float32 if is_scales(key, tensors) else dtype
            if form != (expected := (dtype, shape_of(key, tensors, record.shape, record.blocks))):
                found = f"state '{key}' of '{fqn}': expected {expected}, got {form}"
                raise Damage.CONTENT.of(directory / MANIFEST, found)
    return Stored(directory, manifest, states)


class TensorReader(ExitStack):
    """Reads ranges of the tensors of a checkpoint; a context manager, which keeps files open.

    Args:
        stored: the checkpoint.
        evict: called with each piece of memory that was filled; see `TierMemory.evict`.
    """

    def __init__(self, stored: Stored, evict: Callable[[Tensor], None] = lambda _: None) -> None:
        super().__init__()
        self.stored, self.evict = stored, evict
        self._files: dict[Path, Any] = {}
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        """The bytes of the box that was read last."""

    def read(self, part: TensorSlice) -> None:
        """Fill `part.data`, in its own dtype, on its own device.

        Raises:
            DamageError: the checkpoint does not hold all of it, or a file has become shorter.
        """
        stored, num_read = self.stored.tensors[part.name], 0
        for box, values in part.boxes():
            for source in stored.parts:
                if (common := source.box.intersect(box)) is not None:
                    read = self._read_box(source, stored.dtype, common.span_in(source.box))
                    values[common.within(box)] = read[common.within(source.box)]
                    self.evict(part.data)
                    num_read += common.numel
        if num_read != part.data.numel():
            found = f"{num_read} of {part.data.numel()} elements of '{part.name}' from {part.start} on"
            raise Damage.CONTENT.of(self.stored.directory / MANIFEST, found)

    def read_whole(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Return all of a tensor, read as `read` does."""
        dtype, shape = self.stored.tensors[name].dtype, self.stored.tensors[name].shape
        values = torch.empty(math.prod(shape), dtype=dtype, device=device)
        self.read(TensorSlice(name, shape, 0, values))
        return values.view(shape)

    def _read_box(self, source: StoredBox, dtype: torch.dtype, span: Span) -> Tensor:
        """[sizes of the box] in memory of the reader: a flat range of the box has its values."""
        path, size = self.stored.directory / file_of(source.rank), dtype.itemsize
        num_bytes = source.box.numel * size
        if path not in self._files:
            self._files[path] = self.enter_context(path.open("rb"))
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        box = self._memory[:num_bytes]
        fill(self._files[path], source.start + span.start * size, box[span.start * size : span.stop * size])
        return box.view(dtype).view(source.box.sizes)


# --------------------------------------------------------------------------------- descriptions of codes


_MARK = ".quant_state.bitsandbytes__"
"""It stands between the name of a weight and the kind of its codes."""
_OFFSET = "nested_offset"


def is_description(name: str) -> bool:
    """True for the name of a description in a state_dict."""
    return _MARK in name


def is_beside_codes(name: str) -> bool:
    """True for a tensor of a state_dict that bitsandbytes keeps along with the codes of a weight."""
    return is_description(name) or name.rpartition(".")[2] == "SCB"


def check_buffers(stored: Stored, runtime: Runtime, buffers: dict[str, Tensor]) -> None:
    """Compare the buffers of a checkpoint with the model's.

    Args:
        stored: the checkpoint.
        runtime: of the model.
        buffers: tensors of the model's state_dict that are no parameters; the checkpoint has the same names.

    Raises:
        ValueError: one has another shape, or a weight is quantized in another way.
    """
    with TensorReader(stored, runtime.context.memory.evict) as reader:
        for name, buffer in buffers.items():
            shape, expected = stored.tensors[name].shape, tuple(buffer.shape)
            if is_description(name):
                saved, own = _read_description(reader, name), _unpack(buffer)
                if saved | {_OFFSET: None} != own | {_OFFSET: None}:
                    raise stored.refusal(
                        f"'{name.partition(_MARK)[0]}' is quantized as {saved}; the model has {own}: "
                        "expected the same kind of codes"
                    )
            elif shape != expected:
                raise stored.refusal(f"buffer '{name}' has shape {shape}; the model expects {expected}")


def read_buffer(reader: TensorReader, model: nn.Module, name: str, buffer: Tensor) -> None:
    """Read a buffer. Of a description, give its weight the offset of the scales that it has."""
    if not is_description(name):
        buffer.copy_(reader.read_whole(name, buffer.device))
    elif (offset := _read_description(reader, name).get(_OFFSET)) is not None:
        weight: Any = model.get_parameter(name.partition(_MARK)[0])
        weight.quant_state.offset.fill_(offset)


def _read_description(reader: TensorReader, name: str) -> dict[str, Any]:
    with naming_damage(reader.stored.directory):
        return _unpack(reader.read_whole(name))


def _unpack(values: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = typed(dict[str, Any], json.loads(bytes(values.cpu().numpy())), "description")
    return found
