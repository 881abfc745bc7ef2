"""Layers of a plan that peft has wrapped in LoRA: the layer inside and its two small matrices are divided.

    y = W x + B (A x)

    columns    W and B are cut by their outputs; A is whole, and so is A x
    rows       W and A are cut by their inputs; the summands of A x are added up, and B is whole

Where norms work on a part of the sequence, so do the matrices that are whole: A takes the part of x that the
norm gave, and A x is gathered for B; or the sum of A x is split, and B gives a part of y. Each rank has
summands of their gradients then.

Only r numbers a token are exchanged more. Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large
Language Models", section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import Tensor, nn

from zeroshard.comm.activations import Activations
from zeroshard.parallel.tensor.sequence import Regions, blocks_of
from zeroshard.parallel.tensor.styles import BY_ROWS, Divided, LayerPlan, Plan, Split, with_heads
from zeroshard.sharding.changes import Changes


def through_adapters(model: nn.Module, plan: Plan, num_ranks: int, *, by_sequence: bool) -> Plan:
    """Return a plan for the layers inside of adapters, and for these.

    Args:
        model: the model, with or without adapters.
        plan: styles by pattern, as if the layers had no adapters.
        num_ranks: the ranks of a tensor group.
        by_sequence: True if norms work on a part of the sequence.

    Raises:
        ValueError: a layer of the plan has an adapter of another kind, or shares its heads between ranks.
    """
    inside: dict[str, str | LayerPlan] = {}
    whole = Split.SUMMED if by_sequence else Split.REPLICATE
    for name, module in model.named_modules():
        pattern = next((pattern for pattern in plan if fnmatchcase(name, pattern)), None)
        base = getattr(module, "base_layer", None)
        if pattern is None or not isinstance(base, nn.Module):
            continue
        style = LayerPlan.of(plan[pattern], pattern)
        if style.way is Split.REPLICATE:
            continue
        if hasattr(module, "parameter_name"):
            raise ValueError(
                f"tp_plan: '{name}' has an adapter of its parameter '{module.parameter_name}', as of "
                "`target_parameters` of peft; expected adapters of layers (`target_modules`), without experts"
            )
        parent = model.get_submodule(name.rpartition(".")[0])
        style = with_heads(style, name, base, parent, num_ranks)
        _check(name, module, base, style)
        inside |= {name: "replicate", f"{name}.base_layer": style}
        cut, other = ("lora_A", "lora_B") if style.way in BY_ROWS else ("lora_B", "lora_A")
        inside |= {f"{name}.{cut}.*": style, f"{name}.{other}.*": whole.value}
        inside[f"{name}.*"] = "replicate"  # a pattern with * at its end fits the rest of the adapter
    return inside | {pattern: style for pattern, style in plan.items() if pattern not in inside}


def _check(name: str, module: nn.Module, base: nn.Module, style: LayerPlan) -> None:
    kinds = {attribute for attribute in ("lora_A", "lora_B") if getattr(module, attribute, None)}
    has_more = any(getattr(module, at, None) for at in ("lora_magnitude_vector", "lora_variant"))
    if kinds != {"lora_A", "lora_B"} or has_more:
        raise ValueError(
            f"tp_plan: '{name}' is a {type(base).__name__} with an adapter, a {type(module).__name__} of "
            f"{type(module).__module__}; expected LoRA without variants over a Linear, or 'replicate' "
            "for the layer"
        )
    if style.way in (Split.SHARED_COLUMNS, Split.SUMMED):
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


def adapt_regions(layers: Iterable[Divided], regions: Regions, over: Activations, changes: Changes) -> None:
    """Have the adapters of layers that are divided by columns work on a part of the sequence.

    Dropout inside of blocks draws numbers of this rank, so it takes the part. Outside of them it draws the
    same numbers on all ranks, so it takes all of the input.
    """
    layers = list(layers)
    inside = {module for block in blocks_of(layers) for module in block.modules()}

    def part(label: str) -> Callable[..., Tensor]:
        return lambda module, args: regions.part_of(args[0], over, label)

    def part_after(label: str) -> Callable[..., Tensor]:
        return lambda module, args, output: regions.split(output, over, label)

    def whole(label: str) -> Callable[..., Tensor]:
        return lambda module, args: regions.gather(args[0], over, label)

    for layer in layers:
        adapter, label = layer.adapter, layer.name
        if adapter is None or layer.style.way in BY_ROWS:
            continue
        for dropout in adapter.get_submodule("lora_dropout").children():
            if layer.module in inside:
                changes.hook(dropout.register_forward_pre_hook(part(label)))
            else:
                changes.hook(dropout.register_forward_hook(part_after(label)))
        for matrix in adapter.get_submodule("lora_B").children():
            changes.hook(matrix.register_forward_pre_hook(whole(label)))
