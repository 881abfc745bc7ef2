"""The language in which a user names modules and parameters.

`ignored`, `frozen` and `precision.overrides` name parameters, also by modules around them. `tp_plan`, `units`
and `pipeline.split` name modules.

    "layers.0.norm.weight"        the full name of one: this one alone
    "*.norm*", "layers.*.router"  with *, ? or [: as in fnmatch, where * stands for dots as well
    "router", "layers.3"          other text: the same, also with "*." before it. It fits at any depth, and
                                  "layers.1" does not fit "layers.10"
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


def fitting(pattern: str, names: Collection[str], *, inside: bool = True) -> list[str]:
    """Return the names that a pattern fits, in order.

    Args:
        pattern: the pattern.
        names: the full names of all parameters, or modules, of the model.
        inside: True fits what is inside of a module that the pattern fits, too.
    """
    if pattern in names:
        return [pattern]
    form = f".{pattern}" if any(letter in pattern for letter in "*?[") else f"*.{pattern}"
    return [n for n in names if any(fnmatchcase(f".{at}", form) for at in (beginnings(n) if inside else [n]))]


def beginnings(name: str) -> Iterator[str]:
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
            raise ValueError(
                f"config key '{key}': the model has no parameter whose name fits {_told(pattern, names)}. "
                "Expected the name of a parameter or of a module, or a pattern such as '*.norm*'"
            )
        yield from ((pattern, name, names[name]) for name in found)


def _told(pattern: str, names: Iterable[str]) -> str:
    """A pattern that fits none of some names, for an error, and parts of names that are close to it."""
    parts = (part for name in names for part in (*beginnings(name), *name.split(".")))
    close = difflib.get_close_matches(pattern, dict.fromkeys(parts), n=3)
    return f"'{pattern}'" + (f"; close to it are {', '.join(map(repr, close))}" if close else "")


def find_modules(root: nn.Module, entries: Iterable[str]) -> Iterator[nn.Module]:
    """Find the modules that each entry of `units` names: by their class, or else by a pattern.

    Raises:
        ValueError: an entry names none.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    for entry in entries:
        of_class = [module for module in modules.values() if type(module).__name__ == entry]
        if not (found := of_class or [modules[name] for name in fitting(entry, modules, inside=False)]):
            told = _told(entry, (*modules, *(type(module).__name__ for module in root.modules())))
            raise ValueError(f"config key 'units': the model has no module whose class or name fits {told}")
        yield from found


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
