"""Tensors inside what a forward takes and returns: containers, dataclasses, nested in any way."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def find_tensors(value: Any) -> tuple[list[Tensor], bool]:
    """All tensors in nested containers and dataclasses.

    Returns:
        The tensors, and whether something was found that cannot be looked into and may hide more.
    """
    if type(value) is Tensor:
        return [value], False
    tensors: list[Tensor] = []
    is_opaque = False
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found, opaque = find_tensors([getattr(leaf, field.name) for field in fields(leaf)])
            tensors += found
            is_opaque |= opaque
        elif not isinstance(leaf, _PLAIN):
            is_opaque = True
    return tensors, is_opaque


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in nested containers, in `dtype`."""

    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype
        return leaf.to(dtype) if is_float else leaf

    return pytree.tree_map(cast, value)


def view_tensors(value: Any) -> Any:
    """The same nested value with new tensor objects, views of the old ones, that autograd tells apart."""

    def view(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.view_as(leaf) if leaf.requires_grad else leaf
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return replace(
                leaf, **{f.name: view_tensors(getattr(leaf, f.name)) for f in fields(leaf) if f.init}
            )
        return leaf

    return pytree.tree_map(view, value)
