"""A batch is cut into the micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def split_batch(value: Any, num_pieces: int) -> list[Any]:
    """Cut every tensor along dim 0; a scalar goes to every piece.

    Raises:
        ValueError: a batch that does not divide, or of a type that may hide tensors.
    """
    if isinstance(value, Mapping):
        columns = {key: split_batch(item, num_pieces) for key, item in value.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(num_pieces)]
    if isinstance(value, list | tuple):
        items = [split_batch(item, num_pieces) for item in value]
        build = getattr(type(value), "_make", type(value))  # a named tuple's constructor is another
        return [build(item[i] for item in items) for i in range(num_pieces)]
    if value is None or isinstance(value, bool | int | float | str) or num_pieces == 1:
        return [value] * num_pieces
    if not isinstance(value, Tensor):
        raise ValueError(
            "expected a batch of tensors, or tuples, lists or mappings of them, to cut into micro-batches, "
            f"got {type(value).__name__}"
        )
    if not value.dim():
        return [value] * num_pieces
    if value.shape[0] % num_pieces:
        raise ValueError(
            f"expected a batch whose dim 0 is a multiple of gradient_accumulation_steps={num_pieces}, "
            f"got shape {tuple(value.shape)}"
        )
    return list(value.chunk(num_pieces))
