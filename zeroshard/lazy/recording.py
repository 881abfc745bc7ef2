"""Build a model without memory: new tensors have none, and a recorder notes how they are computed.

The recorder treats an operation that torch dispatches by its kind:

    makes a tensor out of nothing       the tensor is made on the meta device; recorded
    makes one on the meta device        as always: it has no values, and draws no random numbers
    computes with a deferred tensor     its output is one as well; recorded
    asks for values (item, cpu, equal)  the operations that the tensor depends on are run for the answer
    anything else                       as always

`copy.deepcopy` of a tensor without memory clones it, so a copy that is made while operations are recorded has
the same values. Outside, torch copies the shape alone: `check_values` refuses such a copy, and a pickle.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from zeroshard.internals import pytree
from zeroshard.lazy.deferred import (
    Op,
    View,
    defer,
    deferred_of,
    has_memory,
    is_changed,
    is_known,
    values_in,
    values_of,
)
from zeroshard.stores.host import host_memory

_META, _CPU = torch.device("meta"), torch.device("cpu")
_DEFERRED = (None, _CPU)
"""The `device=` arguments of tensors that are made on the meta device instead."""

_FILLS = frozenset(
    f"aten::{name}"
    for name in (
        *("normal_", "uniform_", "zero_", "fill_", "copy_", "random_"),
        *("exponential_", "log_normal_", "cauchy_", "geometric_"),
    )
)
"""In-place operations whose outcome does not depend on earlier values of the tensor."""

_numbers = count()


class OperationRecorder(TorchDispatchMode):
    """Records operations, below autograd.

    Args:
        loads: False draws random numbers while recording, as an ordinary init does. True is for a loader that
            makes tensors on the meta device on purpose: they get the values that are computed for them, and
            each random operation has a generator of its own, seeded from torch's seed, when it is run.
    """

    records_for = "zeroshard.deferred_init()"
    """The name of the context. A call of a sharded model inside it is refused."""

    def __init__(self, loads: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.loads = loads
        self._seen: dict[int, nn.Parameter | None] = {}
        """The parameters that an operation had, by id; None: it was changed since an earlier recording."""

    @property
    def noted(self) -> list[nn.Parameter]:
        """The parameters that operations had here, unless changed since an earlier recording."""
        return [parameter for parameter in self._seen.values() if parameter is not None]

    def has_changed(self, parameter: Tensor) -> bool:
        """True if an operation had a parameter that was not changed before it: all changes are recorded."""
        return self._seen.get(id(parameter)) is not None

    def takes(self, tensor: Tensor) -> bool:
        """True if the operations on a tensor are recorded."""
        return not has_memory(tensor) and (self.loads or deferred_of(tensor) is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        device = kwargs.get("device")
        is_wanted = device in _DEFERRED or (self.loads and device == _META)
        is_made = not tensors and is_wanted and any(one.name == "device" for one in func._schema.arguments)
        if not is_made and not any(map(self.takes, tensors)):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        gives_tensors = any("Tensor" in str(returned.type) for returned in func._schema.returns)
        is_asked = not gives_tensors or (tensors and device not in (None, _META))
        if is_asked or any(map(has_memory, written)):
            real_args, real_kwargs = values_in((args, kwargs))
            return func(*real_args, **real_kwargs)
        if is_made or device is not None:
            kwargs["device"] = _CPU
        return self._record(func, args, kwargs, written)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        inputs = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        deferred = {id(t): deferred_of(t) or defer(t) for t in inputs if not has_memory(t)}
        for tensor in inputs:
            if isinstance(tensor, nn.Parameter):
                self._seen.setdefault(id(tensor), None if is_changed(tensor) else tensor)
        # Geometry as it is before: t_() and its like change it.
        run_args, run_kwargs = pytree.tree_map_only(
            Tensor,
            lambda t: t.clone() if has_memory(t) else View.of(t, deferred[id(t)]),
            (args, _with(kwargs, generator=None)),
        )
        fills = func._schema.name in _FILLS and View.of(args[0], deferred[id(args[0])]).is_whole
        overwrites = {deferred[id(args[0])]} if fills else set()
        number, state = next(_numbers), None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = self._random_state(func, args, kwargs, number, blank=args[0] if fills else None)
        outputs = _run_on_meta(func, args, kwargs)
        creates = {}
        for place, output in enumerate(pytree.tree_leaves(outputs)):
            if isinstance(output, Tensor) and deferred_of(output) is None:
                creates[place] = View.of(output, defer(output))
        made = {view.deferred for view in creates.values()}
        op = Op(
            number=number,
            call=func,
            args=run_args,
            kwargs=run_kwargs,
            creates=creates,
            reads=frozenset(deferred.values()) - overwrites,
            overwrites=frozenset(overwrites | made),
            default_dtype=torch.get_default_dtype(),
            rng_state=state,
        )
        for target in made | {deferred[id(tensor)] for tensor in written}:
            target.ops.append(op)
        return outputs

    def _random_state(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, blank: Tensor | None
    ) -> Tensor:
        """Return the generator's state for an operation, and advance the generator as the operation would."""
        if self.loads:
            seed = (torch.initial_seed() + number) % (1 << 63)
            return torch.Generator().manual_seed(seed).get_state()
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state()

        def real(tensor: Tensor) -> Tensor:
            if tensor is not blank:
                return values_of(tensor)
            values = host_memory(tensor.untyped_storage().nbytes(), pinned=False).untyped_storage()
            return torch.empty(0, dtype=tensor.dtype).set_(values, 0, tensor.shape, tensor.stride())

        real_args, real_kwargs = pytree.tree_map_only(Tensor, real, (args, kwargs))
        func(*real_args, **real_kwargs)
        return state


