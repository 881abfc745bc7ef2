"""Build a model without memory: new tensors have none, and a recorder notes how they are computed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from zeroshard.internals import pytree
from zeroshard.lazy.copies import guard_copies
from zeroshard.lazy.deferred import has_memory
from zeroshard.lazy.recorder import Recorder

_META, _CPU = torch.device("meta"), torch.device("cpu")
_GET_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICES = {Tensor.device.__get__: _CPU, Tensor.is_cpu.__get__: True}  # type: ignore[attr-defined]
"""The answers to questions about the device."""


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build a model without memory: `with zeroshard.deferred_init(): model = Net()`.

    Parameters and buffers are on the meta device afterwards. `initialize` and `shard` give them the
    values of an ordinary init on the CPU with the same random seed, unit by unit. Random numbers are drawn
    as always, one tensor at a time: the generator ends in the state that an ordinary init leaves. Building
    takes as long. Tensors that are given another device than the CPU are made there; those on the meta device
    have no values until they are given some (`to_empty(device="cpu")` and an init).

    Initialize weights inside the block: changes after it are refused.
    """
    with recording(draw=True, adopts_meta=False):
        yield


def refuse_recording(what: str) -> None:
    """Refuse a call that needs tensors with memory.

    Args:
        what: the name of the function that was called.

    Raises:
        RuntimeError: inside `deferred_init()`.
    """
    if is_recording():
        raise RuntimeError(
            f"{what} inside zeroshard.deferred_init(), where new tensors have no memory: build the model in "
            f"the block, and call {what} after it"
        )


def is_recording() -> bool:
    """True if new tensors get no memory now."""
    return bool(_len_torch_dispatch_stack()) and bool(_active_recorders())


def _active_recorders() -> list[Recorder]:
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]


@contextmanager
def _watch_modules(recorder: Recorder) -> Iterator[None]:
    """Note the versions of parameters at the end, as later changes would be lost; let copies keep values."""
    made: list[weakref.ref[nn.Parameter]] = []
    owners: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def note(module: nn.Module, name: str, value: Tensor | nn.Module | None) -> None:
        owners.add(module)
        if isinstance(value, nn.Parameter):
            made.append(weakref.ref(value))

    hooks = [
        register_module_parameter_registration_hook(note),
        register_module_buffer_registration_hook(note),
        register_module_module_registration_hook(note),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in (*(reference() for reference in made), *recorder.earlier):
            if parameter is not None and not has_memory(parameter):
                parameter.recorded_version = parameter._version  # type: ignore[attr-defined]
        guard_copies({module for owner in owners for module in owner.modules()})


@contextmanager
def recording(*, draw: bool, adopts_meta: bool = True) -> Iterator[None]:
    """Record the operations that compute tensors without memory.

    Args:
        draw: True draws random numbers while recording, as an ordinary init does. False gives each random
            operation a generator of its own, seeded from torch's seed, when it is run.
        adopts_meta: True gives tensors that were made on the meta device on purpose the values that are
            computed for them.
    """
    active = _active_recorders()
    if active:  # from_pretrained under deferred_init: one recorder is enough
        with active[-1].changed(draw, adopts_meta):
            yield
    else:
        recorder = Recorder(draw, adopts_meta)
        with _watch_modules(recorder), _AsOnCPU(recorder), recorder:
            yield


class _AsOnCPU(TorchFunctionMode):
    """Makes deferred tensors answer questions about their device as tensors on the CPU do.

    Code makes tensors on the device of others, `device=weight.device`, and moves some there; trunc_normal_ of
    torch 2.15 leaves a tensor as it is whose `is_meta` is true.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = self._recorder
        if func == _GET_IS_META and recorder.takes(args[0]):
            return False
        # transformers looks for meta tensors while it loads, and from_pretrained adopts them.
        if not recorder.adopts_meta and (func in _DEVICES or func is Tensor.to) and recorder.takes(args[0]):
            if func in _DEVICES:
                return _DEVICES[func]
            args, kwargs = pytree.tree_map_only((str, torch.device), _as_meta, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _as_meta(device: str | torch.device) -> str | torch.device:
    return _META if torch.device(device) == _CPU else device
