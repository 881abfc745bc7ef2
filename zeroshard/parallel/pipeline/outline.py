"""The order of the modules of a model, along which a pipeline cuts it into chunks.

    before      blocks                          after
    embedding   block 0   block 1   block 2     norm, head
    |--- chunk 0 ---|     |--- chunk 1 ---|  |-- chunk 2 --|

A chunk is the same model, in which the modules of other chunks hand on what they are given. So its own
forward makes masks and positions from the arguments, in every chunk, and nothing of it is written again here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

_OF_A_SEQUENCE = ("forward", "__call__", "__iter__")
"""The methods that make a Sequential call its modules one after another."""


@dataclass(frozen=True)
class Outline:
    """The modules of a model in the order in which they compute, by their names."""

    before: tuple[str, ...]
    """Modules before the blocks; the first one is the embedding of the tokens, if there is one."""
    blocks: tuple[str, ...]
    after: tuple[str, ...]

    def chunk(self, blocks: range, num_blocks: int) -> tuple[str, ...]:
        """Return the modules of a chunk with a run of blocks."""
        own = tuple(self.blocks[number] for number in blocks)
        first = self.before if blocks.start == 0 else ()
        return (*first, *own, *(self.after if blocks.stop == num_blocks else ()))


def outline_of(model: nn.Module) -> Outline:
    """Return the outline of a `Sequential`, or of a causal language model of transformers.

    Adapters of peft in its layers belong to the modules that have these layers.

    Raises:
        ValueError: the model is neither, or has modules whose place is not known.
    """
    if isinstance(model, nn.Sequential):
        if any(getattr(type(model), name) is not getattr(nn.Sequential, name) for name in _OF_A_SEQUENCE):
            raise unknown_model(model, "it is a Sequential with a forward of its own")
        return Outline((), tuple(model._modules), ())  # a module may have several places
    refuse_collected(_options_of(model))
    causal = without_adapters(model)
    base = base_of(causal)
    blocks_name, blocks = _blocks_of(causal, base)
    children = [name for name, _ in base.named_children()]
    place = children.index(blocks_name)
    prefix, outer = (_prefix_of(model, inside) for inside in (base, causal))
    before = [name for name in children[:place] if _computes(base.get_submodule(name))]
    after = [name for name in children[place + 1 :] if _computes(base.get_submodule(name))]
    outside = [name for name, child in causal.named_children() if child is not base and _computes(child)]
    embedding = _name_of(base, causal.get_input_embeddings())  # type: ignore[operator]
    if embedding not in before:
        raise unknown_model(causal, f"its embedding '{embedding}' is not among the modules before its blocks")
    before.sort(key=lambda name: name != embedding)
    return Outline(
        tuple(prefix + name for name in before),
        tuple(f"{prefix}{blocks_name}.{number}" for number in range(len(blocks))),
        (*(prefix + name for name in after), *(outer + name for name in outside)),
    )


def refuse_collected(options: Mapping[str, Any]) -> None:
    """Refuse outputs of all layers: the last rank would have those of its own layers alone.

    Raises:
        ValueError: a config or arguments ask for them.
    """
    for key in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if options.get(key):
            raise ValueError(
                f"mesh.pp: expected {key}=False, got True: it collects values of all layers, and a pipeline "
                "rank has only its own"
            )


def _options_of(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    return dict(to_dict()) if callable(to_dict) else {}


def without_adapters(model: Any) -> nn.Module:
    """Return the model that peft has wrapped, or the given one if it has wrapped none.

    Raises:
        ValueError: its adapters are not in layers alone, or depend on the tokens.
    """
    if not (getattr(model, "peft_config", None) and hasattr(model, "get_base_model")):
        given: nn.Module = model
        return given
    for name, config in model.peft_config.items():
        if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"mesh.pp: expected adapters of layers, such as LoRA, got adapter '{name}' "
                f"({config.peft_type.value}), which depends on the tokens: only the first chunk has these"
            )
    inside: nn.Module = model.get_base_model()
    own = {id(parameter) for parameter in inside.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in own:
            raise ValueError(
                f"mesh.pp: expected adapters of layers, such as LoRA, got a parameter '{name}' outside of "
                f"the {type(inside).__name__}"
            )
    return inside


def _computes(module: nn.Module) -> bool:
    """True for a module whose values depend on parameters or random numbers, unlike tables of positions."""
    return isinstance(module, nn.Dropout) or any(True for _ in module.parameters())


def base_of(model: Any) -> nn.Module:
    """Return the model inside a causal language model, which has the blocks."""
    base = getattr(model, "base_model", None)
    has_table = hasattr(model, "get_input_embeddings")
    if not (isinstance(base, nn.Module) and has_table) or base is model:
        raise unknown_model(model, "it is no such model")
    if getattr(model.config, "is_encoder_decoder", False):
        raise unknown_model(model, "it has an encoder and a decoder")
    return base


def _blocks_of(model: nn.Module, base: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    lists = [
        (name, child)
        for name, child in base.named_children()
        if isinstance(child, nn.ModuleList) and len(child)
    ]
    if len(lists) != 1:
        raise unknown_model(model, f"it has {len(lists)} lists of blocks: {[name for name, _ in lists]}")
    name, blocks = lists[0]
    return name, list(blocks)


def _name_of(model: nn.Module, module: Any) -> str:
    return next((name for name, other in model.named_modules() if other is module), "")


def _prefix_of(model: nn.Module, inside: nn.Module) -> str:
    """The beginning of the names of modules that are inside of a module."""
    return "" if inside is model else f"{_name_of(model, inside)}."


def unknown_model(model: nn.Module, why: str) -> ValueError:
    """Return the error for a model that a pipeline cannot cut."""
    return ValueError(
        "mesh.pp: expected a torch.nn.Sequential, or a causal language model of transformers whose "
        f"embedding, blocks, norm and head follow each other; got a {type(model).__name__}: {why}. "
        "pipeline.trace=True cuts models of other structures that return one tensor"
    )


def names_below(outline: Outline) -> Iterator[str]:
    """Yield the names of all modules that belong to a chunk."""
    yield from (*outline.before, *outline.blocks, *outline.after)
