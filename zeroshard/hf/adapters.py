"""Adapters of peft, written by peft itself from gathered parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.files import as_folder, make_folder
from zeroshard.comm.collectives import on_all, on_first
from zeroshard.forwards.quantized import is_quantized
from zeroshard.full.parameters import full_state_dict
from zeroshard.hf.export import Format
from zeroshard.plan.names import beginnings
from zeroshard.sharding.runtime import Runtime

_Written = dict[str, dict[str, list[str]]]
"""By adapter and name in its file, all names of the tensor in the model's state_dict()."""


def has_adapters(module: Any) -> bool:
    """True if peft has put adapters into a model."""
    return bool(getattr(module, "peft_config", None))


def export_adapters(runtime: Runtime, dir: object, how: Format) -> None:
    """Write the adapters of the model that is being trained; collective. Rank 0 writes and holds them whole.

    Args:
        runtime: of the model.
        dir: the folder, as rank 0 was given it.
        how: dtype of the adapters in the files.

    Raises:
        ValueError: `dir` is no path; adapters are computed from parameters.
        RuntimeError: rank 0 could not write, on all ranks.
    """
    axes = runtime.context.axes
    module: Any = runtime.module
    folder = on_first(axes.world, "start of an export", lambda: make_folder(as_folder(dir)))
    is_asked = axes.everyone.rank == 0
    answers = on_all(axes.world, "start of an export", lambda: _select(module) if is_asked else None)
    parts = [answer for answer in answers if answer is not None]
    whole = {adapter: {k: v for part in parts for k, v in part[adapter].items()} for adapter in parts[0]}
    for adapter, written in whole.items():
        if not written:
            raise _computed(module, adapter)
    every = [known for part in parts for names in part.values() for known in names.values()]
    wanted = {known[0] for known in every}
    firsts = full_state_dict(runtime, lambda plan: how.dtype or plan.main_dtype, wanted)
    adapters = {name: firsts[known[0]] for known in every for name in known if known[0] in firsts}

    def write() -> None:
        module.save_pretrained(str(folder), state_dict=adapters)
        for adapter, names in whole.items() if len(parts) > 1 else ():
            _complete(module, adapter, names, adapters, folder)
        how.save_tokenizer(folder)

    on_first(axes.world, "end of an export", write)


def _select(module: Any) -> _Written:
    """Return the names of the tensors that peft writes."""
    from peft import get_peft_model_state_dict

    state = module.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    selected: _Written = {}
    for adapter, config in module.peft_config.items():
        if config.is_prompt_learning:
            raise _computed(module, adapter)
        written = get_peft_model_state_dict(module, dict(state), adapter)
        if not all(id(value) in names for value in written.values()):
            raise _computed(module, adapter)
        selected[adapter] = {name: names[id(value)] for name, value in written.items()}
    return selected


def _computed(module: Any, adapter: str) -> ValueError:
    return ValueError(
        f"adapter '{adapter}' ({module.peft_config[adapter].peft_type.value}) is computed from parameters: "
        "call module.save_pretrained() inside engine.unsharded()"
    )


