"""Parameters and modules that a config names: ignored, replicated, or computed in another dtype.

A pattern fits a parameter by its full name, or by the name of a module around it:

    "layers.0.norm.weight"        the full name of a parameter: this one alone
    "*.norm*", "layers.*.router"  with *, ? or [: as in fnmatch, where * stands for dots as well
    "router", "layers.3"          other text: parts of the name between dots, one after the other. It fits at
                                  any depth, and "layers.1" does not fit "layers.10"
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from zeroshard.config.checked import show

Ignored = dict[nn.Parameter, str]
"""Parameters that are not sharded, with their names: each rank keeps its own, whole."""

FrozenChoice = str | Sequence[str]
""""shard", "replicate", or patterns for the names of those to replicate."""

DtypesByName = Mapping[str, torch.dtype] | tuple[tuple[str, torch.dtype], ...] | None
"""Compute dtypes by pattern, in order; None for no pattern."""

_OVERRIDES = "precision.overrides"


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
        return [n for n in names if any(fnmatchcase(part, pattern) for part in (n, *_modules_around(n)))]
    return [name for name in names if f".{pattern}." in f".{name}."]


def select(pattern: str, names: Collection[str], key: str) -> list[str]:
    """Return the names that a pattern fits, as `fitting` does; raise ValueError where there is none.

    Args:
        pattern: the pattern.
        names: the full names of all parameters of the model.
        key: the config key of the pattern, for the error.
    """
    if found := fitting(pattern, names):
        return found
    parts = (part for name in names for part in (name, *_modules_around(name), *name.split(".")))
    close = difflib.get_close_matches(pattern, dict.fromkeys(parts), n=3)
    known = ", ".join(map(repr, close)) or f"{next(iter(names), 'none')!r}, the first of all"
    hint = f"close to it are {known}" if close else f"names are as in named_parameters(): {known}"
    raise ValueError(
        f"config key '{key}': the model has no parameter whose name fits '{pattern}'; {hint}. Expected the "
        "name of a parameter or of a module, or a pattern such as '*.norm*'"
    )


def _modules_around(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def find_ignored(root: nn.Module, patterns: Sequence[str] | None) -> Ignored:
    """The parameters that patterns fit. Raises ValueError for a pattern that fits none."""
    named = dict(root.named_parameters(remove_duplicate=False))
    ignored: Ignored = {}
    for pattern in patterns or ():
        for name in select(pattern, named, "ignored"):
            ignored.setdefault(named[name], name)
    return ignored


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
        own = select(pattern, names, "frozen")
        if not (frozen := [name for name in own if not names[name].requires_grad]):
            raise ValueError(
                f"config key 'frozen': '{pattern}' fits trained parameters alone, such as '{own[0]}'; "
                "expected frozen ones, whose requires_grad is False before the model is sharded"
            )
        for name in frozen:
            found.setdefault(names[name], name)
    return found


def find_overrides(
    root: nn.Module, overrides: DtypesByName, left_out: Container[nn.Parameter] = ()
) -> dict[nn.Parameter, torch.dtype]:
    """The compute dtypes of the parameters that patterns fit; for each name, the first pattern holds.

    Args:
        root: the model.
        overrides: the dtypes by pattern.
        left_out: parameters that keep their dtype.

    Raises:
        ValueError: a pattern fits no parameter, or the names of a tied parameter get different dtypes.
    """
    patterns = dict(overrides or ())
    if not patterns:
        return {}
    named = root.named_parameters(remove_duplicate=False)
    names = {name: parameter for name, parameter in named if parameter not in left_out}
    by_name: dict[str, torch.dtype] = {}
    for pattern, dtype in patterns.items():
        for name in select(pattern, names, _OVERRIDES):
            by_name.setdefault(name, dtype)
    found: dict[nn.Parameter, torch.dtype] = {}
    firsts: dict[nn.Parameter, str] = {}
    for name, parameter in names.items():
        if name not in by_name:
            continue
        dtype = by_name[name]
        first = firsts.setdefault(parameter, name)
        if found.setdefault(parameter, dtype) != dtype:
            raise ValueError(
                f"config key '{_OVERRIDES}': '{first}' and '{name}' are one parameter, and patterns give it "
                f"{show(found[parameter])} and {show(dtype)}; expected one dtype"
            )
    return found


def find_casts(
    root: nn.Module,
    overrides: Mapping[nn.Parameter, torch.dtype],
    param_dtype: torch.dtype | None,
    parts: Container[nn.Module] = (),
) -> dict[nn.Module, Cast]:
    """The modules that are cast, and all modules inside.

    Args:
        root: the model.
        overrides: the compute dtypes of some parameters.
        param_dtype: the compute dtype of the others; None: their own.
        parts: modules of which this rank has a part only, which are not cast as a whole.
    """
    casts: dict[nn.Module, Cast] = {}

    def collect(module: nn.Module) -> None:
        dtypes = {overrides.get(parameter) for parameter in module.parameters()}
        dtype = dtypes.pop() if len(dtypes) == 1 else None  # the one that patterns give to all of them
        is_called = type(module).forward is not nn.Module.forward  # a list of modules is not
        if dtype is None or not is_called or module in parts:
            for child in module.children():
                collect(child)
            return
        for part in module.modules():
            own = next(part.parameters(recurse=False), None)
            given = own if own is not None else next(module.parameters())
            inside = casts[part].without if part in casts else dtype if own is not None else None
            casts[part] = Cast(dtype, param_dtype or given.dtype if part is module else inside)

    if overrides:
        collect(root)
    return casts
