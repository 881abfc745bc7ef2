"""The hooks and attributes that sharding adds to the user's modules, so that they can be taken away again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.utils.hooks import RemovableHandle


class Changes:
    """The changes, taken back from the last one to the first."""

    def __init__(self) -> None:
        self._undo, self._last = ExitStack(), ExitStack()

    def hook(self, *handles: RemovableHandle) -> None:
        """Note hooks that were registered."""
        for handle in handles:
            self._undo.callback(handle.remove)

    def set(self, target: object, name: str, value: Any) -> None:
        """Give an object an attribute, which may hide an attribute of its class."""
        own = vars(target)
        if name in own:
            self._undo.callback(object.__setattr__, target, name, own[name])
        else:
            self._undo.callback(own.pop, name, None)
        object.__setattr__(target, name, value)

    def when_undone(self, act: Callable[[], None]) -> None:
        """Note a function to call when all else is undone."""
        self._last.callback(act)

    def undo(self) -> None:
        """Remove the hooks and give back the attributes, the last one first."""
        self._undo.close()
        self._last.close()
