"""Frozen weights that wrap other tensors, as torchao's weights do: they are taken apart to be sharded.

    weight    Int8Tensor      qdata      the largest tensor: codes, a frozen parameter in the weight's place
                              scale, ... buffers of the layer, `weight_scale` and so on, whole on each rank
                                         and `weight_zeroshard_form`, a description of the codes
    forward   composes the weight of the unsharded codes and the buffers, by `__tensor_unflatten__`

Sharding knows only the codes, as integers of bytes, which are never cast. A layer is put together again when
its model is closed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.plan.names import find_ignored

_FORM = "_zeroshard_form"

DESCRIPTION = "weight_zeroshard_form"
"""The buffer of a layer that says what its codes are: JSON, compared when a checkpoint is loaded."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightForm:
    """The form of a weight that was taken apart."""

    kind: Any
    context: Any
    """The values that it has in addition to its tensors, as `__tensor_flatten__` gives them."""
    codes: str
    """The name of the tensor that is sharded."""
    others: tuple[str, ...]
    """The names of its other tensors."""
    like_codes: Tensor
    """A tensor on the meta device like its codes."""
    like: Tensor
    """A tensor on the meta device like the weight."""

    def __str__(self) -> str:
        """Describe it in the same words on all ranks."""
        return f"{self.kind.__name__} {tuple(self.like.shape)} {self.like.dtype} {self.context}"


def form_of(layer: Any) -> WeightForm | None:
    """The form of a layer's weight; None for a layer whose weight was not taken apart."""
    form: WeightForm | None = vars(layer).get(_FORM)
    return form


@contextmanager
def taken_apart(
    module: nn.Module, ignored: Sequence[str] | None, *, for_good: bool = False
) -> Iterator[None]:
    """Take apart frozen weights of linear layers that wrap contiguous tensors; others stay as they are.

    Args:
        module: the module, which computes the same as before.
        ignored: patterns of names of parameters that stay as they are, see `Config.ignored`.
        for_good: True puts the weights together again only if the body of the `with` block fails.
    """
    layers: list[nn.Module] = []  # without those that an engine has taken apart
    left_out = find_ignored(module, ignored)
    done: dict[Tensor, tuple[nn.Parameter, WeightForm, dict[str, Tensor]]] = {}
    try:
        for layer in module.modules():
            if type(layer) is not nn.Linear or (weight := layer._parameters.get("weight")) is None:
                continue
            if weight in left_out or not _can_be_apart(layer):
                continue
            if weight not in done:
                done[weight] = _parts_of(weight)
            _take_layer_apart(layer, *done[weight])
            layers.append(layer)
        yield
        layers = [] if for_good else layers
    finally:
        put_together(layers)


def is_wrapper(tensor: Tensor) -> bool:
    """True for a tensor that wraps others; a DTensor does, but belongs to other ranks too."""
    return hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "placements")


def _take_layer_apart(
    layer: nn.Linear, codes: nn.Parameter, form: WeightForm, others: dict[str, Tensor]
) -> None:
    layer._parameters["weight"] = codes
    for name, tensor in others.items():
        layer.register_buffer(_buffer(name), tensor)
    layer.register_buffer(DESCRIPTION, _describe(form))
    setattr(layer, _FORM, form)
    object.__setattr__(layer, "forward", functools.partial(_forward, layer))


def _describe(form: WeightForm) -> Tensor:
    """The JSON of `DESCRIPTION`, padded: ranks with other forms are told so, and not of another size."""
    codes, dtype = str(form.like_codes.dtype), str(form.like.dtype)
    text = json.dumps({"kind": form.kind.__name__, "codes": codes, "dtype": dtype})
    return torch.frombuffer(bytearray(text.ljust(256).encode()), dtype=torch.uint8)


def _can_be_apart(layer: nn.Linear) -> bool:
    """True for a layer whose weight is a frozen tensor that wraps plain tensors.

    A forward of the layer's own, as of accelerate's hooks, may use the weight in any way. An attribute in the
    place of a buffer would be lost.
    """
    weight: Any = layer.weight
    if weight.requires_grad or not is_wrapper(weight):
        return False
    names, _ = weight.__tensor_flatten__()
    if "forward" in vars(layer) or any(hasattr(layer, name) for name in (*map(_buffer, names), DESCRIPTION)):
        return False
    inner = [getattr(weight, name) for name in names]
    are_plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in inner)
    return bool(inner) and are_plain and all(tensor.is_contiguous() for tensor in inner)


def _parts_of(weight: Any) -> tuple[nn.Parameter, WeightForm, dict[str, Tensor]]:
    names, context = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name).detach() for name in names}
    largest = max(names, key=lambda name: int(inner[name].nbytes))
    codes = inner.pop(largest)
    like = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
    form = WeightForm(type(weight), context, largest, tuple(inner), codes.to("meta"), like)
    # Numbers would be cast. T5 of transformers casts inputs to the dtype of a weight, unless that is int8.
    values = codes.view(torch.int8) if codes.is_floating_point() else codes
    parameter: Any = nn.Parameter(values, requires_grad=False)
    parameter.coded_shape = weight.shape
    return parameter, form, inner


def _buffer(name: str) -> str:
    """The name of the buffer of a layer that has a tensor of its weight."""
    return f"weight_{name}"


def buffers_of(layer: Any) -> list[str]:
    """The names of the buffers that a layer has along with the codes of its weight, which was taken apart."""
    form = form_of(layer)
    return [] if form is None else [_buffer(name) for name in form.others]


def put_together(layers: Iterable[Any]) -> None:
    """Give layers that were taken apart their weights back, with the values that their codes have now."""
    done: dict[Tensor, nn.Parameter] = {}
    for layer in layers:
        if form_of(layer) is None:  # it is another one, or was put together already
            continue
        codes = layer.weight
        if type(codes) is nn.Parameter:  # not a slice that an engine has left
            if codes not in done:
                done[codes] = nn.Parameter(compose(layer, codes), requires_grad=False)
            layer._parameters["weight"] = done[codes]
        for name in (*buffers_of(layer), DESCRIPTION):
            delattr(layer, name)
        delattr(layer, _FORM)
        object.__delattr__(layer, "forward")


def compose(layer: Any, codes: Tensor) -> Any:
    """Return the weight of a layer that was taken apart.

    Args:
        layer: the layer.
        codes: its codes, whole; the weight is a view of them.
    """
    form = form_of(layer)
    assert form is not None, "the layer was taken apart"
    inner = {name: getattr(layer, _buffer(name)) for name in form.others}
    inner[form.codes] = codes.detach().view(form.like_codes.dtype).view(form.like_codes.shape)
    return form.kind.__tensor_unflatten__(inner, form.context, form.like.shape, form.like.stride())


def _forward(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, compose(layer, layer.weight), layer.bias)
