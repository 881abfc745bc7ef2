"""Parameters and modules that a config names: ignored, replicated, or computed in another dtype.

A pattern fits a parameter by its full name, or by the name of a module around it:

    "layers.0.norm.weight"        the full name of a parameter: this one alone
    "*.norm*", "layers.*.router"  with *, ? or [: as in fnmatch, where * stands for dots as well
    "router", "layers.3"          other text: parts of the name between dots, one after the other. It fits at
                                  any depth, and "layers.1" does not fit "layers.10"
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate

import torch
from torch import nn

Ignored = dict[nn.Parameter, str]
"""Parameters that are not sharded, with their names: each rank keeps its own, whole."""

FrozenChoice = str | Sequence[str]
""""shard", "replicate", or patterns for the names of those to replicate."""

DtypesByName = Mapping[str, torch.dtype] | tuple[tuple[str, torch.dtype], ...] | None
"""Compute dtypes by pattern, in order; None for no pattern."""


@dataclass(frozen=True, slots=True)
class Cast:
    """The dtypes of the values that go into a module and come out of it.

    A module whose parameters all compute in a dtype that the user asked for is cast: it gets its float inputs
    in that dtype, and its outputs go back to the dtype of its inputs. A module that has other parameters,
    too, is left as it is, and its forward deals with two dtypes.
    """

    dtype: torch.dtype
    """The dtype of the parameters, and of the float inputs."""
    without: torch.dtype | None
    """The dtype of its outputs if no input is float, as of an embedding: the dtype that the parameters would
    have otherwise; inside of another module that is cast, `dtype`. None if the module around casts for it:
    then it holds no parameters, with which some models call a module directly."""


def fitting(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names of the parameters that a pattern fits, in order.

    Args:
        pattern: the pattern.
        names: the full names of all parameters of the model.
    """
    if pattern in names:
        return [pattern]
    if any(letter in pattern for letter in "*?["):
        return [n for n in names if any(fnmatchcase(part, pattern) for part in _beginnings(n))]
    return [name for name in names if f".{pattern}." in f".{name}."]


def _beginnings(name: str) -> Iterator[str]:
    """The names on the way to a name, which is the last: "a", "a.b" and "a.b.c"."""
    return accumulate(name.split("."), "{}.{}".format)


def find_parameters(
    root: nn.Module, patterns: Iterable[str] | None, key: str, left_out: Container[nn.Parameter] = ()
) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Find each pattern, in order, with the name and the parameter of all that it fits.

    Args:
        root: the model.
        patterns: the patterns; None for none.
        key: the config key of the patterns, for the error.
        left_out: parameters that no pattern fits.

    Raises:
        ValueError: a pattern fits none.
    """
    named = root.named_parameters(remove_duplicate=False)
    names = {name: parameter for name, parameter in named if parameter not in left_out}
    for pattern in patterns or ():
        if not (found := fitting(pattern, names)):
            parts = (part for name in names for part in (*_beginnings(name), *name.split(".")))
            close = difflib.get_close_matches(pattern, dict.fromkeys(parts), n=3)
            hint = f"; close to it are {', '.join(map(repr, close))}" if close else ""
            raise ValueError(
                f"config key '{key}': the model has no parameter whose name fits '{pattern}'{hint}. Expected "
                "the name of a parameter, as in named_parameters(), or of a module, or a pattern such as "
                "'*.norm*'"
            )
        yield from ((pattern, name, names[name]) for name in found)


def find_ignored(root: nn.Module, patterns: Sequence[str] | None) -> Ignored:
    """The parameters that patterns fit, with their first names; errors as in `find_parameters`."""
    found: Ignored = {}
    for _, name, parameter in find_parameters(root, patterns, "ignored"):
        found.setdefault(parameter, name)
    return found


def find_replicated(
    root: nn.Module, choice: FrozenChoice, left_out: Container[nn.Parameter] = ()
) -> set[nn.Parameter]:
    """The frozen parameters to replicate.

    Raises:
        ValueError: a pattern fits no parameter, or trained ones alone.
    """
    if isinstance(choice, str):
        frozen = {p for p in root.parameters() if not (p.requires_grad or p in left_out)}
        return frozen if choice == "replicate" else set()
    found = list(find_parameters(root, choice, "frozen", left_out))
    fits_frozen = {pattern for pattern, _, parameter in found if not parameter.requires_grad}
    for pattern, name, _ in found:
        if pattern not in fits_frozen:
            raise ValueError(
                f"config key 'frozen': '{pattern}' fits trained parameters alone, such as '{name}'; "
                "expected frozen ones, whose requires_grad is False before the model is sharded"
            )
    return {parameter for _, _, parameter in found if not parameter.requires_grad}


def find_overrides(
    root: nn.Module, overrides: DtypesByName, left_out: Container[nn.Parameter] = ()
) -> dict[nn.Parameter, torch.dtype]:
    """The compute dtypes of the parameters that patterns fit; for each parameter, the first one holds."""
    dtypes = dict(overrides or ())
    found: dict[nn.Parameter, torch.dtype] = {}
    for pattern, _, parameter in find_parameters(root, dtypes, "precision.overrides", left_out):
        found.setdefault(parameter, dtypes[pattern])
    return found
