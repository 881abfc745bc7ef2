"""Attributes that users set on parameters (`p.no_decay = True`), carried over to their replacements."""

from __future__ import annotations

from torch import nn

from zeroshard.parameters.sharded import ShardedParameter

_OURS = frozenset(ShardedParameter.__annotations__) | {"recorded_version", "was", "note"}


def carry_attributes(source: nn.Parameter, *targets: nn.Parameter) -> None:
    """Give parameters the attributes of another one, except for attributes that zeroshard has set itself."""
    for name, value in vars(source).items():
        if name not in _OURS:
            for target in targets:
                setattr(target, name, value)
