"""Parameters that are not sharded: each rank keeps its own, whole, in the modules and in the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

Ignored = dict[nn.Parameter, str]
"""Parameters that stay as they are, with their names."""


def find_ignored(root: nn.Module, patterns: Sequence[str] | None) -> Ignored:
    """The parameters with a name that fits a pattern.

    Args:
        patterns: names, with * and ? for any letters.

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
