"""Tensors inside the inputs and outputs of a forward: containers, dataclasses, objects, nested in any way."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeroshard.internals import pytree
from zeroshard.internals.objects import look_into, twin_of

_PLAIN = frozenset(
    (str, bytes, int, float, complex, bool, range, type(None), type(...), torch.dtype, torch.device)
)
"""Types without attributes; their subclasses may have some."""
MAX_OBJECTS = 10_000
"""The most objects that are looked through."""


def find_tensors(value: Any) -> tuple[list[Tensor], bool]:
    """Find all tensors in nested containers, dataclasses and objects with attributes.

    Returns:
        The tensors, and True if an object cannot be looked into and may hide more.
    """
    if type(value) is Tensor:
        return [value], False
    tensors: list[Tensor] = []
    seen: set[int] = set()
    is_opaque = False
    to_visit = pytree.tree_leaves(value)
    for leaf in to_visit:  # the list grows in the loop
        if type(leaf) in _PLAIN or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif not isinstance(leaf, type | np.generic):
            parts = _parts(leaf) if len(seen) <= MAX_OBJECTS else None
            is_opaque |= parts is None
            to_visit += pytree.tree_leaves(parts)
    return tensors, is_opaque


def _parts(leaf: Any) -> list[Any] | None:
    """The values inside an object; None if it may hide some, as a function and a module do."""
    return look_into(leaf) if is_dataclass(leaf) or not callable(leaf) else None


def cast_floats(
    value: Any,
    dtype: torch.dtype,
    *,
    in_lists: bool = True,
    done: dict[int, tuple[Tensor, Tensor]] | None = None,
) -> Any:
    """Cast floating-point tensors in nested containers and dataclasses to `dtype`.

    Args:
        in_lists: True also casts in lists and mappings, which become copies: later additions to them are
            lost.
        done: tensors and their casts, by id: a tensor that is found twice becomes one object.
    """
    done = {} if done is None else done

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = tensor, tensor.to(dtype)
        return done[id(tensor)][1]

    return _map(value, cast, None if in_lists else lambda part: isinstance(part, list | Mapping))


def cast_inputs(
    module: torch.nn.Module, args: Any, kwargs: Any, *, dtype: torch.dtype, in_lists: bool = True
) -> tuple[Any, Any]:
    """Cast float tensors among the inputs to `dtype`: a forward pre-hook.

    Args:
        in_lists: True also casts in lists and mappings. Blocks hand on lists to which later blocks add.
    """
    # A tensor that is given twice stays one: MultiheadAttention asks if query, key and value are one.
    cast = functools.partial(cast_floats, dtype=dtype, in_lists=in_lists, done={})
    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}


def view_tensors(value: Any) -> Any:
    """Return the nested value with views of its tensors, inside objects too; autograd tells views apart."""
    return copy_tensors(value, lambda t: t.requires_grad, copying=lambda t: t.view_as(t))


def cast_outputs(value: Any, dtype: torch.dtype | None) -> Any:
    """Return the nested value with floating-point tensors in `dtype`, or as they are; inside objects too."""
    if dtype is None:
        return value
    return copy_tensors(
        value, lambda t: t.is_floating_point() and t.dtype != dtype, copying=lambda t: t.to(dtype)
    )


def copy_tensors(
    value: Any, which: Callable[[Tensor], bool], *, copying: Callable[[Tensor], Tensor] = Tensor.clone
) -> Any:
    """Return the nested value with copies of some tensors; gradients flow through the copies.

    A container or object with such a tensor in it becomes a twin: other holders of it see no change. An
        object without one stays the same object.
    """
    if type(value) is Tensor:
        return copying(value) if which(value) else value
    chosen = {id(tensor): tensor for tensor in find_tensors(value)[0] if which(tensor)}
    return _Copies(chosen, copying).of(value) if chosen else value


class _Copies:
    """Copies of some tensors. A recursive function would keep them until the next garbage collection."""

    def __init__(self, chosen: Mapping[int, Tensor], copying: Callable[[Tensor], Tensor]) -> None:
        self._chosen, self._copying = chosen, copying
        self._done: dict[int, Any] = {}

    def of(self, part: Any) -> Any:
        """The part, or its twin with copies."""
        if type(part) in _PLAIN or isinstance(part, type):
            return part
        done = self._done
        if id(part) not in done:
            done[id(part)] = part  # a cycle leads to the first twin
            if isinstance(part, Tensor):
                done[id(part)] = self._copying(part) if id(part) in self._chosen else part
            elif (inside := _inside(part)) and any(self.of(each) is not each for each in inside):
                done[id(part)] = _twin(part, self.of)
        return done[id(part)]


def _inside(part: Any) -> list[Any] | None:
    if pytree.tree_is_leaf(part):
        return _parts(part)
    return _children(part)[0]


def _children(node: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The values in a container that torch knows, and a function that makes a container of other values."""
    children, structure = pytree.tree_flatten(node, is_leaf=lambda part: part is not node)
    return children, functools.partial(pytree.tree_unflatten, treespec=structure)


def _twin(part: Any, change: Callable[[Any], Any]) -> Any:
    if pytree.tree_is_leaf(part):
        return twin_of(part, change)
    children, make = _children(part)
    return make([change(child) for child in children])


def _map(value: Any, change: Callable[[Tensor], Tensor], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Change tensors; a part without a changed tensor stays the same object."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if not is_dataclass(leaf) or isinstance(leaf, type) or (is_leaf is not None and is_leaf(leaf)):
            return leaf
        names = [field.name for field in fields(leaf) if hasattr(leaf, field.name)]
        values = {name: getattr(leaf, name) for name in names}
        changed = {name: _map(part, change, is_leaf) for name, part in values.items()}
        if all(changed[name] is part for name, part in values.items()):
            return leaf
        twin = copy.copy(leaf)
        for name, part in changed.items():
            object.__setattr__(twin, name, part)
        return twin

    leaves, structure = pytree.tree_flatten(value, is_leaf)
    changed = [visit(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(changed, structure)
