"""The operators that a piece of code calls."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Notes each operator that is called within it; on an accelerator each is about one kernel.

    with Operators() as operators:
        torch.ones(2) * 3
    assert operators.names == ["ones", "mul"]
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def num_kernels(self) -> int:
        """Operators that are no views."""
        views = {"as_strided", "slice", "view", "detach", "alias", "select", "split", "unsqueeze"}
        return sum(name not in views for name in self.names)
