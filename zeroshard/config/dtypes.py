"""Dtypes by name, also where torch is not loaded, which takes seconds.

An estimate of a number of parameters computes with names and sizes of dtypes alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class DtypeSize:
    """What a plan asks of a dtype of torch; equal to the dtype with its name."""

    name: str
    itemsize: int

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def dtype_of(name: str) -> Any:
    """Return the floating-point dtype with a name; its `DtypeSize` as long as nobody has loaded torch."""
    torch = sys.modules.get("torch")
    return DtypeSize(name, _SIZES[name]) if torch is None else getattr(torch, name)


def is_dtype(value: object) -> bool:
    """True for a dtype of torch, and for its size."""
    return isinstance(value, DtypeSize) or repr(type(value)) == "<class 'torch.dtype'>"


def widened(dtype: torch.dtype) -> Any:
    """Return a dtype, but at least float32."""
    if isinstance(dtype, DtypeSize):
        return max(dtype, dtype_of("float32"), key=lambda one: one.itemsize)
    import torch

    return torch.promote_types(dtype, torch.float32)
