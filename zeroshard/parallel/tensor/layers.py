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
from zeroshard.parallel.tensor.losses import Classes, ModelLoss, causal_model, mark
from zeroshard.parallel.tensor.moves import Move, move
from zeroshard.parallel.tensor.random import OfParts, RandomStates, hook_forwards, hook_regions
from zeroshard.parallel.tensor.vocabulary import embed
from zeroshard.plan.cuts import Cut, Section
from zeroshard.plan.layout import Span
from zeroshard.plan.originals import Original
from zeroshard.plan.wrapping import UnitSpec
from zeroshard.sharding.changes import Changes


class Way(Enum):
    """The ways to divide a layer. The values are the words of a plan."""

    COLUMNS = "colwise"
    """By its outputs."""
    COLUMNS_GATHERED = "colwise_gather_output"
    """By its outputs, which are gathered."""
    SHARED_COLUMNS = "colwise_shared_heads"
    """By its outputs, which are fewer heads than ranks: each rank holds them all and computes one."""
    ROWS = "rowwise"
    """By its inputs, which are divided already; an embedding by its tokens."""
    REPLICATE = "replicate"
    """Not at all: each rank computes all of it."""
    SUMMED = "replicated_with_grad_allreduce"
    """Not at all, but each rank uses it for other values: the gradients of its parameters are added up."""
    COLUMNS_LOSS = "colwise_loss"
    """By its outputs; they are gathered, except where a model of transformers computes its loss of them."""


_ALIASES = {"embedding_rowwise": "rowwise"}
"""Words of transformers that mean the same as others."""


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
            return Style(Way(_ALIASES.get(given, given)))
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
    parent: nn.Module
    """The module that holds it."""

    @property
    def is_summed(self) -> bool:
        """True if each rank holds the parameters whole and computes summands of their gradients."""
        return self.style.way in (Way.SUMMED, Way.SHARED_COLUMNS)


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
            parent = model.get_submodule(name.rpartition(".")[0])
            style = with_heads(styles[patterns[0]], name, module, parent, num_ranks)
            is_cut = style.way not in (Way.SUMMED, Way.SHARED_COLUMNS)
            cuts = dict(_cuts(name, module, style, num_ranks)) if is_cut else {}
            found.append(Divided(name, module, style, cuts, parent))
    for pattern in styles.keys() - fitting:
        raise ValueError(f"tp_plan: no module of the model is called '{pattern}'")
    return found


_HEAD_SIZES = ("head_dim", "head_size")
"""The names of the size of a head in the attention layers of transformers."""
_IN_ONE = {"query_key_value": 3}
"""Layers whose outputs are, for each head, its query, its key and its value."""


def with_heads(style: Style, name: str, module: nn.Module, parent: nn.Module, num_ranks: int) -> Style:
    """Return a style that leaves the heads of an attention layer of transformers whole.

    Under grouped-query attention (Ainslie et al. 2023) there may be fewer heads of keys and values than
    ranks. Then several ranks use the same one.
    """
    sizes = [size for size in (getattr(parent, attribute, None) for attribute in _HEAD_SIZES) if size]
    if style.sections or not sizes or not isinstance(module, nn.Linear) or style.way is Way.SUMMED:
        return style
    unit = sizes[0] * _IN_ONE.get(name.rpartition(".")[2], 1)
    total = module.in_features if style.way is Way.ROWS else module.out_features
    if total % unit:
        return style
    num_heads = total // unit
    is_shared = style.way is Way.COLUMNS and num_heads < num_ranks and num_ranks % num_heads == 0
    if is_shared and type(module).forward is not nn.Linear.forward:
        raise ValueError(
            f"tp_plan: '{name}' has fewer heads ({num_heads}) than mesh.tp={num_ranks} ranks and is a "
            f"{type(module).__name__}; expected a Linear, of which ranks can share a head"
        )
    return Style(Way.SHARED_COLUMNS if is_shared else style.way, (Section(total, unit),))


