"""The objects and settings that the units and buffers of one engine share, and its changes of modules."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.comm.mesh import Axes
from zeroshard.comm.streams import Streams
from zeroshard.parameters.state import ModuleState
from zeroshard.plan.buffers import Setting
from zeroshard.stores.store import TierMemory


@dataclass(slots=True)
class Meter:
    """Bytes of unsharded parameters that are not there at rest."""

    now: int = 0
    peak: int = 0

    def add(self, num_bytes: int) -> None:
        """Add bytes to the present number; a negative number takes them away."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The objects and settings that the units and buffers of one engine share."""

    axes: Axes
    setting: Setting
    device: torch.device
    streams: Streams
    memory: TierMemory
    meter: Meter = field(default_factory=Meter)
    state: ModuleState = field(default_factory=ModuleState)
    num_prefetch: int
    """The number of units that are gathered ahead."""
    output_dtype: torch.dtype | None
    """The dtype to which floating-point outputs of the root are cast; None: they stay as they are."""


ORDER = (
    *("codes", "divide", "cast", "random", "sequence", "loss", "lean", "tiles", "products", "compile"),
    *("fused attention", "recompute", "offload", "budget"),
)
"""The names of all that may lie around a forward, from the inside out: each stack is in this order."""


class Changes:
    """The hooks and attributes that sharding adds to the user's modules, taken back from the last one on."""

    def __init__(self) -> None:
        self._undo, self._last = ExitStack(), ExitStack()
        self.stacks = defaultdict[nn.Module, list[str]](list)
        """The names of what lies around the forward of each module, from the inside out, see `ORDER`."""

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

    def around(self, module: nn.Module, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
        """Put a function around the forward that a module has now; no other place replaces a forward.

        Args:
            module: the module.
            name: what the function does, one of `ORDER`.
            wrap: (forward) -> the function.
        """
        forward, stack = module.forward, self.stacks[module]
        self.set(module, "forward", functools.wraps(forward)(wrap(forward)))
        stack.append(name)
        assert stack == sorted(stack, key=ORDER.index), f"expected the order of ORDER, got {stack}"

    def when_undone(self, act: Callable[[], None]) -> None:
        """Note a function to call when all else is undone."""
        self._last.callback(act)

    def undo(self) -> None:
        """Remove the hooks and give back the attributes, the last one first."""
        self._undo.close()
        self._last.close()
        self.stacks.clear()
