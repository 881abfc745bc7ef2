"""The parameters of a module before it is sharded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True, slots=True)
class Original:
    """A parameter of the module before sharding, and every place that holds it."""

    parameter: nn.Parameter
    fqn: str
    owners: tuple[tuple[nn.Module, str], ...]
    """Pairs (module, attribute); several for a tied parameter."""

    @property
    def keeps_dtype(self) -> bool:
        """True for a parameter that keeps its dtype in forward: BatchNorm wants that of its statistics."""
        return any(computes_in_own_dtype(module) for module, _ in self.owners)


def computes_in_own_dtype(module: nn.Module) -> bool:
    """True for torch's BatchNorm: its inputs and parameters are not cast."""
    return isinstance(module, _BatchNorm)
