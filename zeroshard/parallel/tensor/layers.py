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
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.comm.activations import Activations
from zeroshard.parallel.tensor.experts import compute_experts, cuts_of_experts
from zeroshard.parallel.tensor.heads import rotary_size, sections_of, set_counts
from zeroshard.parallel.tensor.moves import Move, move
from zeroshard.parallel.tensor.plans import check_vocabulary, plan_of
from zeroshard.parallel.tensor.styles import Style, Way
from zeroshard.parallel.tensor.vocabulary import embed
from zeroshard.plan.cuts import Cut, Section
from zeroshard.plan.layout import Span
from zeroshard.plan.originals import Original
from zeroshard.plan.wrapping import UnitSpec
from zeroshard.sharding.changes import Changes

Plan = Mapping[str, str | Style]
"""Styles, or their words, by a pattern of names of modules."""


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


def match(model: nn.Module, plan: Plan, num_ranks: int) -> list[Divided]:
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
    styles = {pattern: Style.of(style, pattern) for pattern, style in plan.items()}
    found, fitting = [], set()

    def style_of(name: str) -> Style:
        patterns = [pattern for pattern in styles if fnmatchcase(name, pattern)]
        fitting.update(patterns)
        return styles[patterns[0]] if patterns else _WHOLE

    for name, module in model.named_modules():
        style = style_of(name)
        if style.way is not Way.REPLICATE:
            parent = model.get_submodule(name.rpartition(".")[0])
            style = with_heads(style, name, module, parent, num_ranks)
            if style.way is Way.EXPERTS:
                words = {at: style_of(f"{name}.{at}").way.value for at, _ in module.named_parameters()}
                cuts = cuts_of_experts(name, module, words, num_ranks)
            else:
                cuts = {} if style.way in _UNCUT else dict(_cuts(name, module, style, num_ranks))
            found.append(Divided(name, module, style, cuts, parent))
    for pattern in styles.keys() - fitting:
        raise ValueError(f"tp_plan: no module of the model is called '{pattern}'")
    return found


_WHOLE = Style(Way.REPLICATE)
_UNCUT = (Way.SUMMED, Way.SHARED_COLUMNS, Way.LATENT)
_BY_ROWS = (Way.ROWS, Way.ROWS_SPLIT)
_WITHOUT_HEADS = (Way.SUMMED, Way.COLUMNS_GATHERED, Way.ROWS_SPLIT, Way.LATENT)
"""Ways that may divide a head: what follows has all of them, or none."""