def _with(kwargs: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return keyword arguments with other values for some of them, if they are there."""
    return kwargs | {name: value for name, value in others.items() if name in kwargs}


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the meta device; tensors that it writes to are changed in place."""
    on_meta = args, _with(kwargs, generator=None, device=_META)
    try:
        meta_args, meta_kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(_META), on_meta)
        return func(*meta_args, **meta_kwargs)
    except NotImplementedError:  # the shape depends on the values
        real_args, real_kwargs = values_in((args, _with(kwargs, generator=None, device=_CPU)))
        return pytree.tree_map_only(Tensor, lambda t: t.to(_META), func(*real_args, **real_kwargs))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes."""
    values = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


_GET_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_DEVICES = {Tensor.device.__get__: _CPU, Tensor.is_cpu.__get__: True}  # type: ignore[attr-defined]
"""The answers to questions about the device."""
_CHANGED = (
    "{} was changed after zeroshard.deferred_init() had ended; expected weights to be initialized inside the "
    "block"
)


def deferred_init() -> AbstractContextManager[None]:
    """Build a model without memory: `with zeroshard.deferred_init(): model = Net()`.

    Parameters and buffers are on the meta device afterwards. `initialize` and `shard` give them the
    values of an ordinary init on the CPU with the same random seed, unit by unit. Random numbers are drawn
    as always, one tensor at a time: the generator ends in the state that an ordinary init leaves. Building
    takes as long. Tensors that are given another device than the CPU are made there; those on the meta device
    have no values until they are given memory and values (`to_empty(device="cpu")` and an init).

    Initialize weights inside the block: changes after it are refused.
    """
    return recording("zeroshard.deferred_init()", loads=False)


def refuse_recording(what: str) -> None:
    """Refuse a call that needs tensors with memory.

    Args:
        what: the name of the function that was called.

    Raises:
        RuntimeError: inside `deferred_init()`.
    """
    if any(isinstance(mode, OperationRecorder) for mode in _get_current_dispatch_mode_stack()):
        raise RuntimeError(
            f"{what} inside zeroshard.deferred_init(), where new tensors have no memory: build the model in "
            f"the block, and call {what} after it"
        )


@contextmanager
def _watch_modules(recorder: OperationRecorder) -> Iterator[None]:
    """Note the versions of parameters at the end, as later changes would be lost."""
    owners: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def note(module: nn.Module, name: str, value: Tensor | nn.Module | None) -> None:
        owners.add(module)

    hooks = [
        register_module_parameter_registration_hook(note),
        register_module_module_registration_hook(note),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        own = {parameter for owner in owners for parameter in owner.parameters()}
        first = (parameter for parameter in own if not hasattr(parameter, "recorded_version"))
        for parameter in (*first, *recorder.noted):
            if not has_memory(parameter):
                parameter.recorded_version = parameter._version  # type: ignore[attr-defined]


@contextmanager
def recording(what: str, *, loads: bool) -> Iterator[None]:
    """Record the operations that compute tensors without memory.

    Args:
        what: the name of the function that was called.
        loads: see `OperationRecorder`.

    Raises:
        RuntimeError: inside `deferred_init()`.
    """
    refuse_recording(what)
    recorder = OperationRecorder(loads)
    with _watch_modules(recorder), _AsOnCPU(recorder), recorder:
        yield


class _AsOnCPU(TorchFunctionMode):
    """Makes deferred tensors answer questions about their device as tensors on the CPU do.

    Code makes tensors on the device of others, `device=weight.device`, and moves some there; trunc_normal_ of
    torch 2.15 leaves a tensor as it is whose `is_meta` is true.
    """

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = self._recorder
        if func == _GET_IS_META and recorder.takes(args[0]):
            return False
        if func == _GET_DATA and is_changed(args[0]) and not recorder.has_changed(args[0]):
            raise RuntimeError(_CHANGED.format("a parameter"))  # a copy would have the values from before
        if func == Tensor.__deepcopy__:  # torch would make a storage, of which no operation is seen
            return args[0].detach().clone().requires_grad_(args[0].requires_grad)
        # transformers looks for meta tensors while it loads, and from_pretrained adopts them.
        if not recorder.loads and (func in _DEVICES or func is Tensor.to) and recorder.takes(args[0]):
            if func in _DEVICES:
                return _DEVICES[func]
            args, kwargs = pytree.tree_map_only((str, torch.device), _as_meta, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _as_meta(device: str | torch.device) -> str | torch.device:
    return _META if torch.device(device) == _CPU else device


def check_values(root: nn.Module) -> None:
    """Refuse parameters and buffers whose values are unknown.

    Raises:
        ValueError: naming the first one.
    """
    for kind, tensors in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
        for name, tensor in tensors:
            if not is_known(tensor):
                raise ValueError(
                    f"{kind} '{name}' is on the meta device; expected values. Build the model, what changes "
                    "it (adapters, resized embeddings) and copies of it under zeroshard.deferred_init() "
                    "without device='meta'"
                )
            # The version of a copy that no module held at the end of its block was not noted; it was 0.
            if is_changed(tensor, 0 if kind == "parameter" else None):
                raise ValueError(_CHANGED.format(f"{kind} '{name}'"))


def materialize_others(root: nn.Module) -> None:
    """Give memory to deferred buffers, and to tensors that modules hold as plain attributes."""
    made: dict[int, Tensor] = {}
    for held in (held for module in root.modules() for held in (module._buffers, vars(module))):
        for name, tensor in held.items():
            if isinstance(tensor, Tensor) and deferred_of(tensor) is not None:
                if id(tensor) not in made:
                    made[id(tensor)] = values_of(tensor)
                held[name] = made[id(tensor)]


@torch.no_grad()
def place_ignored(ignored: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move ignored parameters to the device; each rank computes the values of deferred ones."""
    for parameter in ignored:
        if parameter.device == device:
            continue
        if has_memory(parameter):
            parameter.data = parameter.detach().to(device)
        else:  # an optimizer may hold the object
            made = nn.Parameter(values_of(parameter.detach()).to(device), requires_grad=False)
            made.__class__ = type(parameter)
            vars(made).update(vars(parameter))
            torch.utils.swap_tensors(parameter, made.requires_grad_(parameter.requires_grad))
