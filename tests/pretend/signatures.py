"""Tell from an operation's schema which memory it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.pretend.memory import Span

ALLOCATE_ONLY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
NO_KERNEL = frozenset(
    f"aten::{name}"
    for name in (
        "_has_compatible_shallow_copy_type",
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "detach_",
        "is_same_size",
        "lift",
        "resize_",
        "set_",
        "squeeze_",
        "t_",
        "transpose_",
        "unsqueeze_",
    )
)
READ_BACK = frozenset(
    f"aten::{name}" for name in ("_local_scalar_dense", "equal", "nonzero", "masked_select")
)
"""Operations whose result the host needs before it goes on."""

COPIES = frozenset(("aten::copy_", "aten::_foreach_copy_"))
"""Operations that move values between device and host."""


class Signature(NamedTuple):
    """An operation's schema, as far as memory is concerned."""

    name: str
    arguments: tuple[tuple[int, str, bool], ...]
    """Of those that hold tensors: position, name, and True when it is written."""
    says_nothing: bool
    """True for a view, and for a collective, which the transport notes."""


@cache
def signature_of(func: torch._ops.OpOverload) -> Signature:
    schema = func._schema
    arguments = tuple(
        (position, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for position, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type)
    )
    is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    is_view = is_view and not any(writes for _, _, writes in arguments) and schema.name != "aten::lift_fresh"
    return Signature(schema.name, arguments, is_view or schema.name.startswith("c10d"))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, and in the lists and tuples in it; those of the pretend device."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type == "cpu":
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


class Region(NamedTuple):
    """A range of bytes of a storage."""

    storage: torch.UntypedStorage
    span: Span

    @property
    def key(self) -> int:
        """The address of the storage's C++ object."""
        key: int = self.storage._cdata
        return key


def regions_of(value: Any) -> list[Region]:
    """The memory of the tensors in a value, and in the lists and tuples in it."""
    return [_region(tensor) for tensor in tensors_of(value)]


def _region(tensor: Tensor) -> Region:
    last = tensor.numel() - 1
    if last >= 0 and not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return Region(tensor.untyped_storage(), Span(start * size, (start + last + 1) * size))