def with_heads(style: Style, name: str, module: Any, parent: nn.Module, num_ranks: int) -> Style:
    """Return a style that leaves the heads of an attention layer of transformers whole.

    Under grouped-query attention (Ainslie et al. 2023) there may be fewer heads of keys and values than
    ranks. Then several ranks use the same one.
    """
    if style.way is Way.LATENT:
        rotary_size(name, parent)
    if style.sections or style.way in _WITHOUT_HEADS or not _is_linear(module):
        return style
    is_outputs = style.way is not Way.ROWS
    total: int = module.weight.shape[_dim_of(module, is_outputs)]
    if style.way is Way.PACKED_COLUMNS:
        return Style(Way.COLUMNS, (Section(total // 2),) * 2)
    sections = sections_of(name, parent, total, is_outputs=is_outputs)
    if len(sections) != 1:
        return replace(style, sections=sections)
    unit = sections[0].unit
    num_heads = total // unit
    is_shared = style.way is Way.COLUMNS and num_heads < num_ranks and num_ranks % num_heads == 0
    if is_shared and type(module).forward is not nn.Linear.forward:
        raise ValueError(
            f"tp_plan: '{name}' has fewer heads ({num_heads}) than mesh.tp={num_ranks} ranks and is a "
            f"{type(module).__name__}; expected a Linear, of which ranks can share a head"
        )
    return Style(Way.SHARED_COLUMNS if is_shared else style.way, sections)


@dataclass(frozen=True, slots=True)
class Division:
    """A model whose layers are to be divided."""

    layers: list[Divided]
    specs: list[UnitSpec]
    """The units, with the cuts of their parameters."""


def plan_division(model: nn.Module, specs: Sequence[UnitSpec], plan: Plan | None, num_ranks: int) -> Division:
    """Find how to divide the layers of a model; nothing is changed, no rank is asked.

    Args:
        model: the model.
        specs: its units.
        plan: see `match`; None for the plan of a model of transformers.
        num_ranks: the ranks of a tensor group.

    Raises:
        ValueError: see `match`; there is no plan; or a parameter that two layers share would be cut in two
            ways.
    """
    if num_ranks == 1:
        return Division([], list(specs))
    plan = plan_of(model) if plan is None else plan
    if not plan:
        raise ValueError(
            f"mesh.tp={num_ranks}: {type(model).__name__} has no plan of its own, as many models of "
            "transformers have in `tp_plan`: give tp_plan={'layers.*.up': 'colwise', "
            "'layers.*.down': 'rowwise', ...}"
        )
    check_vocabulary(model, plan, num_ranks)
    layers = match(model, plan, num_ranks)
    cuts: dict[nn.Parameter, Cut] = {}
    summed = {p for layer in layers if layer.is_summed for p in layer.module.parameters()}
    for layer in layers:
        for attribute, cut in layer.cuts.items():
            parameter = layer.module._parameters[attribute]
            assert parameter is not None, "it has a cut"
            other = cuts.setdefault(parameter, cut)
            if (other.dim, other.sections) != (cut.dim, cut.sections):
                raise ValueError(f"tp_plan: '{cut.name}' is tied to '{other.name}', which is cut another way")
    _refuse_whole_ties(model, layers, cuts)

    def noted(o: Original) -> Original:
        return replace(o, cut=cuts.get(o.parameter), is_summed=o.parameter in summed)

    return Division(layers, [replace(spec, originals=[noted(o) for o in spec.originals]) for spec in specs])


def _refuse_whole_ties(model: nn.Module, layers: Sequence[Divided], cuts: Mapping[nn.Parameter, Cut]) -> None:
    """Refuse a parameter that is cut for one module and whole in another one."""
    divided = {(layer.module, attribute) for layer in layers for attribute in layer.cuts}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            cut = None if parameter is None else cuts.get(parameter)
            if cut is not None and (module, attribute) not in divided:
                raise ValueError(
                    f"tp_plan: '{cut.name}' is cut, but tied to '{name}.{attribute}', which is not; expected "
                    "both in the plan"
                )


def _cuts(name: str, module: nn.Module, style: Style, num_ranks: int) -> Iterator[tuple[str, Cut]]:
    """The divided parameters of a layer by their name in it."""
    is_columns = style.way not in _BY_ROWS
    if isinstance(module, nn.Embedding):
        if is_columns and style.way is not Way.PER_HEAD:
            raise ValueError(
                f"tp_plan: expected 'rowwise' for the embedding '{name}', which is cut by tokens"
            )
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(f"tp_plan: '{name}' has max_norm, scale_grad_by_freq or sparse, not supported")
        dims = {"weight": 1 if is_columns else 0}
    elif not is_columns and not _is_conv1d(module) and type(module).forward is not nn.Linear.forward:
        raise ValueError(
            f"tp_plan: '{name}' is a {type(module).__name__} with a forward of its own; expected a Linear or "
            "a Conv1D of transformers for 'rowwise'"
        )
    elif _is_linear(module) and style.way not in (Way.PER_HEAD, Way.PACKED_ROWS):
        dims = {"weight": _dim_of(module, is_columns)} | ({"bias": 0} if is_columns else {})
    else:
        raise ValueError(
            f"tp_plan: '{name}' is a {type(module).__name__}; expected a Linear, an Embedding or a Conv1D of "
            f"transformers for '{style.way.value}'"
        )
    for attribute, dim in dims.items():
        parameter = module._parameters[attribute]
        if parameter is not None:
            where = f"{name}.{attribute}"
            yield attribute, Cut(where, tuple(parameter.shape), dim, num_ranks, style.sections)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _dim_of(module: nn.Module, is_outputs: bool) -> int:
    """The dimension of the outputs, or inputs, in the weight; a Conv1D has the outputs last."""
    return int(is_outputs == _is_conv1d(module))


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
        if isinstance(module, nn.Embedding) and layer.style.way is Way.ROWS:
            (own,) = layer.cuts["weight"].spans(over.rank)
            changes.set(module, "num_embeddings", own.size)
            if (padding := module.padding_idx) is not None:
                is_own = own.start <= padding < own.stop
                changes.set(module, "padding_idx", padding - own.start if is_own else None)
    for parent, num_heads in _shared_heads(layers).items():
        groups = getattr(parent, _GROUPS, None)
        if groups is not None:
            changes.set(parent, _GROUPS, groups * num_heads // over.size)
    has_heads = (layer for layer in layers if layer.style.way is Way.COLUMNS and layer.style.sections)
    set_counts({layer.parent: None for layer in has_heads}, over.size, changes)


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
    cut = layer.cuts.get("weight")
    return None if cut is None or layer.style.way in _BY_ROWS else cut.local_shape[cut.dim]


def _inputs(layer: Divided) -> int | None:
    """The inputs of a rank, for a layer divided by rows."""
    if layer.style.way not in _BY_ROWS:
        return None
    cut = layer.cuts["weight"]
    return cut.local_shape[cut.dim]


_SIZES: dict[str, Callable[[Divided], int | None]] = {
    "out_features": _outputs,
    "nf": _outputs,
    "in_features": _inputs,
    "nx": _inputs,
    "embedding_dim": lambda layer: None if layer.style.way in _BY_ROWS else _outputs(layer),
}
"""Attributes that tell the size of a layer."""


def _forward_of(layer: Divided, over: Activations) -> Callable[..., Tensor]:
    if isinstance(layer.module, nn.Embedding) and layer.style.way is Way.ROWS:
        (own,) = layer.cuts["weight"].spans(over.rank)
        return functools.partial(_look_up, own)
    if layer.style.way is Way.SHARED_COLUMNS:
        (section,) = layer.style.sections
        first = over.rank * (section.size // section.unit) // over.size * section.unit
        return functools.partial(_one_head, Span(first, first + section.unit))
    forwards: dict[Way, Callable[..., Tensor]] = {
        Way.COLUMNS: _columns,
        Way.COLUMNS_GATHERED: _gathered_columns,
        Way.ROWS: _rows,
        Way.ROWS_SPLIT: _split_rows,
        Way.EXPERTS: compute_experts,
        Way.PER_HEAD: _per_head,
        Way.LATENT: functools.partial(_latent, layer.parent),
    }
    return forwards[layer.style.way]


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


def _split_rows(module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    return _rows(module, over, name, move(value, Move.SPLIT, over, name))


def _latent(parent: nn.Module, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    found = type(module).forward(module, value)
    size = rotary_size(name, parent)
    latent, rotary = found.split([found.shape[-1] - size, size], -1)
    return torch.cat((latent, move(rotary, Move.COPY, over, name)), -1)


def _per_head(module: Any, over: Activations, name: str, tokens: Tensor) -> Tensor:
    found: Tensor = type(module).forward(module, tokens)
    return found


def _look_up(own: Span, module: Any, over: Activations, name: str, tokens: Tensor) -> Tensor:
    """Some models scale what is found, in a forward of their own."""
    return embed(tokens, functools.partial(type(module).forward, module), own, over, name)
