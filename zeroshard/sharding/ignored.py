"""Parameters that are not sharded: each rank keeps its own, whole, in the modules and in the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from zeroshard.sharding.deferred import has_memory, values_of
from zeroshard.sharding.parameter import ShardedParameter

Ignored = dict[nn.Parameter, str]
"""Parameters that stay as they are, with their names."""


def find_ignored(root: nn.Module, patterns: Sequence[str] | None) -> Ignored:
    """The parameters of which a name fits a pattern.

    Args:
        patterns: of names, with * and ? for any letters.

    Raises:
        ValueError: a pattern that no name fits.
    """
    ignored: Ignored = {}
    for pattern in patterns or ():
        fits = [
            (parameter, name)
            for name, parameter in root.named_parameters(remove_duplicate=False)
            if fnmatchcase(name, pattern)
        ]
        if not fits:
            first = next((name for name, _ in root.named_parameters()), "none")
            raise ValueError(
                f"config key 'ignored': the model has no parameter whose name fits '{pattern}'; names are as "
                f"in named_parameters(), such as '{first}', and patterns may have * in them"
            )
        for parameter, name in fits:
            ignored.setdefault(parameter, name)
    return ignored


@torch.no_grad()
def place_ignored(ignored: Ignored, device: torch.device) -> None:
    """Move ignored parameters to the device; those whose values were deferred get them, on each rank."""
    for parameter in ignored:
        data = parameter.detach() if has_memory(parameter) else values_of(parameter.detach())
        if data.device != parameter.device or data.device != device:
            parameter.data = data.to(device)


def only_sharded(parameters: Iterable[nn.Parameter]) -> list[ShardedParameter]:
    """Of the parameters of an optimizer's group, those that are sharded."""
    return [parameter for parameter in parameters if isinstance(parameter, ShardedParameter)]
