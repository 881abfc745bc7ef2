"""Compilation and recomputation of the forward of a unit's module, inside the hooks that gather and free.

Activations on the host between forward and backward: the tensors that autograd saves in units.

A segment is the time from the beginning of one unit's forward to the beginning of the next one's.

    forward     | unit 1        | unit 2        | unit 3       | unit 4 ...
    to host                     | saved in 1    | saved in 2   | saved in 3
                                                ^ saved in 1 is freed

    backward    | unit 3            | unit 2            | unit 1 ...
    to device   | saved in 2        | saved in 1        |

So the device holds what two units have saved. The last unit of a forward is followed by none, and is not
copied: its backward comes at once. With `recompute="unit"` the same is true of the inputs that a checkpoint
saves for each unit.

[Note: Only memory that nobody else holds] A copy is started only when no tensor is left over its memory but
tensors that autograd has saved here. Otherwise the memory would not become free: parameters, buffers, masks
and tables that all units share, outputs that the caller keeps. Then nobody can write to the memory any more.
Until then the saved tensors are there, and a backward compares their versions. Torch compares them itself,
but not the versions of tensors that hooks have taken.

[Note: Whole storages] Autograd saves several views of one memory, such as x and x.flatten(0, 1). So the
memory is copied as bytes, once, and views of the same shape and strides are laid over it again.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from zeroshard.comm import streams
from zeroshard.internals import pytree
from zeroshard.internals.autograd import is_in_backward, outermost_checkpoint
from zeroshard.internals.nested import cast_inputs, change_tensors
from zeroshard.internals.warn import warn_user
from zeroshard.plan.names import Cast
from zeroshard.sharding.context import Changes, Context
from zeroshard.sharding.unit import Unit
from zeroshard.stores.host import HostCopies, HostCopy
from zeroshard.stores.storage import count_views

_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""The names of the cache in attention layers of transformers; their forward adds to it.

Since transformers 5.24 its name is `cache`. Other models may have a harmless argument of this name, so the
classes of transformers tell.
"""

_CACHE_MODULE = "transformers.cache_utils"

Copies = list[tuple[nn.Module, dict[str, torch.Tensor]]]
"""Modules with copies of their buffers."""


def compile_forwards(units: Sequence[Unit], changes: Changes) -> None:
    """Compile the units that have no unit inside: hooks stay outside of compiled code.

    Args:
        units: the root unit first; it is left as it is.
        changes: the changes of their modules.
    """
    with_hooks = {module: unit for unit in units for module in unit.modules}
    for module in branches(units[0].modules[0], _modules_of(units)):
        if with_hooks.keys().isdisjoint(set(module.modules()) - {module}):
            changes.set(module, "forward", torch.compile(module.forward))
            with_hooks[module].layers.clear()


@functools.cache
def exclude_from_tracing() -> None:
    """Let torch.compile leave this package out. It compiles the model's own code, and hooks run as they are.

    Dynamo would trace collectives and the memory of units. torch has no public name for this; a decorator
    around each hook would cost more than the hook.
    """
    # Slow to import; torch's optimizers import it anyway.
    trace_rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    trace_rules.add("zeroshard")


def recompute_forwards(units: Sequence[Unit], changes: Changes) -> None:
    """Keep only the inputs of each outermost unit for backward, which computes the rest again.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". The unit is gathered for its backward
    anyway, so nothing is gathered twice. A module without children has nothing to save.

    Args:
        units: the root unit first; it is left as it is.
        changes: the changes of their modules.
    """
    with_hooks = {module: unit for unit in units for module in unit.modules}
    for module in outermost(units[0].modules[0], _modules_of(units)):
        for part in set(module.modules()) & with_hooks.keys() - {module}:
            with_hooks[part].recomputed_in.append(with_hooks[module])
        changes.set(module, "forward", checkpointed(module))


def _modules_of(units: Sequence[Unit]) -> set[nn.Module]:
    return {module for unit in units[1:] if unit.buffers for module in unit.modules}


def branches(root: nn.Module, modules: Container[nn.Module]) -> Iterator[nn.Module]:
    """Yield each of the `modules` that has modules inside, from the outside in."""
    return (module for module in root.modules() if module in modules and any(module.children()))


def outermost(root: nn.Module, modules: Container[nn.Module]) -> Iterator[nn.Module]:
    """Yield the `branches` that are not inside of another branch."""
    inside: set[nn.Module] = set()
    for module in branches(root, modules):
        if module not in inside:
            inside.update(module.modules())
            yield module


