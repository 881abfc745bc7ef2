"""Values that torch.load(weights_only=True) can load: nothing that would run code."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def to_bytes(values: Mapping[str, Any]) -> bytes:
    """`values` as torch.save writes them."""
    stream = io.BytesIO()
    torch.save(dict(values), stream)
    return stream.getvalue()


def read(file: Path) -> Any:
    """What `to_bytes` made.

    Raises:
        RuntimeError: the file is damaged, or holds more than plain values and tensors.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or crafted pickle ends in
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RuntimeError(
            f"{file}: expected tensors and plain values, could not be read: {reason}"
        ) from None


def check_plain(values: Any, name: str) -> None:
    """Whether values can be loaded again without running code.

    Args:
        name: of the values, for the message.

    Raises:
        ValueError: naming the first key whose value can't be.
    """
    if (key := _find_foreign(values, "")) is not None:
        path, value = key
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ValueError(
            f"{name}{path}: expected tensors, numbers, strings, None, and lists, tuples and dicts of them, "
            f"which load without running code; came {kind}"
        )


def _without_scalars(value: Any) -> Any:
    """`value` without what loads for sure and takes long to try: an optimizer's step of every parameter."""
    if type(value) is Tensor and not value.dim() and not vars(value):
        return None
    if type(value) is dict:
        return {key: _without_scalars(item) for key, item in value.items()}
    return value


def _find_foreign(value: Any, path: str) -> tuple[str, Any] | None:
    if _loads(_without_scalars(value)):
        return None
    if isinstance(value, Mapping):
        parts = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        parts = []
    found = (_find_foreign(item, path + step) for step, item in parts)
    return next((hit for hit in found if hit is not None), (path, value))


def _loads(value: Any) -> bool:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception:  # whatever a foreign object's pickling raises
        return False
    return True
