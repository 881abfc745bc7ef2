"""The outputs of forwards, hooked so that the first gradient of one begins the backward of its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeroshard.internals.nested import find_tensors, view_tensors
from zeroshard.internals.warn import warn_user
from zeroshard.parameters.sharded import describe_unit
from zeroshard.sharding.unit import ForwardCall, Unit


class OutputHooks:
    """Hooks outputs.

    Args:
        before_backward: takes the call of an output when the gradient of that output arrives.
        before_layer: the same for a layer inside; the call may have been entered already.
    """

    def __init__(
        self,
        before_backward: Callable[[ForwardCall], None],
        before_layer: Callable[[ForwardCall], None],
    ) -> None:
        self._before_backward, self._before_layer = before_backward, before_layer
        self._has_warned = False

    def watch(self, unit: Unit, output: Any, *, is_root: bool) -> tuple[Any, bool]:
        """Hook the outputs of a forward that will have a backward.

        Returns:
            The output, and True if gradients may come back through an object that cannot be hooked.
        """
        if not torch.is_grad_enabled():
            return output, False
        tensors, is_opaque = find_tensors(output)
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        if any(tensor.is_leaf or tensor._backward_hooks for tensor in tensors):
            # A unit may return its input: two hooks of one tensor would run in the order of the forward. It
            # may return a parameter, which lives on: a hook on it would run in later backwards too.
            output = view_tensors(output)
            tensors = [tensor for tensor in find_tensors(output)[0] if tensor.requires_grad]
        if tensors:
            call, before_backward = unit.call, self._before_backward
            if unit.may_join_backward:
                unit.open_calls.add(call)

            def enter(gradient: Tensor) -> None:
                before_backward(call)

            for tensor in tensors:
                tensor.register_hook(enter)
        if is_opaque and not (is_root or unit.is_resident or self._has_warned):
            self._has_warned = True
            warn_user(
                f"{describe_unit(unit.name)} returns an object in which zeroshard cannot find the tensors: "
                "this unit, and others like it, stay gathered until the end of backward"
            )
        return output, is_opaque

    def watch_layer(self, unit: Unit, output: Any) -> None:
        """Hook a layer with parameters: its values may leave the unit beside the outputs, as in a cache."""
        if not isinstance(output, Tensor) or not output.requires_grad or torch.compiler.is_compiling():
            return
        call, before_layer = unit.call, self._before_layer

        def enter(gradient: Tensor) -> None:
            before_layer(call)

        output.register_hook(enter)
