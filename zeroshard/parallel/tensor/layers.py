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
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.comm.activations import Activations
from zeroshard.parallel.tensor.losses import divide_losses, with_loss
from zeroshard.parallel.tensor.moves import Move, Sum, add_up, move
from zeroshard.parallel.tensor.random import share_random_states
from zeroshard.parallel.tensor.sequence import (
    Regions,
    check_coverage,
    copied,
    install_regions,
    with_sequence,
)
from zeroshard.parallel.tensor.styles import OF_SEQUENCE, WITHOUT_CUTS, Divided, Style, Way
from zeroshard.parallel.tensor.vocabulary import embed
from zeroshard.plan.cuts import Cut, Section
from zeroshard.plan.layout import Span
from zeroshard.plan.originals import Original
from zeroshard.plan.wrapping import UnitSpec
from zeroshard.sharding.changes import Changes


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
            is_cut = style.way not in WITHOUT_CUTS
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
    *,
    by_sequence: bool = False,
) -> list[UnitSpec]:
    """Divide the layers of a plan over the tensor ranks; return the units with the cuts of their parameters.

    Args:
        plan: see `match`; None for the plan of a model of transformers.
        by_sequence: True adds entries for the norms of a model of transformers.

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
    plan = with_sequence(model, plan) if by_sequence else plan
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
    if any(layer.style.way in OF_SEQUENCE for layer in layers):
        check_coverage(model, plan)
        summed.update(_biases_of_rows(layers))
    regions = install(layers, over, changes)
    blocks = {} if regions is None else regions.follow(model, layers, changes)
    share_random_states(model, layers, blocks, over, changes)
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


def _biases_of_rows(layers: list[Divided]) -> set[nn.Parameter]:
    """The biases that are added to parts of a sequence."""
    biases = (layer.module._parameters.get("bias") for layer in layers if layer.style.way is Way.ROWS)
    return {bias for bias in biases if bias is not None}


def install(layers: list[Divided], over: Activations, changes: Changes) -> Regions | None:
    """Have layers compute their parts; their parameters have the shapes of parts from now on.

    Returns:
        The switch of the regions that are divided along the sequence, if there are any.
    """
    regions = install_regions(layers, over, changes)
    for layer in layers:
        if not layer.cuts and layer.style.way is not Way.SHARED_COLUMNS:
            continue
        module, name = layer.module, layer.name
        add = regions.sum_of(layer) if regions is not None else add_up
        changes.set(module, "forward", functools.partial(_forward_of(layer, over, add), module, over, name))
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
    return regions


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


def _forward_of(layer: Divided, over: Activations, add: Sum) -> Callable[..., Tensor]:
    if isinstance(layer.module, nn.Embedding):
        (own,) = layer.cuts["weight"].spans(over.rank)
        return functools.partial(_look_up, own, add)
    if layer.style.way is Way.SHARED_COLUMNS:
        (section,) = layer.style.sections
        first = over.rank * (section.size // section.unit) // over.size * section.unit
        return functools.partial(_one_head, Span(first, first + section.unit))
    if layer.style.way is Way.ROWS:
        return functools.partial(_rows, add)
    return _gathered_columns if layer.style.way is Way.COLUMNS_GATHERED else _columns


def _columns(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    outputs: Tensor = type(module).forward(module, copied(value, over, name))
    return outputs


def _gathered_columns(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    return move(_columns(module, over, name, value), Move.GATHER, over, name)


def _one_head(own: Span, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias[own.slice]
    return F.linear(copied(value, over, name), module.weight[own.slice], bias)


def _rows(add: Sum, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    """The bias is added once, after the sum."""
    weight = module.weight.t() if _is_conv1d(module) else module.weight
    total = add(F.linear(value, weight), over, name)
    return total if module.bias is None else total + module.bias


def _look_up(own: Span, add: Sum, module: Any, over: Activations, name: str, tokens: Tensor) -> Tensor:
    """Some models scale what is found, in a forward of their own."""
    return embed(tokens, functools.partial(type(module).forward, module), own, over, name, add)
