"""The likeness of modules: facts that tell whether two blocks of a model take the same time.

Facts are classes, shapes, dtypes and settings of a module and of all modules in it. An object of an unknown
class equals only itself. So two blocks are alike only if they surely are, and a doubt costs a measurement.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_INTERNAL = frozenset(vars(nn.Module()))
_PLACE = "layer_idx"
"""The number of a block, as models of transformers keep it: it differs between blocks that are alike."""
_PLAIN = (bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, type(None))


def likeness_of(module: nn.Module) -> Hashable:
    """Return facts that are equal for modules of the same classes, shapes and settings."""
    return tuple((name, _own_facts(part)) for name, part in module.named_modules())


def facts_of(value: Any) -> Hashable:
    """Return facts of an argument or a setting: the form of a tensor, the value of a number or a text."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.requires_grad
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(facts_of, value))
    if isinstance(value, Mapping):
        return type(value), tuple((facts_of(key), facts_of(item)) for key, item in value.items())
    if isinstance(value, partial):
        return partial, value.func, facts_of(value.args), facts_of(value.keywords)
    return id(value)


def _own_facts(module: nn.Module) -> Hashable:
    known = _INTERNAL | {_PLACE}
    settings = [(key, facts_of(value)) for key, value in sorted(vars(module).items()) if key not in known]
    return (
        type(module),
        module.training,
        tuple(settings),
        facts_of(dict(module._parameters)),
        facts_of(dict(module._buffers)),
    )
