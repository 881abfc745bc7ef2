"""Layers of a plan that peft has wrapped in LoRA: the layer inside and its two small matrices are divided.

    y = W x + B (A x)

    columns    W and B are cut by their outputs; A is whole, and so is A x
    rows       W and A are cut by their inputs; the summands of A x are added up, and B is whole

Only r numbers a token are exchanged more. Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large
Language Models", section 4.1.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from zeroshard.parallel.tensor.heads import with_heads
from zeroshard.parallel.tensor.styles import Plan, Style, Way


def through_adapters(model: nn.Module, plan: Plan, num_ranks: int) -> Plan:
    """Return a plan for the layers inside of adapters, and for these.

    Args:
        model: the model, with or without adapters.
        plan: styles by pattern, as if the layers had no adapters.
        num_ranks: the ranks of a tensor group.

    Raises:
        ValueError: a layer of the plan has an adapter of another kind, or shares its heads between ranks.
    """
    inside: dict[str, str | Style] = {}
    for name, module in model.named_modules():
        pattern = next((pattern for pattern in plan if fnmatchcase(name, pattern)), None)
        base = getattr(module, "base_layer", None)
        if pattern is None or not isinstance(base, nn.Module):
            continue
        style = Style.of(plan[pattern], pattern)
        if style.way is Way.REPLICATE:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        style = with_heads(style, name, base, parent, num_ranks)
        _check(name, module, base, style)
        is_rows = style.way is Way.ROWS
        inside |= {name: Way.REPLICATE.value, f"{name}.base_layer": style}
        inside[f"{name}.lora_A.*" if is_rows else f"{name}.lora_B.*"] = style
    return inside | dict(plan)


def _check(name: str, module: nn.Module, base: nn.Module, style: Style) -> None:
    kinds = {attribute for attribute in ("lora_A", "lora_B") if getattr(module, attribute, None)}
    if kinds != {"lora_A", "lora_B"} or getattr(module, "lora_magnitude_vector", None):
        raise ValueError(
            f"tp_plan: '{name}' is a {type(base).__name__} with an adapter, a {type(module).__name__} of "
            f"{type(module).__module__}; expected LoRA over a Linear, or 'replicate' for the layer"
        )
    if style.way in (Way.SHARED_COLUMNS, Way.SUMMED):
        raise ValueError(
            f"tp_plan: '{name}' has an adapter and is '{style.way.value}'; expected no adapter there, or as "
            "many heads as ranks"
        )


def around(model: nn.Module, name: str) -> tuple[nn.Module | None, nn.Module]:
    """Return the LoRA module around a layer, None if there is none, and the module that holds both."""
    holder = name.rpartition(".")[0]
    module = model.get_submodule(holder)
    if name != f"{holder}.base_layer":
        return None, module
    return module, model.get_submodule(holder.rpartition(".")[0])