def _complete(
    module: Any, adapter: str, names: Mapping[str, list[str]], tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Write the file of an adapter again: peft leaves tensors out, as it looks for some modules by class.

    Raises:
        ValueError: peft has not wrapped the model, so that its file has other names.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors.torch import save_file

    if not hasattr(module, "get_base_model"):
        raise ValueError(
            f"adapter '{adapter}': expected a model that peft.get_peft_model has wrapped, as other pipeline "
            f"ranks hold parts of it, got a {type(module).__name__}"
        )
    place = folder if adapter == "default" else folder / adapter
    whole = {name: tensors[known[0]].contiguous() for name, known in names.items()}
    save_file(whole, place / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


class Merging:
    """The layers of a model with adapters, and the names of its parameters without these.

    Args:
        module: the model.

    Raises:
        ValueError: an adapter that no weight can take in: prompt learning, or several around one layer.
    """

    def __init__(self, module: Any) -> None:
        from peft.tuners.ln_tuning.layer import LNTuningLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        for adapter, config in module.peft_config.items():
            if config.is_prompt_learning or config.is_adaption_prompt:
                raise ValueError(
                    f"merge_adapters: adapter '{adapter}' ({config.peft_type.value}) is a prompt, which no "
                    "weight can take in: expected adapters of layers"
                )
        self._layers: dict[str, Any] = {}
        self._inside: dict[str, str] = {}
        """By name of a module, as the layers are: the place in it of what it has around."""
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        for name, member in module.named_modules():
            if member is base and member is not module:
                self._prefix = f"{name}."
            if isinstance(member, BaseTunerLayer):
                if isinstance(member, LNTuningLayer):
                    raise ValueError(
                        f"merge_adapters: expected adapters that change weights, got LN tuning at '{name}', "
                        "which exchanges whole layers: save the adapters alone"
                    )
                if isinstance(getattr(member, "base_layer", None), BaseTunerLayer):
                    raise ValueError(
                        f"merge_adapters: expected one adapter layer around a layer, got several at '{name}'"
                    )
                self._layers[name] = member
                self._inside[name] = "base_layer."
            elif isinstance(member, AuxiliaryTrainingWrapper):
                self._inside[name] = _shown_by(member)

    _prefix = ""
    """The beginning of the names of the model inside peft's."""

    def rename(self, name: str) -> str | None:
        """Return the name of a parameter in the model without adapters; None for one of an adapter."""
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            place = ".".join(parts[:end])
            if (inside := self._inside.get(place)) is not None:
                rest = name.removeprefix(f"{place}.")
                if not rest.startswith(inside):
                    return None
                name = f"{place}.{rest.removeprefix(inside)}"
        # A tuner has tensors that layers share, such as the matrices of VeRA, outside of the model.
        return name.removeprefix(self._prefix) if name.startswith(self._prefix) else None

    def layers_of(self, owners: Collection[nn.Module]) -> list[Any]:
        """Return the layers with adapters around a module of `owners`."""
        return [
            layer
            for layer in self._layers.values()
            if layer.active_adapters and not set(layer.get_base_layer().modules()).isdisjoint(owners)
        ]

    def change_of(self, name: str) -> str:
        """Return the name of the adapters that change a parameter when they are merged; "" for none."""
        for place in beginnings(name):
            if place in self._layers and (added := _added_by(self._layers[place])):
                # Adapters of tied layers share their rows of tokens: merged twice, they change nothing more.
                tokens = getattr(self._layers[place], "trainable_tokens_delta", None)
                return place if tokens is None else ", ".join(getattr(tokens[a], "fqn", place) for a in added)
        return ""

    def check(self, ignored: Mapping[nn.Parameter, str]) -> None:
        """Check the adapters around quantized weights and ignored parameters.

        Args:
            ignored: the parameters that are not sharded, with their names.

        Raises:
            ValueError: an adapter that does more than to add to a quantized weight, or one around a parameter
                that is ignored.
        """
        for name, layer in self._layers.items():
            base = layer.get_base_layer()
            theirs = (ignored[p] for p in base.parameters() if p in ignored and layer.active_adapters)
            if (fqn := next(theirs, None)) is not None:  # peft would merge into the parameter itself
                raise ValueError(
                    f"merge_adapters: '{fqn}', which is ignored, has an adapter: expected adapters around "
                    "sharded parameters. For frozen ones that are whole on each rank use frozen= in place of "
                    "ignored="
                )
            if is_quantized(base):
                _check_adds(layer, f"{name}.weight")

    @staticmethod
    def add_to_weight(layer: Any, values: Tensor) -> None:
        """Add what the active adapters of a layer add to its weight, one after the other as peft does.

        Args:
            layer: a layer of peft that `check` has seen, and whose parameters are shown; None for none.
            values: the weight, as numbers.
        """
        for adapter in () if layer is None else _added_by(layer):
            values += layer.get_delta_weight(adapter).detach()

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


def _check_adds(layer: Any, name: str) -> None:
    """Refuse active adapters of a layer that do more than to add to its weight, whose name is given."""
    from peft.tuners.lora.layer import LoraLayer
    from peft.tuners.randlora.layer import RandLoraLayer
    from peft.tuners.vera.layer import VeraLayer

    only_adds = isinstance(layer, LoraLayer | RandLoraLayer | VeraLayer)
    biases, variants = getattr(layer, "lora_bias", {}), getattr(layer, "lora_variant", ())
    for adapter in _added_by(layer):
        if not only_adds or adapter in variants or biases.get(adapter):
            raise ValueError(
                f"merge_adapters: adapter '{adapter}' does more than add to the weight '{name}', which "
                "is quantized: expected LoRA without a bias, DoRA or another variant, AdaLoRA, VeRA or "
                "RandLoRA"
            )


def _added_by(layer: Any) -> list[str]:
    """The active adapters that a layer has, but for those that peft has merged into its weight already."""
    known = {adapter for names in layer.adapter_layer_names for adapter in getattr(layer, names)}
    return [one for one in layer.active_adapters if one in known and one not in layer.merged_adapters]


def _shown_by(wrapper: Any) -> str:
    """The name, inside a wrapper of peft, of the module that it calls."""
    if not hasattr(wrapper, "modules_to_save"):
        return "token_adapter."
    return f"modules_to_save.{active[0]}." if (active := wrapper.active_adapters) else "original_module."
