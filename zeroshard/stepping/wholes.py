"""Whole tensors for optimizers whose update of an element needs all elements of a matrix.

A step asks for the updates of all its matrices in one call, so that ranks may divide them. `owning.py` does
so where ranks share the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from zeroshard.parameters.sharded import ShardedParameter

Shape = tuple[int, ...]


class Key(NamedTuple):
    """Names a whole tensor in a call."""

    parameter: int
    """The number of its parameter in the call."""
    part: int
    """Its number among the tensors of the parameter."""


Compute = Callable[[list[Tensor], list[Key]], Sequence[Tensor]]
"""(whole tensors, their keys) -> the update of each, of its shape and dtype. The tensors are contiguous
copies on the device that computes, and may be changed."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """A tensor that is made only on ranks that compute with it, or send some of it."""

    make: Callable[[], Tensor]
    like: Tensor
    """A tensor of its shape, on its device."""
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape."""
        return self.like.shape


Given = Tensor | Deferred

Cost = Callable[[Shape], int]
"""(shape) -> the cost of the update of a tensor, in any unit."""


class Wholes(Protocol):
    """Computes updates from whole tensors."""

    def __call__(
        self,
        parameters: Sequence[Tensor],
        tensors: Sequence[Given],
        compute: Compute,
        *,
        shapes: Sequence[Sequence[Shape]] | None = None,
        cost: Cost = math.prod,
    ) -> list[Tensor]:
        """Return the updates of slices; collective, with the same parameters and shapes on all ranks.

        Args:
            parameters: the parameters. A rank may hold slices of them, [n].
            tensors: for each slice a tensor of its shape, of the same dtype on all ranks, or a deferred one.
                `compute` gets the whole of it.
            compute: the computation. A rank calls it for the tensors that it owns.
            shapes: the tensors that each parameter consists of, one after another in its memory. Each of them
                has an owner of its own. None: one, of the shape of the parameter.
            cost: the cost of an update; all ranks get the same costs if possible. The default is the number
                of elements.

        Returns:
            The update of each slice, of the shape, dtype and device of its tensor.

        Raises:
            ValueError: shapes that do not fill a parameter, or updates of other shapes or dtypes.
            RuntimeError: slices of a parameter whose other slices are not known.
        """


@runtime_checkable
class UsesWholes(Protocol):
    """An optimizer whose update of an element needs whole tensors.

    `compute` may keep state of a tensor on its owner: a tensor has the same owner in all steps. Checkpoints
    hold the states in `optimizer.state` that are element-wise or few values, and refuse others by their
    names. They know nothing of state that is kept elsewhere.
    """

    wholes_of: Wholes
    """The function that computes with whole tensors: `wholes_here` until ranks share the parameters."""


@torch.no_grad()
def wholes_here(
    parameters: Sequence[Tensor],
    tensors: Sequence[Given],
    compute: Compute,
    *,
    shapes: Sequence[Sequence[Shape]] | None = None,
    cost: Cost = math.prod,
) -> list[Tensor]:
    """`Wholes` for a process that holds every parameter whole."""
    for parameter in parameters:
        if isinstance(parameter, ShardedParameter) and parameter.is_partial:
            raise RuntimeError(
                f"updates from whole parameters: this rank holds a slice of '{parameter.fqn}'. Hand the "
                "optimizer to zeroshard.initialize, or to attach() of what zeroshard.shard returns"
            )
    asked = shapes_asked(parameters, shapes)
    keys = [Key(number, part) for number, own in enumerate(asked) for part in range(len(own))]
    wholes = [
        whole for tensor, own in zip(tensors, asked, strict=True) for whole in divide(made(tensor), own)
    ]
    updates = iter(checked_updates(compute, wholes, keys))
    return [
        join([next(updates) for _ in own]).view(tensor.shape)
        for tensor, own in zip(tensors, asked, strict=True)
    ]


def made(tensor: Given) -> Tensor:
    """Return a tensor, which is made now if it is deferred."""
    return tensor.make() if isinstance(tensor, Deferred) else tensor.detach()


def whole_shape(parameter: Tensor) -> Shape:
    """Return the shape of the parameter of the model, of which a rank may hold a slice."""
    return tuple(parameter.full_shape if isinstance(parameter, ShardedParameter) else parameter.shape)


def name_of(parameter: Tensor, otherwise: str = "a parameter") -> str:
    """Return the name of a parameter for messages, or something else if it has none."""
    return f"'{parameter.fqn}'" if isinstance(parameter, ShardedParameter) else otherwise


def shapes_asked(
    parameters: Sequence[Tensor], shapes: Sequence[Sequence[Shape]] | None
) -> list[tuple[Shape, ...]]:
    """Return the shapes of the tensors of each parameter.

    Raises:
        ValueError: they do not fill the parameter.
    """
    if shapes is None:
        return [(whole_shape(parameter),) for parameter in parameters]
    asked = [tuple(tuple(shape) for shape in own) for own in shapes]
    for parameter, own in zip(parameters, asked, strict=True):
        if sum(map(math.prod, own)) != math.prod(whole_shape(parameter)):
            raise ValueError(
                f"updates from whole tensors: expected shapes that fill {name_of(parameter)} of shape "
                f"{whole_shape(parameter)}, got {list(own)}"
            )
    return asked


def divide(whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Copy the tensors of a parameter into memory of their own.

    Each begins at an address that the allocator gives, at any number of ranks: kernels may sum in another
    order at another alignment.
    """
    pieces = whole.reshape(-1).split([math.prod(shape) for shape in shapes])
    return [piece.clone().view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def join(updates: Sequence[Tensor]) -> Tensor:
    """Return updates one after another, [n]."""
    flat = [update.reshape(-1) for update in updates]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def checked_updates(compute: Compute, wholes: list[Tensor], keys: list[Key]) -> list[Tensor]:
    """Call `compute`, unless there is nothing to compute.

    Raises:
        ValueError: it returns another number of updates, or updates of other shapes or dtypes.
    """
    if not wholes:
        return []
    forms = [(whole.shape, whole.dtype) for whole in wholes]
    updates = list(compute(wholes, keys))
    found = [(update.shape, update.dtype) for update in updates]
    if found != forms:
        number = next((at for at, (a, b) in enumerate(zip(found, forms, strict=False)) if a != b), None)
        told = f"{len(forms)} updates, got {len(found)}"
        if number is not None:
            (shape, dtype), (other_shape, other_dtype) = forms[number], found[number]
            told = f"{list(shape)} {dtype} for {keys[number]}, got {list(other_shape)} {other_dtype}"
        raise ValueError(f"updates from whole tensors: expected {told}")
    return updates
