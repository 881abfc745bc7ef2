"""The hooks and attributes that sharding adds to the user's modules, so that they can be taken away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

_ABSENT = object()


class Changes:
    """The changes, in order."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._attributes: list[tuple[object, str, Any]] = []
        """(object, name, the value before); the value of the object itself, not of its class."""
        self._last: list[Callable[[], None]] = []

    def hook(self, *handles: RemovableHandle) -> None:
        """Note hooks that were registered."""
        self._hooks += handles

    def set(self, target: object, name: str, value: Any) -> None:
        """Give an object an attribute, which may hide an attribute of its class."""
        self._attributes.append((target, name, vars(target).get(name, _ABSENT)))
        object.__setattr__(target, name, value)

    def when_undone(self, act: Callable[[], None]) -> None:
        """Note a function to call when all else is undone."""
        self._last.append(act)

    def undo(self) -> None:
        """Remove the hooks and give back the attributes, the last one first."""
        for handle in self._hooks:
            handle.remove()
        for target, name, before in reversed(self._attributes):
            if before is not _ABSENT:
                object.__setattr__(target, name, before)
            elif name in vars(target):
                object.__delattr__(target, name)
        for act in self._last:
            act()
        self._hooks, self._attributes, self._last = [], [], []
