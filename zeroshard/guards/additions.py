"""Layers and parameters that are added to a sharded model: refused in the line that adds them.

They would be neither sharded nor the same on all ranks, and no checkpoint would hold them. torch calls a hook
for each registration of a module or parameter, in any model; one in another model costs a lookup.
"""

from __future__ import annotations

import functools
import weakref
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zeroshard.sharding.runtime import Runtime

_guarded: WeakKeyDictionary[nn.Module, tuple[str, weakref.ref[Runtime]]] = WeakKeyDictionary()
"""The modules of sharded models, with their names."""


def guard_additions(runtime: Runtime) -> None:
    """Refuse additions to the modules of a runtime from now on; `unsharded()` has a check of its own."""
    _register()
    reference = weakref.ref(runtime)
    for name, module in runtime.module.named_modules():
        _guarded[module] = name, reference


@functools.cache
def _register() -> None:
    register_module_module_registration_hook(_check_module)
    register_module_parameter_registration_hook(_check_parameter)


def _check_module(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    if module is not None and (runtime := _runtime_of(owner)) is not None:
        for inside, parameter in module.named_parameters():
            if not _is_known(parameter, runtime):
                _refuse(owner, name, f"{name}.{inside}")


def _check_parameter(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    # The slots notice a parameter in the place of another one, and there the old one may come back.
    if parameter is not None and name not in owner._parameters:
        runtime = _runtime_of(owner)
        if runtime is not None and not _is_known(parameter, runtime):
            _refuse(owner, name, name)


def _runtime_of(owner: nn.Module) -> Runtime | None:
    """The runtime whose model must stay as it is."""
    if owner not in _guarded:
        return None
    runtime = _guarded[owner][1]()
    if runtime is None or runtime.is_closed or any(unit.slots.is_shown for unit in runtime.units):
        return None
    return runtime


def _is_known(parameter: nn.Parameter, runtime: Runtime) -> bool:
    return type(parameter).__module__.startswith("zeroshard.") or parameter in runtime.ignored


def _refuse(owner: nn.Module, name: str, inside: str) -> None:
    prefix = _guarded[owner][0]
    prefix = f"{prefix}." if prefix else ""
    raise RuntimeError(
        f"'{prefix}{name}' is added to a sharded model: '{prefix}{inside}' would not be sharded, not be "
        "saved, and train differently on each rank. Add it before initialize; or call engine.close() on "
        "all ranks, add it, and initialize again"
    )
