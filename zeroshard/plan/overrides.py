"""Parameters and modules that compute in another dtype than the rest, by names that the user gives.

A module whose parameters all compute in one such dtype is *cast*: it gets its float inputs in that dtype, and
its outputs go back to the dtype of its inputs. A module that has other parameters besides is left as it is,
and its forward deals with two dtypes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.plan.names import describe_unfit, fitting
from zeroshard.plan.originals import computes_in_own_dtype

DtypesByName = Mapping[str, torch.dtype] | tuple[tuple[str, torch.dtype], ...] | None
"""Compute dtypes by pattern, in order; None for no pattern."""

_KEY = "config key 'precision.overrides'"


@dataclass(frozen=True, slots=True)
class Cast:
    """The dtypes of the values that go into a module and come out of it."""

    dtype: torch.dtype
    """The dtype of the parameters, and of the float inputs."""
    without: torch.dtype
    """The dtype that the parameters would have otherwise. A module without float inputs, such as an
    embedding, gives its outputs in it."""
    is_outermost: bool
    """True if the module around it is not cast."""
    has_own: bool
    """True if it holds parameters itself."""

    @property
    def is_called(self) -> bool:
        """True if others may call it. Those that hold parameters are called directly by some models."""
        return self.is_outermost or self.has_own


def find_overrides(
    root: nn.Module, overrides: DtypesByName, left_out: Container[nn.Parameter] = ()
) -> dict[nn.Parameter, torch.dtype]:
    """The compute dtypes of the parameters that patterns fit; for each name, the first pattern holds.

    Args:
        root: the model.
        overrides: the dtypes by pattern.
        left_out: parameters that keep their dtype.

    Raises:
        ValueError: a pattern fits no parameter; the names of a tied parameter get different dtypes; or
            BatchNorm would get another dtype than that of its statistics.
    """
    patterns = dict(overrides or ())
    if not patterns:
        return {}
    named = root.named_parameters(remove_duplicate=False)
    names = {name: parameter for name, parameter in named if parameter not in left_out}
    by_name: dict[str, torch.dtype] = {}
    for pattern, dtype in patterns.items():
        if not (own := fitting(pattern, names)):
            raise ValueError(f"{_KEY}: {describe_unfit(pattern, names)}")
        for name in own:
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
                f"{_KEY}: '{first}' and '{name}' are one parameter, and patterns give it "
                f"{_show(found[parameter])} and {_show(dtype)}; expected one dtype"
            )
    _check_statistics(root, found)
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
        dtype = _common_dtype(module, overrides)
        is_called = type(module).forward is not nn.Module.forward  # a list of modules is not
        if dtype is None or not is_called or module in parts:
            for child in module.children():
                collect(child)
            return
        for part in module.modules():
            own = next(part.parameters(recurse=False), None)
            given = own if own is not None else next(module.parameters())
            is_outermost = part is module or (part in casts and casts[part].is_outermost)
            casts[part] = Cast(dtype, param_dtype or given.dtype, is_outermost, own is not None)

    if overrides:
        collect(root)
    return casts


def _common_dtype(module: nn.Module, overrides: Mapping[nn.Parameter, torch.dtype]) -> torch.dtype | None:
    """The dtype that patterns give to all parameters of a module; None if there is no such dtype."""
    dtypes = {overrides.get(parameter) for parameter in module.parameters()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _check_statistics(root: nn.Module, found: Mapping[nn.Parameter, torch.dtype]) -> None:
    """Refuse a dtype for BatchNorm that is not that of its statistics, which are not cast."""
    for name, module in root.named_modules():
        if not computes_in_own_dtype(module):
            continue
        for attribute, parameter in module._parameters.items():
            statistics = module._buffers.get("running_mean")
            if parameter is None or statistics is None or parameter not in found:
                continue
            if found[parameter] != statistics.dtype:
                raise ValueError(
                    f"{_KEY}: expected {_show(statistics.dtype)} for '{name}.{attribute}', the dtype of the "
                    f"running statistics of a {type(module).__name__}, got {_show(found[parameter])}"
                )


def _show(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
