"""Bytes of the tensors that operations have made and that are still alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.internals import pytree


class LiveBytes(TorchDispatchMode):
    """Counts the storages of the results of operations, each once, on any device.

    Args:
        left_out: tensors whose storages do not count, such as parameters.
    """

    def __init__(self, left_out: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are alive."""
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in left_out:
            self._note(tensor.untyped_storage(), 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note its results."""
        results = func(*args, **(kwargs or {}))
        for result in pytree.tree_leaves(results):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                self._note(storage, storage.nbytes())
        return results

    def _note(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        # The storage of a tensor is one Python object while it lives, so its id is its own.
        key = id(storage)
        if key in self._alive:
            return

        def forget(_: Any) -> None:
            del self._alive[key]
            self.now -= num_bytes

        self._alive[key] = weakref.ref(storage, forget)
        self.now += num_bytes
