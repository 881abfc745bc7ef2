"""Layers of a model are divided over the ranks of a tensor group, by a plan of patterns and styles.

    x --COPY--> [ up: columns ] --> each rank has some hidden elements --> [ down: rows ] --SUM--> y

A layer divided by columns computes some outputs from the whole input. One divided by rows takes those as its
input, and gives a summand of the output. So a pair of them exchanges once in the forward and once in the
backward. The parameters are ordinary tensors of the size of a part.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.comm.activations import Activations
from zeroshard.parallel.tensor.moves import Move, move
from zeroshard.parallel.tensor.vocabulary import embed
from zeroshard.plan.cuts import Cut, Section
from zeroshard.plan.layout import Span
from zeroshard.plan.wrapping import UnitSpec
from zeroshard.sharding.changes import Changes


class Way(Enum):
    """The ways to divide a layer. The values are the words of a plan."""

    COLUMNS = "colwise"
    """By its outputs."""
    COLUMNS_GATHERED = "colwise_gather_output"
    """By its outputs, which are gathered."""
    ROWS = "rowwise"
    """By its inputs, which are divided already; an embedding by its tokens."""
    REPLICATE = "replicate"
    """Not at all: each rank computes all of it."""


@dataclass(frozen=True, slots=True)
class Style:
    """A way to divide a layer, and the heads that it must leave whole."""

    way: Way
    sections: tuple[Section, ...] = ()
    """Of the dimension that is divided; () for one section without heads."""

    @staticmethod
    def of(given: str | Style) -> Style:
        """Return a style from its word. Raises ValueError for another word."""
        if isinstance(given, Style):
            return given
        try:
            return Style(Way(given))
        except ValueError:
            words = ", ".join(way.value for way in Way)
            raise ValueError(f"tp_plan: expected one of {words}, got {given!r}") from None


@dataclass(frozen=True, slots=True)
class Divided:
    """A layer of a plan."""

    name: str
    module: nn.Module
    style: Style
    cuts: Mapping[str, Cut]
    """By the name of the parameter in the module; the others are whole on each rank."""


def match(model: nn.Module, plan: Mapping[str, str | Style], num_ranks: int) -> list[Divided]:
    """Find the layers of a plan and the parts of their parameters; nothing is changed.

    Args:
        model: the model.
        plan: styles by pattern. A pattern is the name of a module, with `*` for any part of it; the first one
            that fits a module holds.
        num_ranks: the ranks of a tensor group.

    Raises:
        ValueError: a pattern fits no module, a module cannot be divided that way, or the ranks do not divide
            it.
    """
    styles, found, fitting = {pattern: Style.of(style) for pattern, style in plan.items()}, [], set()
    for name, module in model.named_modules():
        patterns = [pattern for pattern in styles if fnmatchcase(name, pattern)]
        fitting.update(patterns)
        if patterns and styles[patterns[0]].way is not Way.REPLICATE:
            style = styles[patterns[0]]
            found.append(Divided(name, module, style, dict(_cuts(name, module, style, num_ranks))))
    for pattern in styles.keys() - fitting:
        raise ValueError(f"tp_plan: no module of the model is called '{pattern}'")
    return found


def divide(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    plan: Mapping[str, str | Style],
    over: Activations,
    changes: Changes,
) -> list[UnitSpec]:
    """Divide the layers of a plan over the tensor ranks; return the units with the cuts of their parameters.

    Raises:
        ValueError: see `match`; or a parameter that two layers share would be cut in two ways.
    """
    layers = match(model, plan, over.size)
    cuts: dict[nn.Parameter, Cut] = {}
    for layer in layers:
        for attribute, cut in layer.cuts.items():
            parameter = layer.module._parameters[attribute]
            assert parameter is not None, "it has a cut"
            other = cuts.setdefault(parameter, cut)
            if (other.dim, other.sections) != (cut.dim, cut.sections):
                raise ValueError(f"tp_plan: '{cut.name}' is tied to '{other.name}', which is cut another way")
    install(layers, over, changes)
    return [
        replace(spec, originals=[replace(o, cut=cuts.get(o.parameter)) for o in spec.originals])
        for spec in specs
    ]


def _cuts(name: str, module: nn.Module, style: Style, num_ranks: int) -> Iterator[tuple[str, Cut]]:
    """The divided parameters of a layer by their name in it."""
    is_columns = style.way is not Way.ROWS
    if isinstance(module, nn.Embedding):
        if is_columns:
            raise ValueError(
                f"tp_plan: expected 'rowwise' for the embedding '{name}', which is cut by tokens"
            )
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(f"tp_plan: '{name}' has max_norm, scale_grad_by_freq or sparse, not supported")
        dims = {"weight": 0}
    elif isinstance(module, nn.Linear):
        dims = {"weight": 0, "bias": 0} if is_columns else {"weight": 1}
    elif _is_conv1d(module):  # its weight is [inputs, outputs]
        dims = {"weight": 1, "bias": 0} if is_columns else {"weight": 0}
    else:
        raise ValueError(
            f"tp_plan: '{name}' is a {type(module).__name__}; expected a Linear, an Embedding or a Conv1D of "
            "transformers"
        )
    for attribute, dim in dims.items():
        parameter = module._parameters[attribute]
        if parameter is not None:
            where = f"{name}.{attribute}"
            yield attribute, Cut(where, tuple(parameter.shape), dim, num_ranks, style.sections)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def install(layers: list[Divided], over: Activations, changes: Changes) -> None:
    """Have layers compute their parts; their parameters have the shapes of parts from now on."""
    for layer in layers:
        module, name = layer.module, layer.name
        changes.set(module, "forward", functools.partial(_forward_of(layer, over), module, over, name))
        for attribute, dim in _SIZES.items():
            if attribute in vars(module) and dim(layer) is not None:
                changes.set(module, attribute, dim(layer))


def _outputs(layer: Divided) -> int | None:
    """The outputs of a rank, for a layer divided by columns."""
    cut = layer.cuts["weight"]
    return None if layer.style.way is Way.ROWS else cut.local_shape[cut.dim]


def _inputs(layer: Divided) -> int | None:
    """The inputs of a rank, for a layer divided by rows."""
    cut = layer.cuts["weight"]
    return cut.local_shape[cut.dim] if layer.style.way is Way.ROWS else None


_SIZES: dict[str, Callable[[Divided], int | None]] = {
    "out_features": _outputs,
    "nf": _outputs,
    "in_features": _inputs,
    "nx": _inputs,
}
"""Attributes that tell the size of a layer."""


def _forward_of(layer: Divided, over: Activations) -> Callable[..., Tensor]:
    if isinstance(layer.module, nn.Embedding):
        (own,) = layer.cuts["weight"].spans(over.rank)
        return functools.partial(_look_up, own)
    return {
        Way.COLUMNS: _columns,
        Way.COLUMNS_GATHERED: _gathered_columns,
        Way.ROWS: _rows,
    }[layer.style.way]


def _columns(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    outputs: Tensor = type(module).forward(module, move(value, Move.COPY, over, name))
    return outputs


def _gathered_columns(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    return move(_columns(module, over, name, value), Move.GATHER, over, name)


def _rows(module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    """The bias is added once, after the sum."""
    weight = module.weight.t() if _is_conv1d(module) else module.weight
    total = move(F.linear(value, weight), Move.SUM, over, name)
    return total if module.bias is None else total + module.bias


def _look_up(own: Span, module: Any, over: Activations, name: str, tokens: Tensor) -> Tensor:
    return embed(tokens, module.weight, own, over, name, padding=module.padding_idx)
