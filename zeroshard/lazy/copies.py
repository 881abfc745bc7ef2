"""Copies of tensors without memory keep their values: torch would copy shapes, and drop where values are.

    copy.deepcopy(model)     a parameter of the copy is read from the same part of the same file, or computed
                             by the same operations
    pickle, torch.save       refused

`copy` asks an object for a method `__deepcopy__`. Each parameter and buffer without memory has one, in
whatever object it lies: a module, a list of parameters, a shallow copy of the module.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zeroshard.lazy.deferred import defer, deferred_of, readable
from zeroshard.lazy.recorder import Recorder

_METHOD = "__deepcopy__"


def guard_copies(modules: Iterable[nn.Module]) -> None:
    """Let copies of the tensors of modules keep their values, for those without memory."""
    for module in modules:
        for tensor in _tensors(module):
            if not is_lazy(tensor) and deferred_of(tensor) is not None:
                vars(tensor).setdefault(_METHOD, _Copies(tensor))


def release_copies(root: nn.Module) -> None:
    """Let torch copy the tensors of a model again, which get memory now."""
    for tensor in (tensor for module in root.modules() for tensor in _tensors(module)):
        if isinstance(vars(tensor).get(_METHOD), _Copies):
            del vars(tensor)[_METHOD]


class _Copies:
    """Copies a tensor, without keeping it alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def __call__(self, memo: dict[int, Any]) -> Tensor:
        tensor = self._tensor()
        assert tensor is not None, "it is being copied"
        if deferred_of(tensor) is not None:
            return _copy(tensor, memo)
        del vars(tensor)[_METHOD]  # it was given other values
        return copy.deepcopy(tensor, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a model without memory cannot be pickled, as its values are in files or yet to be computed: "
            "pickle it after engine.close(), or save engine.full_state_dict() (called on all ranks)"
        )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters, buffers and plain attributes of a module, without those of its parts."""
    for held in (module._parameters, module._buffers, vars(module)):
        yield from (value for value in held.values() if isinstance(value, Tensor))


def _copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a tensor of the same kind, without memory, with the same values."""
    source = readable(tensor)
    twin: Any
    if source is None:
        with torch.no_grad(), Recorder(draw=True, adopts_meta=False):
            twin = tensor.detach().clone()
    else:
        twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        defer(twin, copy.copy(source))
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, tensor.requires_grad)
        twin.__class__ = type(tensor)
    memo[id(tensor)] = twin
    others = {name: value for name, value in vars(tensor).items() if name != _METHOD}
    vars(twin).update(copy.deepcopy(others, memo))
    vars(twin)[_METHOD] = _Copies(twin)
    if hasattr(tensor, "recorded_version"):
        twin.recorded_version = tensor.recorded_version - tensor._version + twin._version
    copied: Tensor = twin
    return copied
