"""Modules of a case that compute in a dtype of their own, and the same by hand in plain PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.blocks import TorchAttention
from tests.fuzz.models import Net

KINDS = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GRU, nn.Embedding, nn.Conv2d, nn.Conv1d)
"""Layers that are called, with one dtype for all of their parameters."""
DTYPES = (torch.float32, torch.float32, torch.bfloat16)
WITH_DOUBLE = (*DTYPES, torch.float64)
"""Where main parameters have that dtype: gradients wider than these are rounded at several places."""


def draw_overrides(
    seed: int, model: Net, main_dtype: torch.dtype | None, *, is_exact: bool
) -> dict[str, torch.dtype]:
    """Some layers, by names that fit their parameters alone.

    Args:
        main_dtype: as in `Precision`.
        is_exact: whether gradients on the wire may have another dtype than in the optimizer.
    """
    random = Random(f"overrides {seed}")
    if random.random() >= 0.25:
        return {}
    num_names = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    num_places = Counter(m for _, m in model.named_modules(remove_duplicate=False))
    read = {m.attention.out_proj for m in model.modules() if isinstance(m, TorchAttention)}
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) in KINDS and module not in read and num_places[module] == 1
    }
    # A tied weight in another layer has a bias of the other dtype.
    names = [name for name, m in layers.items() if all(num_names[p] == 1 for p in m.parameters())]
    if (
        model.kind == "tokens"
        and model.head.weight is model.stem.weight
        and num_names[model.stem.weight] == 2
    ):
        names.append("head")
    chosen = random.sample(names, min(len(names), random.choice((1, 2, 5))))

    def dtype_of(module: nn.Module) -> torch.dtype:
        is_wide = all((main_dtype or p.dtype) == torch.float64 for p in module.parameters())
        return random.choice(WITH_DOUBLE if is_wide else DTYPES) if is_exact else torch.float32

    def pattern_of(name: str) -> str:
        return (
            f"{name}.*" if "." not in name else random.choice((name, f"{name}.*"))
        )  # blocks have a norm, too

    return {pattern_of(name): dtype_of(model.get_submodule(name)) for name in chosen}


def compute_dtypes(model: nn.Module, overrides: Mapping[str, torch.dtype]) -> dict[nn.Parameter, torch.dtype]:
    """The dtypes by parameter."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        parameter: dtype
        for name, dtype in overrides.items()
        for parameter in modules[name.removesuffix(".*")].parameters()
    }


def wrap(model: Net, overrides: Mapping[str, torch.dtype], param_dtype: torch.dtype | None) -> None:
    """Let the largest modules with parameters of one such dtype cast their inputs, and their outputs back."""
    dtypes, wrapped = compute_dtypes(model, overrides), dict[nn.Module, bool]()

    def visit(module: nn.Module, is_inside: bool) -> None:
        found = {dtypes.get(parameter) for parameter in module.parameters()}
        is_cast = len(found) == 1 and None not in found and not isinstance(module, nn.ModuleList)
        if is_cast and (not is_inside or module._parameters):
            wrapped[module] = wrapped.get(module, False) or not is_inside
        for child in module.children():
            visit(child, is_inside or is_cast)

    if overrides:
        visit(model, False)
    for module, is_outermost in wrapped.items():
        first = next(module.parameters())
        without = (param_dtype or first.dtype) if is_outermost else dtypes[first]
        module.forward = _casting(module.forward, dtypes[first], without)


def _casting(forward: Any, dtype: torch.dtype, without: torch.dtype) -> Any:
    def cast(value: Any, to: torch.dtype, only: torch.dtype | None = None) -> Any:
        if isinstance(value, Tensor):
            is_meant = value.is_floating_point() and (only is None or value.dtype == only)
            return value.to(to) if is_meant else value
        if isinstance(value, dict):
            return {key: cast(part, to, only) for key, part in value.items()}
        return type(value)(cast(part, to, only) for part in value) if type(value) in (tuple, list) else value

    def around(*args: Any, **kwargs: Any) -> Any:
        back = next((v.dtype for v in _floats((*args, *kwargs.values()))), without)
        output = forward(*(cast(v, dtype) for v in args), **{k: cast(v, dtype) for k, v in kwargs.items()})
        return cast(output, back, dtype)

    return around


def _floats(values: Iterable[Any]) -> Iterable[Tensor]:
    return (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
