"""Values that a user keeps in a checkpoint become plain ones, which load without running code.

given                                       comes back as
numbers, strings, bytes, None, tensors      the same
lists, tuples, dicts, sets of them          the same; subclasses of dict and list as dict and list
numbers and strings of NumPy                numbers and strings of Python
arrays of NumPy                             tensors
paths                                       strings
enums                                       their values
dataclasses                                 dicts, by the names of their fields
NamedTuples                                 tuples
"""

from __future__ import annotations

import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor

from zeroshard.checkpoint.values import MAX_DEPTH

_KEPT = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
_KEPT_DICTS = (dict, OrderedDict, Counter)


def to_plain(value: Any, path: str, depth: int = 0) -> Any:
    """`value` as the table above says; other values as they are: `check_plain` tells whether they load.

    Args:
        value: given by the user; not changed.
        path: of the value, for errors.
        depth: of containers around it.

    Raises:
        ValueError: it is nested too deeply, or holds itself; two keys of a dict become the same; or a tensor
            is on the meta device.
    """
    if depth > MAX_DEPTH - 5:  # what is around it in a file takes some
        raise ValueError(
            f"{path}: expected values nested at most {MAX_DEPTH - 5} deep, and no value that holds itself"
        )
    if isinstance(value, Tensor):
        if value.is_meta:
            raise ValueError(f"{path}: expected a tensor with values, got one on the meta device")
        return value
    if type(value) in _KEPT:
        return value
    if isinstance(value, Enum):
        return to_plain(value.value, path, depth + 1)
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return {key: to_plain(item, f"{path}.{key}", depth + 1) for key, item in named.items()}
    if isinstance(value, Mapping):
        return _plain_dict(value, path, depth)
    if isinstance(value, list | tuple | set | frozenset):
        items = [
            item if type(item) in _KEPT else to_plain(item, f"{path}[{index}]", depth + 1)
            for index, item in enumerate(value)
        ]
        return next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))(items)
    return _plain_atom(value, path)


def _plain_dict(value: Mapping[Any, Any], path: str, depth: int) -> Any:
    plain: Any = type(value)() if type(value) in _KEPT_DICTS else {}
    for key, item in value.items():
        name = to_plain(key, f"{path}: the key {key!r:.100}", depth + 1)
        if name in plain:
            raise ValueError(f"{path}: expected different keys, got two that are both saved as {name!r:.100}")
        plain[name] = to_plain(item, f"{path}[{key!r:.100}]", depth + 1)
    return plain


def _plain_atom(value: Any, path: str) -> Any:
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.ndarray):
            try:
                return torch.from_numpy(value.copy())
            except TypeError as error:
                raise ValueError(f"{path}: expected an array of numbers: {error}") from None
        if isinstance(value, numpy.generic):
            return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kinds: tuple[Callable[[Any], Any], ...] = (str, bytes, int, float, complex)
    return next((kind(value) for kind in kinds if isinstance(value, cast(type, kind))), value)
