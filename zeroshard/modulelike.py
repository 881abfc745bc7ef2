"""The part of an engine that stands for its model as a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

from torch import Tensor, nn


class ModuleLike(nn.Module):
    """A module whose parameters, buffers and modules are those of another one."""

    module: nn.Module
    """The model that was given."""
    unsharded: Callable[..., AbstractContextManager[None]]

    def _stand_for(self, module: nn.Module) -> None:
        """Stand for a module. It is shared, not registered: so names have no prefix."""
        self.module = module
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self.training = module.training

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the engine itself; nn.Module would register it in the model."""
        object.__setattr__(self, name, value)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, for the model as for any module."""
        self.module.train(mode)
        self.training = mode
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule of the model; get_parameter() and get_buffer() look there too."""
        return self.module.get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's slices under the original names; `full_state_dict()` has the whole model."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load full-shape tensors, the same on every rank; each keeps its slices.

        Raises:
            ValueError: `assign` is true, which would replace the sharded parameters.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the sharded parameters")
        with self.unsharded(write_back=True):
            return self.module.load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse `.to()`, `.half()`, `.cuda()`, which call this method.

        Raises:
            RuntimeError: always; flat buffers cannot be moved or cast under the optimizer.
        """
        raise RuntimeError(
            "a sharded model cannot be moved or cast: set Config(precision=...) for dtypes; initialize "
            "has moved the model to this rank's device"
        )
