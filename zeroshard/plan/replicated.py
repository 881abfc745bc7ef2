"""Frozen parameters that each rank holds whole at stage 3, by choice: they are never gathered."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import nn

from zeroshard.plan.names import describe_unfit, fitting

FrozenChoice = str | Sequence[str]
""""shard", "replicate", or patterns for the names of those to replicate."""


def find_replicated(
    root: nn.Module, choice: FrozenChoice, left_out: Container[nn.Parameter] = ()
) -> dict[nn.Parameter, str]:
    """The frozen parameters to replicate, with their first names.

    Args:
        root: the model.
        choice: the choice.
        left_out: parameters that are not sharded anyway.

    Raises:
        ValueError: a pattern fits no parameter, or trained ones alone.
    """
    named = root.named_parameters(remove_duplicate=False)
    names = {name: parameter for name, parameter in named if parameter not in left_out}
    found: dict[nn.Parameter, str] = {}
    if choice == "replicate":
        patterns: Sequence[str] = [name for name in names if not names[name].requires_grad]
    else:
        patterns = () if isinstance(choice, str) else choice
    for pattern in patterns:
        if not (own := fitting(pattern, names)):
            raise ValueError(f"config key 'frozen': {describe_unfit(pattern, names)}")
        if not (frozen := [name for name in own if not names[name].requires_grad]):
            raise ValueError(
                f"config key 'frozen': '{pattern}' fits trained parameters alone, such as '{own[0]}'; "
                "expected frozen ones, whose requires_grad is False before the model is sharded"
            )
        for name in frozen:
            found.setdefault(names[name], name)
    return found