def checkpointed(module: nn.Module) -> Callable[..., Any]:
    """Return a forward of a module that keeps its inputs alone, and runs again in the backward."""
    forward, name = module.forward, type(module).__name__

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        for cache, value in kwargs.items():
            if _is_cache(cache, value):
                raise ValueError(
                    f"recompute='unit' runs the forward of {name} twice and would fill its {cache!r} twice: "
                    "set use_cache=False in the model's config for training. Prefix tuning needs the "
                    "cache; use recompute='none' with it"
                )
        before = _copy_buffers(module)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _WithBuffers(before)

        once, inputs = _each_once(forward, args, kwargs)
        return checkpoint(once, *inputs, use_reentrant=False, context_fn=contexts)

    return recomputed


def _is_cache(name: str, value: Any) -> bool:
    """True for an argument to which the forward of an attention layer adds."""
    if value is None:
        return False
    return name in _CACHES or any(base.__module__ == _CACHE_MODULE for base in type(value).__mro__)


def _each_once(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """A forward that takes each object among its inputs once, all by position; and these inputs.

    `checkpoint` saves its arguments one by one. Hooks may take the saved tensors (another checkpoint around,
    `save_on_cpu`). Then a tensor that was given twice comes back as two. A forward that asks if they are one,
    as MultiheadAttention does, computes something else. Keywords are not saved at all: no hook sees them, and
    the random states of their devices are not kept. And `checkpoint` has keywords of its own.
    """
    given, keywords, num_args = [*args, *kwargs.values()], list(kwargs), len(args)
    distinct = {id(value): value for value in given}
    places = [list(distinct).index(id(value)) for value in given]

    def once(*inputs: Any) -> Any:
        values = [inputs[place] for place in places]
        return forward(*values[:num_args], **dict(zip(keywords, values[num_args:], strict=True)))

    return once, list(distinct.values())


def _copy_buffers(module: nn.Module) -> Copies:
    """Copies of the buffers that a forward in training may read and then change; bool masks are left out."""

    def copies(part: nn.Module) -> dict[str, torch.Tensor]:
        buffers = part._buffers.items()
        return {name: b.clone() for name, b in buffers if b is not None and b.dtype != torch.bool}

    return [(part, copies(part)) for part in module.modules() if part.training and part._buffers]


class _WithBuffers:
    """A context in which a second forward reads the buffers of the first one, and its writes are lost.

    It is entered once for each backward through the graph of the first forward, so it is no generator.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._now: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
        """The buffers of the model while copies stand in their places."""

    def __enter__(self) -> None:
        self._now = [(part, dict(part._buffers)) for part, _ in self._copies]
        for part, values in self._copies:
            part._buffers.update({name: value.clone() for name, value in values.items()})

    def __exit__(self, *_: object) -> None:
        now, self._now = self._now, []
        for part, buffers in now:
            part._buffers.update(buffers)


# ------------------------------------------------------------------------------- activations on the host


LEAST_BYTES = 1 << 20
"""Smaller memory stays on the device. At 25 GB/s a copy of 1 MiB and its way back take 84 us; the host needs
about as long to issue them, 130 us per tensor on a busy core. Norms and masks save many smaller tensors."""


def offload_activations(units: Sequence[Unit], changes: Changes, context: Context, *, warns: bool) -> None:
    """Keep tensors that autograd saves in the forwards of units on the host until their backward.

    On CPU the device is the host, and nothing is changed.

    Args:
        units: the root unit first; its own tensors stay on the device, as its backward comes first.
        changes: the changes of the modules.
        context: the objects that the engine's buffers share.
        warns: True warns of a unit inside an activation checkpoint, whose inputs autograd saves outside.
    """
    if not streams.has_streams(context.device):
        return
    activations = SavedActivations(HostCopies(context.memory, context.streams), LEAST_BYTES, warns)
    modules = {module: unit for unit in units[1:] for module in unit.modules}
    for module, unit in modules.items():
        inside = {modules[part] for part in module.modules() if part in modules}
        changes.set(module, "forward", _offloaded(module, activations, [units[0], unit, *inside]))


def _offloaded(module: nn.Module, activations: SavedActivations, units: Iterable[Unit]) -> Callable[..., Any]:
    forward, buffers = module.forward, [buffer for unit in units for buffer in unit.buffers]

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or is_in_backward():
            return forward(*args, **kwargs)
        if outermost_checkpoint(sys._getframe(), None) is not None:
            activations.warn(type(module).__name__)
            return forward(*args, **kwargs)
        activations.begin_segment()
        flat = frozenset(buffer.full.untyped_storage()._cdata for buffer in buffers)
        with saved_tensors_hooks(functools.partial(activations.pack, flat), lambda saved: saved()):
            return forward(*args, **kwargs)

    return offloaded


class SavedActivations:
    """The saved tensors of one engine.

    They belong to the graphs of autograd and die with these; here are only weak references to them.

    Args:
        copies: makes the copies.
        least_bytes: memory of fewer bytes stays on the device.
        warns: True warns once if a unit is inside an activation checkpoint.
    """

    def __init__(self, copies: HostCopies, least_bytes: int, warns: bool) -> None:
        self._copies, self._least_bytes, self._warns = copies, least_bytes, warns
        self._segment = _Segment(0)
        """The present one."""
        self._segments = weakref.WeakValueDictionary[int, _Segment]()
        """By number, those with saved tensors that are alive."""
        self._waiting = weakref.WeakValueDictionary[int, _Memory]()
        """By the address of the storage, which is alive: memory that is not copied yet."""
        self._copying: list[weakref.ref[_Memory]] = []
        """Memory whose copies were started at the beginning of the present segment."""
        self._entered = -1
        """The number of the segment in which a backward is, or was."""
        self._fetched: set[int] = set()
        """The numbers of segments that were fetched."""
        self._alone = count_views(torch.empty(0)) - 1
        """The holders that torch counts for a storage in addition to tensors."""

    # -- forward --------------------------------------------------------------------------------------

    def begin_segment(self) -> None:
        """Free the memory that was copied during the last segment, and start to copy what that has saved.

        Raises:
            RuntimeError: the host has not enough memory.
        """
        self._copies.release_dead()
        copying, self._copying = self._copying, []
        for reference in copying:
            if (memory := reference()) is not None:
                memory.release()
        for key, memory in list(self._waiting.items()):
            tensors = memory.tensors
            if [tensor._version for tensor in tensors] != memory.versions:
                del self._waiting[key]  # its backward is an error; the memory stays for the other tensors
            elif count_views(tensors[0]) - len(tensors) == self._alone:  # nobody else holds it
                del self._waiting[key]
                memory.start(self._copies)
                self._copying.append(weakref.ref(memory))
        if self._segment.saved:
            self._segment = _Segment(self._segment.number + 1)

    def pack(self, flat: frozenset[int], tensor: Tensor) -> Callable[[], Tensor]:
        """Return the object that autograd saves instead of a tensor, whose call gives the tensor.

        Args:
            flat: the addresses of the storages of parameters.
            tensor: the tensor; an alias of it is saved, as it may hold the node that saves it.
        """
        alias = tensor.detach()
        storage = tensor.untyped_storage() if self._may_move(tensor) else None
        if storage is None or storage._cdata in flat or storage.nbytes() < self._least_bytes:
            return functools.partial(_checked, alias, alias._version)  # it stays on the device
        key = storage._cdata
        memory = self._waiting.get(key)
        if memory is None:
            memory = self._waiting[key] = _Memory()
        self._segment.saved[id(memory)] = weakref.ref(memory)
        self._segments[self._segment.number] = self._segment
        return _Offloaded(alias, memory, self._segment, self)

    def _may_move(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return is_plain and tensor.device == self._copies.device and not (tensor.is_conj() or tensor.is_neg())

    def warn(self, name: str) -> None:
        """Warn once that a checkpoint of the model's own is around a unit."""
        if self._warns:
            self._warns = False
            warn_user(
                f"offload.activations='cpu' moves nothing of {name}: it is called inside an activation "
                "checkpoint of the model's own. Set recompute='unit' instead of that"
            )

    # -- backward -------------------------------------------------------------------------------------

    def enter(self, segment: _Segment) -> None:
        """Note that a backward needs a segment: fetch it and the one before, and drop the others again.

        Raises:
            RuntimeError: the device has not enough memory.
        """
        self._copies.release_dead()
        if segment.number == self._entered:
            return
        self._entered = segment.number
        before = max((number for number in self._segments if number < segment.number), default=-1)
        ahead = self._segments.get(before, segment)
        present = {id(memory) for near in (segment, ahead) for memory in near.memories()}
        for number in self._fetched - {segment.number, ahead.number}:
            if (other := self._segments.get(number)) is not None:  # its graph is kept for another backward
                for memory in other.memories():
                    if id(memory) not in present:
                        memory.drop()
        for near in (segment, ahead):
            for memory in near.memories():
                memory.fetch()
        self._fetched = {segment.number, ahead.number}


class _Segment:
    """The memory that was saved between the beginnings of two forwards; held by the tensors saved there."""

    __slots__ = ("__weakref__", "number", "saved")

    def __init__(self, number: int) -> None:
        self.number = number
        self.saved: dict[int, weakref.ref[_Memory]] = {}
        """By id, what was saved in it that may move, perhaps also before."""

    def memories(self) -> Iterator[_Memory]:
        """The memory that is alive, in the order of a backward."""
        for reference in reversed(list(self.saved.values())):
            if (memory := reference()) is not None:
                yield memory


class _Memory:
    """One storage and the saved tensors over it: on the device, then on the host."""

    __slots__ = ("__weakref__", "copy", "tensors", "versions")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        """Aliases of the saved tensors, until the memory is freed on the device."""
        self.versions: list[int] = []
        """The versions that they had when they were saved."""
        self.copy: HostCopy | None = None

    def start(self, copies: HostCopies) -> None:
        """Start to copy it to the host."""
        first = self.tensors[0]
        storage = first.untyped_storage()
        num_bytes = storage.nbytes()
        source = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, 0, (num_bytes,), (1,))
        self.copy = HostCopy(source, copies.take(num_bytes), copies)

    def release(self) -> None:
        """Free it on the device, once compute has waited for the copy."""
        self.drop()
        self.tensors.clear()

    def fetch(self) -> None:
        """Start to bring it back, if it was freed on the device."""
        if self.copy is not None:
            self.copy.fetch()

    def drop(self) -> None:
        """Free it on the device, where the tensors alone keep it."""
        if self.copy is not None:
            self.copy.drop()


