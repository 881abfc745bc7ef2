"""The parts of a model that pipeline ranks hold, as one model in a checkpoint.

The first rank of each part tells all ranks what its part has; rank 0 writes it down as one model. A parameter
that several parts hold is that of the first one. Parameter groups stand one after another, since parts may
have made different ones: whoever loads finds hyperparameters by the names of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard.checkpoint.manifest import ParameterRecord
from zeroshard.checkpoint.optimizers import PER_GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """The content of one part of a model, without the values of its tensors."""

    parameters: dict[str, ParameterRecord]
    buffers: tuple[str, ...]
    frozen: list[str]
    """The frozen parameters that are left out."""
    extra: dict[str, Any]
    """The values that modules' get_extra_state() gave."""
    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]
    other: dict[str, Any]
    lr_scheduler: Any
    optimizer: str | None
    """The class of the optimizer."""


def join(parts: Sequence[PartFacts]) -> PartFacts:
    """Put the parts of a model together, in their order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    parameters: dict[str, ParameterRecord] = {}
    for part in parts:
        for name, record in part.parameters.items():
            known = parameters.get(name, record)
            aliases = dict.fromkeys((*known.aliases, *record.aliases))
            parameters[name] = ParameterRecord(known.shape, known.dtype, tuple(aliases), known.blocks)
    return PartFacts(
        parameters=parameters,
        buffers=tuple(dict.fromkeys(name for part in parts for name in part.buffers)),
        frozen=list(dict.fromkeys(name for part in parts for name in part.frozen)),
        extra=_first_of(part.extra for part in parts),
        groups=[group for part in parts for group in part.groups],
        scalars=_first_of(part.scalars for part in parts),
        other=_first_of(part.other for part in parts),
        lr_scheduler=_join_schedules([part.lr_scheduler for part in parts if part.lr_scheduler is not None]),
        optimizer=next((part.optimizer for part in parts if part.optimizer is not None), None),
    )


def _first_of(values: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The values by key; where several have a key, that of the first one."""
    joined: dict[str, Any] = {}
    for each in values:
        joined = {**each, **joined}
    return joined


def _join_schedules(states: Sequence[Any]) -> Any:
    """The state of the LR schedulers of all parts, with lists for the groups of all of them."""
    if len(states) < 2:
        return states[0] if states else None
    joined = dict(states[0])
    for key, value in joined.items():
        if key in PER_GROUP and isinstance(value, list):
            joined[key] = [item for state in states for item in state[key]]
        elif key == "_schedulers":
            joined[key] = [_join_schedules(group) for group in zip(*(s[key] for s in states), strict=True)]
    return joined
