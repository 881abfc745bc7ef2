"""The forwards of layers that are divided over the ranks of a tensor group.

    x --COPY--> [ up: columns ] --> each rank has some hidden elements --> [ down: rows ] --SUM--> y

A layer divided by columns computes some outputs from the whole input. One divided by rows takes those as its
input, and gives a summand of the output. So a pair of them exchanges once in the forward and once in the
backward. The parameters are ordinary tensors of the size of a part.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.parallel.random import share_random_states
from zeroshard.parallel.tensor.losses import embed
from zeroshard.parallel.tensor.sequence import (
    Activations,
    Comm,
    Regions,
    Sum,
    add_up,
    copied,
    install_regions,
    move,
)
from zeroshard.parallel.tensor.styles import BY_ROWS, IN_RANK_ORDER, Divided, Split
from zeroshard.plan.layout import Span
from zeroshard.sharding.context import Changes


def install(model: nn.Module, layers: list[Divided], over: Activations, changes: Changes) -> None:
    """Have a model compute with the parts of its parameters, which have the shapes of parts from now on."""
    regions = install_regions(layers, over, changes)
    if regions is not None:
        regions.follow(model, changes)
    for layer in layers:
        if not layer.has_other_forward:
            continue
        module, name = layer.module, layer.name
        add = regions.sum_of(layer) if regions is not None else add_up
        forward = functools.partial(_forward_of(layer, over, add), module, over, name)
        changes.around(module, "divide", functools.partial(functools.partial, _of_parts, layer, forward))
        is_by_rows, cut = layer.style.way in BY_ROWS, layer.cuts.get("weight")
        size = None if cut is None else cut.local_shape[cut.dim]
        if layer.style.way is Split.SHARED_COLUMNS:
            size = layer.style.sections[0].unit
        attribute = "in_features" if is_by_rows else "out_features"
        # A model may compute its loss over the features that a gathered head says it has.
        if attribute in vars(module) and size is not None and layer.style.way not in IN_RANK_ORDER:
            changes.set(module, attribute, size)
        if isinstance(module, nn.Embedding) and layer.style.way is Split.ROWS:
            (own,) = layer.cuts["weight"].spans(over.rank)
            changes.set(module, "num_embeddings", own.size)
            if (padding := module.padding_idx) is not None:
                is_own = own.start <= padding < own.stop
                changes.set(module, "padding_idx", padding - own.start if is_own else None)
    shared = [layer for layer in layers if layer.style.way is Split.SHARED_COLUMNS]
    for parent, section in {x.parent: one for x in shared for one in x.style.sections}.items():
        if (groups := getattr(parent, _GROUPS, None)) is not None:
            changes.set(parent, _GROUPS, groups * (section.size // section.unit) // over.size)
    share_random_states(model, layers, regions, over, changes)
    _refuse_parts(model, regions, changes)

    def drop_last(*_: Any) -> None:
        over.last = None

    changes.hook(model.register_forward_hook(drop_last, always_call=True))


def _refuse_parts(model: nn.Module, regions: Regions | None, changes: Changes) -> None:
    """Refuse outputs of a model of transformers that would be parts: they look like all of the values."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        def is_asked(name: str) -> bool:
            given = kwargs.get(name)
            return bool(getattr(getattr(module, "config", None), name, False) if given is None else given)

        if is_asked("output_attentions"):
            raise ValueError("output_attentions: each tensor rank has some of the heads; expected False")
        if regions is not None and regions.are_divided and is_asked("output_hidden_states"):
            raise ValueError(
                "output_hidden_states: with mesh.sequence each tensor rank has a part of the sequence between"
                " blocks; expected False, mesh.sequence=False, or evaluation under no_grad"
            )

    changes.hook(model.register_forward_pre_hook(before, with_kwargs=True))


def _of_parts(layer: Divided, forward: Callable[..., Tensor], _: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run the forward of a layer over parts in place of its own, unless its parameters are whole now."""
    attribute, cut = next(iter(layer.cuts.items()), ("", None))
    parameter = layer.module._parameters.get(attribute)
    if cut is not None and parameter is not None and parameter.shape == cut.shape != cut.local_shape:
        raise RuntimeError(
            f"'{layer.name}' is divided over tensor-parallel ranks and has its whole parameters now, inside "
            "unsharded(): call the model outside of it"
        )
    return forward(*args, **kwargs)


_GROUPS = "num_key_value_groups"
"""Attention layers of transformers repeat keys and values so many times, once for each of their queries."""


def _forward_of(layer: Divided, over: Activations, add: Sum) -> Callable[..., Tensor]:
    if isinstance(layer.module, nn.Embedding) and layer.style.way is Split.ROWS:
        (own,) = layer.cuts["weight"].spans(over.rank)
        return functools.partial(_look_up, own, add)
    if layer.style.way is Split.SHARED_COLUMNS:
        (section,) = layer.style.sections
        first = over.rank * (section.size // section.unit) // over.size * section.unit
        return functools.partial(_one_head, Span(first, first + section.unit))
    forwards: dict[Split, Callable[..., Tensor]] = {
        Split.COLUMNS: _columns,
        Split.COLUMNS_GATHERED: _gathered_columns,
        Split.COLUMNS_LOSS: _columns,
        Split.ROWS: functools.partial(_rows, add),
        Split.ROWS_SPLIT: functools.partial(_split_rows, add),
        Split.EXPERTS: _experts,
    }
    return forwards[layer.style.way]


def _columns(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    outputs: Tensor = type(module).forward(module, copied(value, over, name))
    return outputs


def _gathered_columns(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    return move(_columns(module, over, name, value), Comm.GATHER, over, name)


def _one_head(own: Span, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias[own.slice]
    return F.linear(copied(value, over, name), module.weight[own.slice], bias)


def _rows(add: Sum, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    """The bias is added once, after the sum."""
    over.last = None
    total = add(F.linear(value, module.weight), over, name)
    return total if module.bias is None else total + module.bias


def _split_rows(add: Sum, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    return _rows(add, module, over, name, move(value, Comm.SPLIT, over, name))


def _look_up(own: Span, add: Sum, module: Any, over: Activations, name: str, tokens: Tensor) -> Tensor:
    """Some models scale what is found, in a forward of their own."""
    return embed(tokens, functools.partial(type(module).forward, module), own, over, name, add)


def _experts(module: Any, over: Activations, name: str, *values: Any, **named: Any) -> Tensor:
    """Compute the output of the experts of a layer from their parts.

    The routing weights multiply the output of a rank, which is a summand. So each rank finds a summand of
    their gradient, and the router needs the sum.
    """

    def copied(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return move(value, Comm.COPY, over, name) if is_real else value

    summand = type(module).forward(
        module, *map(copied, values), **{key: copied(value) for key, value in named.items()}
    )
    return move(summand, Comm.SUM, over, name)