class _Offloaded:
    """A saved tensor whose memory may be on the host when backward needs it.

    Args:
        alias: shares memory and version with the tensor, and has no graph; held by `memory` only.
        memory: the memory under it.
        segment: the segment in which it was saved.
        owner: moves the memory.
    """

    __slots__ = ("_dtype", "_memory", "_offset", "_owner", "_place", "_segment", "_shape", "_strides")

    def __init__(self, alias: Tensor, memory: _Memory, segment: _Segment, owner: SavedActivations) -> None:
        self._memory, self._segment, self._owner = memory, segment, owner
        self._dtype, self._shape, self._strides = alias.dtype, alias.shape, alias.stride()
        self._offset, self._place = alias.storage_offset(), len(memory.tensors)
        memory.tensors.append(alias)
        memory.versions.append(alias._version)

    def __call__(self) -> Tensor:
        """Return the saved tensor, or one with its values, shape and strides.

        Raises:
            RuntimeError: it was modified in place since; or the device has not enough memory.
        """
        is_needed, memory = is_in_backward(), self._memory
        if is_needed:
            self._owner.enter(self._segment)
        if memory.tensors:
            return _checked(memory.tensors[self._place], memory.versions[self._place])
        assert memory.copy is not None, "it was copied before its tensors were forgotten"
        values = memory.copy.get()
        if not is_needed:  # somebody looks at the graph
            memory.copy.drop()
        empty = torch.empty(0, dtype=self._dtype, device=values.device)
        return empty.set_(values.untyped_storage(), self._offset, self._shape, self._strides)