def divide(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    plan: Mapping[str, str | Style] | None,
    over: Activations,
    changes: Changes,
) -> list[UnitSpec]:
    """Divide the layers of a plan over the tensor ranks; return the units with the cuts of their parameters.

    Args:
        plan: see `match`; None for the plan of a model of transformers.

    Raises:
        ValueError: see `match`; there is no plan; or a parameter that two layers share would be cut in two
            ways.
    """
    is_own = plan is None
    plan = getattr(model, "tp_plan", None) if is_own else plan
    if not plan:
        raise ValueError(
            f"mesh.tp={over.size}: {type(model).__name__} has no plan of its own, as many models of "
            "transformers have in `tp_plan`: give zeroshard.initialize tp_plan={'layers.*.up': 'colwise', "
            "'layers.*.down': 'rowwise', ...}"
        )
    layers = match(model, plan, over.size)
    if is_own:
        layers = [with_loss(layer, model) for layer in layers]
    cuts: dict[nn.Parameter, Cut] = {}
    summed = {p for layer in layers if layer.is_summed for p in layer.module.parameters()}
    for layer in layers:
        for attribute, cut in layer.cuts.items():
            parameter = layer.module._parameters[attribute]
            assert parameter is not None, "it has a cut"
            other = cuts.setdefault(parameter, cut)
            if (other.dim, other.sections) != (cut.dim, cut.sections):
                raise ValueError(f"tp_plan: '{cut.name}' is tied to '{other.name}', which is cut another way")
    install(layers, over, changes)
    share_random_states(model, layers, over, changes)
    divide_losses(model, layers, over, changes)

    def noted(o: Original) -> Original:
        return replace(o, cut=cuts.get(o.parameter), is_summed=o.parameter in summed)

    return [replace(spec, originals=[noted(o) for o in spec.originals]) for spec in specs]


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
    elif style.way is Way.ROWS and not _is_conv1d(module) and type(module).forward is not nn.Linear.forward:
        raise ValueError(
            f"tp_plan: '{name}' is a {type(module).__name__} with a forward of its own; expected a Linear or "
            "a Conv1D of transformers for 'rowwise'"
        )
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
        if layer.style.way is Way.SUMMED:
            continue
        module, name = layer.module, layer.name
        changes.set(module, "forward", functools.partial(_forward_of(layer, over), module, over, name))
        for attribute, dim in _SIZES.items():
            if attribute in vars(module) and dim(layer) is not None:
                changes.set(module, attribute, dim(layer))
        if isinstance(module, nn.Embedding):
            (own,) = layer.cuts["weight"].spans(over.rank)
            changes.set(module, "num_embeddings", own.size)
            if (padding := module.padding_idx) is not None:
                is_own = own.start <= padding < own.stop
                changes.set(module, "padding_idx", padding - own.start if is_own else None)
    for parent, num_heads in _shared_heads(layers).items():
        groups = getattr(parent, _GROUPS, None)
        if groups is not None:
            changes.set(parent, _GROUPS, groups * num_heads // over.size)


def share_random_states(model: nn.Module, layers: list[Divided], over: Activations, changes: Changes) -> None:
    """Have the ranks drop the same elements where values are whole, and others where they are parts."""
    states = RandomStates(over)
    hook_forwards(model, states, changes)
    of_parts = [layer for layer in layers if not isinstance(layer.module, nn.Embedding)]
    first = [layer for layer in of_parts if layer.style.way in (Way.COLUMNS, Way.SHARED_COLUMNS)]
    last = [layer.module for layer in of_parts if layer.style.way is Way.ROWS]
    hook_regions([OfParts(layer.module, layer.parent) for layer in first], last, states, changes)


def with_loss(layer: Divided, model: nn.Module) -> Divided:
    """Have a model of transformers compute its loss of divided logits, if this is its head."""
    if layer.style.way is not Way.COLUMNS_GATHERED or causal_model(model, layer.module) is None:
        return layer
    return replace(layer, style=replace(layer.style, way=Way.COLUMNS_LOSS))


def divide_losses(model: nn.Module, layers: list[Divided], over: Activations, changes: Changes) -> None:
    """Let losses be computed of the outputs that a rank has."""
    for layer in layers:
        if layer.style.way not in (Way.COLUMNS, Way.COLUMNS_LOSS):
            continue
        own, *others = layer.cuts["weight"].spans(over.rank)
        classes = Classes(own, over, layer.name)
        if not others:
            mark(layer.module, classes, changes)
        if layer.style.way is Way.COLUMNS_LOSS:
            owner = causal_model(model, layer.module)
            if owner is None:
                raise ValueError(
                    "tp_plan: 'colwise_loss': expected the head of a causal language model of transformers "
                    f"with its default loss, got '{layer.name}' of {type(model).__name__}"
                )
            ModelLoss(owner, classes).install(owner, layer.module, changes)


_GROUPS = "num_key_value_groups"
"""Attention layers of transformers repeat keys and values so many times, once for each of their queries."""


def _shared_heads(layers: list[Divided]) -> dict[nn.Module, int]:
    """The heads that ranks share, by the attention layer."""
    return {
        layer.parent: section.size // section.unit
        for layer in layers
        if layer.style.way is Way.SHARED_COLUMNS
        for section in layer.style.sections
    }


def _outputs(layer: Divided) -> int | None:
    """The outputs of a rank, for a layer divided by columns."""
    if layer.style.way is Way.SHARED_COLUMNS:
        return layer.style.sections[0].unit
    cut = layer.cuts["weight"]
    return None if layer.style.way is Way.ROWS else cut.local_shape[cut.dim]


def _inputs(layer: Divided) -> int | None:
    """The inputs of a rank, for a layer divided by rows."""
    if layer.style.way is not Way.ROWS:
        return None
    cut = layer.cuts["weight"]
    return cut.local_shape[cut.dim]


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
    if layer.style.way is Way.SHARED_COLUMNS:
        (section,) = layer.style.sections
        first = over.rank * (section.size // section.unit) // over.size * section.unit
        return functools.partial(_one_head, Span(first, first + section.unit))
    return {
        Way.COLUMNS: _columns,
        Way.COLUMNS_LOSS: _columns,
        Way.COLUMNS_GATHERED: _gathered_columns,
        Way.ROWS: _rows,
    }[layer.style.way]


def _columns(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    outputs: Tensor = type(module).forward(module, move(value, Move.COPY, over, name))
    return outputs


def _gathered_columns(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    return move(_columns(module, over, name, value), Move.GATHER, over, name)


def _one_head(own: Span, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias[own.slice]
    return F.linear(move(value, Move.COPY, over, name), module.weight[own.slice], bias)


def _rows(module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    """The bias is added once, after the sum."""
    weight = module.weight.t() if _is_conv1d(module) else module.weight
    total = move(F.linear(value, weight), Move.SUM, over, name)
    return total if module.bias is None else total + module.bias


def _look_up(own: Span, module: Any, over: Activations, name: str, tokens: Tensor) -> Tensor:
    """Some models scale what is found, in a forward of their own."""
    return embed(tokens, functools.partial(type(module).forward, module), own, over, name)
