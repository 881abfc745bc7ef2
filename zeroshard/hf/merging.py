"""Adapters of peft merged by peft itself, and the names of a model without them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.forwards.quantized import has_codes

_Rule = Callable[[str], str | None]
"""Takes the rest of a name inside a module; returns that without adapters, None for a part of an adapter."""


class Merging:
    """The layers of a model with adapters, and the names of its parameters without these.

    Args:
        module: the model.

    Raises:
        ValueError: an adapter that no weight can take in: prompt learning, or several around one layer.
    """

    def __init__(self, module: Any) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        for adapter, config in module.peft_config.items():
            if config.is_prompt_learning:
                raise ValueError(
                    f"merge_adapters: adapter '{adapter}' ({config.peft_type.value}) is a prompt, which no "
                    "weight can take in: expected adapters of layers"
                )
        self._layers: dict[str, Any] = {}
        self._rules: dict[str, _Rule] = {}
        """By name of a module, as the layers are."""
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        for name, member in module.named_modules():
            if member is base and member is not module:
                self._prefix = f"{name}."
            if isinstance(member, BaseTunerLayer):
                if isinstance(getattr(member, "base_layer", None), BaseTunerLayer):
                    raise ValueError(
                        f"merge_adapters: expected one adapter layer around a layer, got several at '{name}'"
                    )
                self._layers[name] = member
                self._rules[name] = _inside("base_layer.")
            elif isinstance(member, AuxiliaryTrainingWrapper):
                self._rules[name] = _inside(_shown_by(member))

    _prefix = ""
    """The name of the model inside peft's."""

    def rename(self, name: str) -> str | None:
        """Return the name of a parameter in the model without adapters; None for one of an adapter."""
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            place = ".".join(parts[:end])
            if (rule := self._rules.get(place)) is not None:
                rest = rule(name.removeprefix(f"{place}."))
                if rest is None:
                    return None
                name = f"{place}.{rest}"
        return name.removeprefix(self._prefix)

    def layers_of(self, owners: Collection[nn.Module]) -> list[Any]:
        """Return the layers with adapters around a module of `owners`."""
        return [
            layer
            for layer in self._layers.values()
            if layer.active_adapters and not set(layer.get_base_layer().modules()).isdisjoint(owners)
        ]

    def check(self) -> None:
        """Check the adapters around quantized weights.

        Raises:
            ValueError: an adapter that does more than to add to such a weight.
        """
        for name, layer in self._layers.items():
            if has_codes(layer.get_base_layer()):
                self.check_adds(layer, f"{name}.weight")

    @staticmethod
    def check_adds(layer: Any, name: str) -> None:
        """Check that the active adapters of a layer only add to its weight.

        Args:
            layer: a layer of peft.
            name: the name of the weight, for errors.

        Raises:
            ValueError: an adapter that does more.
        """
        for adapter in _unmerged(layer):
            if not _only_adds(layer, adapter):
                raise ValueError(
                    f"merge_adapters: adapter '{adapter}' does more than add to the weight '{name}', which "
                    "is quantized: expected LoRA without DoRA and lora_bias, or VeRA"
                )

    @staticmethod
    def delta_of(layer: Any, name: str) -> Tensor:
        """Return the sum of what the active adapters of a layer add to its weight.

        Adapters that are merged already add nothing, and neither do those that the layer does not have.

        Args:
            layer: a layer of peft; its parameters are shown.
            name: the name of the weight, for errors.

        Raises:
            ValueError: an adapter that does more than to add, or another thing.
        """
        Merging.check_adds(layer, name)
        deltas = [layer.get_delta_weight(adapter).detach() for adapter in _unmerged(layer)]
        if not deltas:
            return torch.zeros((), device=layer.get_base_layer().weight.device)
        total: Tensor = functools.reduce(torch.add, deltas)
        return total

    @staticmethod
    @contextmanager
    def merged(layers: Sequence[Any]) -> Iterator[None]:
        """Merge the active adapters into the weights of layers; at the end the layers call them apart again.

        The weights are left as they are: full parameters that nobody writes back.
        """
        before = [list(layer.merged_adapters) for layer in layers]
        try:
            with torch.no_grad():
                for layer, merged in zip(layers, before, strict=True):
                    if set(layer.active_adapters) - set(merged):
                        layer.merge()
            yield
        finally:
            for layer, merged in zip(layers, before, strict=True):
                layer.merged_adapters = merged


def _unmerged(layer: Any) -> list[str]:
    """The active adapters that a layer of peft has, and that are not merged into its weight already."""
    available = layer._get_available_adapters()
    return [name for name in layer.active_adapters if name in available and name not in layer.merged_adapters]


_ADDING = frozenset(("LoraLayer", "VeraLayer"))
"""Classes of peft whose `get_delta_weight` is a summand of the weight; HiRA and OFT return a factor."""


def _only_adds(layer: Any, adapter: str) -> bool:
    """True if an adapter of a layer adds its delta to the weight, and does nothing else."""
    has_variant = adapter in getattr(layer, "lora_variant", {})  # DoRA and its like
    has_bias = getattr(layer, "lora_bias", {}).get(adapter, False)
    is_adding = not _ADDING.isdisjoint(base.__name__ for base in type(layer).__mro__)
    return is_adding and not has_variant and not has_bias


def _shown_by(wrapper: Any) -> str:
    """The name, inside a wrapper of peft, of the module that it calls."""
    if hasattr(wrapper, "modules_to_save"):
        return (
            f"modules_to_save.{wrapper.active_adapters[0]}."
            if wrapper.active_adapters
            else "original_module."
        )
    return "token_adapter."


def _inside(place: str) -> _Rule:
    return lambda rest: rest.removeprefix(place) if rest.startswith(place) else None