def _checked(tensor: Tensor, version: int) -> Tensor:
    """Return a saved tensor if nobody has modified it; torch checks only tensors that no hook has taken."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(tensor.shape)} and {tensor.dtype} is at version {tensor._version}; "
            f"expected version {version} instead"
        )
    return tensor


# ------------------------------------------------------------------------------------------------- casts


def cast_forwards(root: nn.Module, casts: Mapping[nn.Module, Cast], changes: Changes) -> None:
    """Let modules cast their inputs and outputs.

    Args:
        root: the model.
        casts: modules of it, as `find_casts` gives them.
        changes: the changes of the modules.
    """
    for module, cast in casts.items():
        if cast.without is not None:
            changes.set(module, "forward", casting(module, module.forward, cast, in_lists=module is root))


def casting(
    module: nn.Module, method: Callable[..., Any], cast: Cast, *, in_lists: bool = False
) -> Callable[..., Any]:
    """A method of a module that casts its float inputs, and its outputs back to the dtype of the first one.

    Args:
        module: the module.
        method: its forward or another method.
        cast: the dtypes.
        in_lists: True also casts in lists and mappings, see `cast_inputs`.
    """
    without = cast.without or cast.dtype

    @functools.wraps(method)
    def cast_around(*args: Any, **kwargs: Any) -> Any:
        first = _first_float(args, kwargs)
        back = without if first is None else first.dtype
        args, kwargs = cast_inputs(module, args, kwargs, dtype=cast.dtype, in_lists=in_lists)
        kind = (next(module.parameters()) if first is None else first).device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            output = method(*args, **kwargs)
        if back == cast.dtype:
            return output
        return change_tensors(output, lambda t: t.to(back) if t.dtype == cast.dtype else t)

    return cast_around


def _first_float(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first floating-point tensor among arguments; None if there is none."""
    for value in (*args, *kwargs.values()):
        for leaf in (value,) if isinstance(value, Tensor) else pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                return leaf
    return None
