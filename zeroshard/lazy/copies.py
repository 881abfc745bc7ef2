"""Copies of a model without memory have its values: torch would copy shapes, and drop where values come from.

    copy.deepcopy(model)     a parameter of the copy is read from the same part of the same file, or computed
                             by the same operations
    pickle, torch.save       refused

`copy` asks a module for a method `__deepcopy__`. The modules of a model that was built without memory have
one each, up to `initialize`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.lazy.deferred import defer, deferred_of, readable
from zeroshard.lazy.recorder import Recorder

_METHOD = "__deepcopy__"


def guard_copies(modules: Iterable[nn.Module]) -> None:
    """Let copies of modules keep the values of tensors without memory."""
    for module in modules:
        vars(module).setdefault(_METHOD, _Copies(module))


def release_copies(root: nn.Module) -> None:
    """Let torch copy the modules of a model again, which has memory now."""
    for module in root.modules():
        if isinstance(vars(module).get(_METHOD), _Copies):
            del vars(module)[_METHOD]


class _Copies:
    """Copies a module, without keeping it alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        module = self._module()
        assert module is not None, "it is being copied"
        for tensor in _tensors(module):
            if id(tensor) not in memo and deferred_of(tensor) is not None:
                memo[id(tensor)] = _copy(tensor, memo)
        del vars(module)[_METHOD]
        try:
            twin = copy.deepcopy(module, memo)
        finally:
            vars(module)[_METHOD] = self
        guard_copies([twin])
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a model without memory cannot be pickled, as its values are in files or yet to be computed: "
            "pickle it after engine.close(), or save engine.full_state_dict() (called on all ranks)"
        )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters, buffers and plain attributes of a module."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))


def _copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a tensor of the same kind, without memory, with the same values."""
    source = readable(tensor)
    if source is None:
        with torch.no_grad(), Recorder(draw=True, adopts_meta=False):
            twin = tensor.detach().clone()
    else:
        twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        defer(twin, copy.copy(source))
    if not isinstance(tensor, nn.Parameter):
        return twin
    made: Any = nn.Parameter(twin, tensor.requires_grad)
    made.__class__ = type(tensor)
    memo[id(tensor)] = made
    vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(tensor).items()})
    if hasattr(tensor, "recorded_version"):
        made.recorded_version = tensor.recorded_version - tensor._version + made._version
    copied: nn.Parameter = made
    return copied
