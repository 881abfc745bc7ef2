"""The ways to divide a layer over the ranks of a tensor group: the words of a plan, its layers, their heads.

An attention layer of transformers has the size of a head in an attribute, and heads stay whole. Most layers
find the number of heads from the size of their activations. Some keep it in attributes: these are set to the
number of a rank.

Experts are divided by their hidden elements, so each rank has a part of every expert:

    tokens  --COPY--> [ gate and up of all experts: columns ] --> [ down of all experts: rows ] --SUM-->
    weights --COPY------------------------------------------------^

Transformers keeps the experts of a layer in one module. Its parameters have the dimensions
[experts, outputs, inputs] or [experts, inputs, outputs].

The forwards of layers that are divided over the ranks of a tensor group.

    x --COPY--> [ up: columns ] --> each rank has some hidden elements --> [ down: rows ] --SUM--> y

A layer divided by columns computes some outputs from the whole input. One divided by rows takes those as its
input, and gives a summand of the output. So a pair of them exchanges once in the forward and once in the
backward. The parameters are ordinary tensors of the size of a part.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.

Tensor ranks that get different batches are an error, at the first forward and now and then.

They compute parts of one batch. With several batches their sums would mix them, and no error would tell:
after a divided layer all ranks go on with the same wrong values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.comm.activations import Activations
from zeroshard.comm.collectives import Axis
from zeroshard.internals.autograd import is_in_backward
from zeroshard.internals.nested import find_tensors
from zeroshard.parallel.random import share_random_states
from zeroshard.parallel.tensor.losses import divide_losses, embed
from zeroshard.parallel.tensor.sequence import (
    Comm,
    Regions,
    Sum,
    adapt_regions,
    add_up,
    copied,
    install_regions,
    move,
)
from zeroshard.plan.cuts import Cut, Section
from zeroshard.plan.layout import Span
from zeroshard.sharding.changes import Changes
from zeroshard.sharding.runtime import Runtime


class Split(Enum):
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
    ROWS_SPLIT = "rowwise_split_input"
    """By its inputs, of which each rank takes its part."""
    PACKED_COLUMNS = "packed_colwise"
    """By its outputs, of which both halves are cut."""
    PACKED_ROWS = "packed_rowwise"
    """By its inputs, of which both halves are cut; for parameters of experts."""
    EXPERTS = "moe_tp_experts"
    """Experts, by the words for their parameters."""
    PER_HEAD = "embedding_per_head"
    """An embedding of one element for each head: by these."""
    LATENT = "mla_kv_a_proj"
    """Not at all; the heads of each rank use its last outputs, which are parts of their keys."""
    COLUMNS_LOSS = "colwise_loss"
    """By its outputs; they are gathered, except where a model of transformers computes its loss of them."""
    SEQUENCE = "sequence"
    """A layer between others that are divided, such as a norm, works on a part of the sequence; its output is
    gathered for the next ones."""
    SEQUENCE_PARTS = "sequence_parts"
    """The same, and its output stays a part."""
    SEQUENCE_SPLIT = "sequence_split"
    """The first block: the input is split along the sequence. Without it embeddings give parts."""


_ALIASES = {
    "embedding_rowwise": "rowwise",
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "sequence_parallel": "sequence",
}
"""Words of transformers that mean the same as others."""
BY_ROWS = (Split.ROWS, Split.ROWS_SPLIT)
"""Layers that are divided by their inputs."""
OF_SEQUENCE = (Split.SEQUENCE, Split.SEQUENCE_PARTS)
"""Layers that work on a part of the sequence."""
WITHOUT_CUTS = (Split.SUMMED, Split.SHARED_COLUMNS, Split.LATENT, Split.SEQUENCE_SPLIT, *OF_SEQUENCE)
"""Layers whose parameters each rank holds whole."""
_BY_OWN_FORWARD = (Split.SUMMED, Split.SEQUENCE_SPLIT, *OF_SEQUENCE)
"""Layers that compute all of their outputs by their own forward."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A way to divide a layer, and the heads that it must leave whole."""

    way: Split
    sections: tuple[Section, ...] = ()
    """Of the dimension that is divided; () for one section without heads."""

    def __post_init__(self) -> None:
        if (
            self.way in (Split.COLUMNS_GATHERED, Split.COLUMNS_LOSS, Split.ROWS_SPLIT)
            and len(self.sections) > 1
        ):
            raise ValueError(
                f"tp_plan: expected one section for '{self.way.value}', whose parts lie in rank order, got "
                f"{len(self.sections)}"
            )

    @staticmethod
    def of(given: str | LayerPlan, pattern: str) -> LayerPlan:
        """Return a style from its word. Raises ValueError for another word."""
        if isinstance(given, LayerPlan):
            return given
        try:
            return LayerPlan(Split(_ALIASES.get(given, given)))
        except ValueError:
            words = ", ".join(way.value for way in Split)
            raise ValueError(f"tp_plan: expected one of {words}, got {given!r} for '{pattern}'") from None


Plan = Mapping[str, str | LayerPlan]
"""Styles, or their words, by a pattern of names of modules."""


@dataclass(frozen=True, slots=True)
class Divided:
    """A layer of a plan."""

    name: str
    module: nn.Module
    style: LayerPlan
    cuts: Mapping[str, Cut]
    """By the name of the parameter in the module; the others are whole on each rank."""
    parent: nn.Module
    """The module that holds it, or the adapter around it."""
    adapter: nn.Module | None = None
    """The LoRA module around it."""

    @property
    def has_other_forward(self) -> bool:
        """True if a forward of this package takes the place of its own."""
        return self.style.way not in _BY_OWN_FORWARD

    @property
    def is_summed(self) -> bool:
        """True if each rank holds the parameters whole and computes summands of their gradients."""
        return self.style.way in (Split.SUMMED, Split.SHARED_COLUMNS, *OF_SEQUENCE)


_SIZES = ("head_dim", "head_size", "key_value_proj_dim")
"""The names of the size of a head in the attention layers of transformers."""
_IN_ONE = {"query_key_value": 3}
"""Layers whose outputs are, for each head, its query, its key and its value."""
_SIDE_BY_SIDE = {("GPT2Attention", "c_attn"): "embed_dim"}
"""Layers with all queries first, then all keys, then all values: (attention layer, name) -> size of each."""
_LATENT = {
    "q_proj": ("qk_head_dim",),
    "q_b_proj": ("qk_head_dim",),
    "kv_b_proj": ("qk_nope_head_dim", "v_head_dim"),
    "o_proj": ("v_head_dim",),
}
"""Layers of multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1) -> the sizes of what a
head has there."""
_ROTARY = "qk_rope_head_dim"
_COUNTS = {
    "GPT2Attention": ("num_heads", "embed_dim", "split_size"),
    "T5Attention": ("n_heads", "inner_dim"),
    "MT5Attention": ("n_heads", "inner_dim"),
}
"""Attributes that are proportional to the number of heads which the layer computes."""
_WITHOUT_HEADS = (Split.COLUMNS_GATHERED, Split.COLUMNS_LOSS, Split.ROWS_SPLIT, *WITHOUT_CUTS)
"""Ways that may divide a head: what follows has all of them, or none."""


def sections_of(name: str, parent: nn.Module, size: int, *, is_outputs: bool) -> tuple[Section, ...]:
    """Return the sections of a layer of an attention layer, or () if it has no heads.

    Args:
        name: the name of the layer.
        parent: the attention layer that holds it.
        size: the outputs or inputs of the layer.
        is_outputs: True for its outputs, which may be several matrices in one.
    """
    last = name.rpartition(".")[2]
    head = _head_of(parent, last)
    if head is None:
        return ()
    together = _SIDE_BY_SIDE.get((type(parent).__name__, last)) if is_outputs else None
    if together is not None:
        each: int = getattr(parent, together)
        return (Section(each, head),) * (size // each)
    unit = head * _IN_ONE.get(last, 1)
    return () if size % unit else (Section(size, unit),)


def _head_of(parent: nn.Module, last: str) -> int | None:
    """The size of a head in a layer of an attention layer."""
    if hasattr(parent, _ROTARY):
        sizes = [getattr(parent, attribute, 0) for attribute in _LATENT.get(last, ())]
        return sum(sizes) if all(sizes) and sizes else None
    return next((head for head in (getattr(parent, attribute, None) for attribute in _SIZES) if head), None)


def rotary_size(name: str, parent: nn.Module) -> int:
    """Return how many of the outputs of a layer of latent attention are parts of the keys of all heads.

    Raises:
        ValueError: the attention layer does not tell.
    """
    size = getattr(parent, _ROTARY, None)
    if not isinstance(size, int):
        raise ValueError(
            f"tp_plan: '{name}' has the word 'mla_kv_a_proj'; expected '{_ROTARY}' in the "
            f"{type(parent).__name__} that holds it, got {size!r}"
        )
    return size


def set_counts(parents: Iterable[nn.Module], num_ranks: int, changes: Changes) -> None:
    """Tell attention layers how many heads a rank computes; their layers are divided by `sections_of`."""
    for parent in parents:
        for attribute in _COUNTS.get(type(parent).__name__, ()):
            changes.set(parent, attribute, getattr(parent, attribute) // num_ranks)


def with_heads(style: LayerPlan, name: str, module: Any, parent: nn.Module, num_ranks: int) -> LayerPlan:
    """Return a style that leaves the heads of an attention layer of transformers whole.

    Under grouped-query attention (Ainslie et al. 2023) there may be fewer heads of keys and values than
    ranks. Then several ranks use the same one.
    """
    if style.way is Split.LATENT:
        rotary_size(name, parent)
    if style.sections or style.way in _WITHOUT_HEADS or not is_linear(module):
        return style
    is_outputs = style.way is not Split.ROWS
    total: int = module.weight.shape[dim_of(module, is_outputs)]
    if style.way is Split.PACKED_COLUMNS:
        return LayerPlan(Split.COLUMNS, (Section(total // 2),) * 2)
    sections = sections_of(name, parent, total, is_outputs=is_outputs)
    if len(sections) != 1:
        return replace(style, sections=sections)
    unit = sections[0].unit
    num_heads = total // unit
    is_shared = style.way is Split.COLUMNS and num_heads < num_ranks and num_ranks % num_heads == 0
    return LayerPlan(Split.SHARED_COLUMNS if is_shared else style.way, sections)


def is_conv1d(module: nn.Module) -> bool:
    """True for the layer of transformers whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def is_linear(module: nn.Module) -> bool:
    """True for a layer of one matrix and perhaps a bias."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def dim_of(module: nn.Module, is_outputs: bool) -> int:
    """Return the dimension of the outputs, or inputs, in the weight."""
    return int(is_outputs == is_conv1d(module))


_CUTS = {"colwise": (1, 1), "packed_colwise": (1, 2), "rowwise": (2, 1), "packed_rowwise": (2, 2)}
"""Word of a plan -> the dimension that is cut, and the matrices side by side along it."""


def cuts_of_experts(
    name: str, module: nn.Module, words: Mapping[str, str | None], num_ranks: int
) -> dict[str, Cut]:
    """Return the cuts of the parameters of experts.

    Args:
        name: the name of the module.
        module: the experts of a layer.
        words: the word of the plan for each parameter, by its name in the module; None without one.
        num_ranks: the ranks of a tensor group.

    Raises:
        ValueError: a parameter is not cut, or the output of a rank would not be a summand.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"tp_plan: '{name}' normalizes the output of each expert, which no rank has in whole; expected "
            "'replicate' for it and its parameters"
        )
    cuts = {}
    for attribute, parameter in module.named_parameters():
        where, word, shape = f"{name}.{attribute}", words.get(attribute), tuple(parameter.shape)
        if word not in _CUTS or len(shape) != 3:
            expected = ", ".join(f"'{known}'" for known in _CUTS)
            raise ValueError(
                f"tp_plan: '{name}' is divided by 'moe_tp_experts'; expected parameters of three dimensions "
                f"with one of {expected}, got '{where}' of shape {shape} with {word!r}"
            )
        dim, num_packed = _CUTS[word]
        if num_packed > 1 and not getattr(module, "is_concatenated", True):
            raise ValueError(f"tp_plan: the gate and up of '{name}' alternate; expected no {word!r}, got it")
        sections = (Section(shape[dim] // num_packed),) * num_packed
        cuts[attribute] = Cut(where, shape, dim, num_ranks, sections)
    return cuts


# ---------------------------------------------------------------------------- forwards of divided layers


def install(model: nn.Module, layers: list[Divided], over: Activations, changes: Changes) -> None:
    """Have a model compute with the parts of its parameters, which have the shapes of parts from now on."""
    regions = _install_forwards(layers, over, changes)
    blocks = {} if regions is None else regions.follow(model, layers, changes)
    share_random_states(model, layers, blocks, over, changes)
    divide_losses(model, layers, over, changes)
    _refuse_parts(model, regions, changes)

    def forget(*_: Any) -> None:
        over.last = None

    changes.hook(model.register_forward_hook(forget, always_call=True))


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


def _install_forwards(layers: list[Divided], over: Activations, changes: Changes) -> Regions | None:
    """Return the switch of the regions that are divided along the sequence, if there are any."""
    regions = install_regions(layers, over, changes)
    if regions is not None:
        adapt_regions(layers, regions, over, changes)
    for layer in layers:
        if not layer.has_other_forward:
            continue
        module, name = layer.module, layer.name
        add = regions.sum_of(layer) if regions is not None else add_up
        forward = functools.partial(_forward_of(layer, over, add), module, over, name)
        changes.set(
            module, "forward", functools.partial(_of_parts, layer, forward) if layer.cuts else forward
        )
        is_by_rows, cut = layer.style.way in BY_ROWS, layer.cuts.get("weight")
        size = None if cut is None else cut.local_shape[cut.dim]
        if layer.style.way is Split.SHARED_COLUMNS:
            size = layer.style.sections[0].unit
        for attribute in _INPUTS if is_by_rows else _OUTPUTS:
            if attribute in vars(module) and size is not None:
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
    has_heads = (layer for layer in layers if layer.style.way is Split.COLUMNS and layer.style.sections)
    set_counts({layer.parent: None for layer in has_heads}, over.size, changes)
    return regions


def _of_parts(layer: Divided, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Run the forward of a layer, unless its parameters are whole now."""
    attribute, cut = next(iter(layer.cuts.items()))
    parameter = layer.module._parameters.get(attribute)
    if parameter is not None and parameter.shape == cut.shape != cut.local_shape:
        raise RuntimeError(
            f"'{layer.name}' is divided over tensor-parallel ranks and has its whole parameters now, inside "
            "unsharded(): call the model outside of it"
        )
    return forward(*args, **kwargs)


_INPUTS, _OUTPUTS = ("in_features", "nx"), ("out_features", "nf", "embedding_dim")
"""Attributes that have the size of a layer."""
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
        Split.PER_HEAD: _whole,
        Split.LATENT: functools.partial(_latent, layer.parent),
    }
    return forwards[layer.style.way]


def _whole(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    outputs: Tensor = type(module).forward(module, value)
    return outputs


def _columns(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    return _whole(module, over, name, copied(value, over, name))


def _gathered_columns(module: nn.Module, over: Activations, name: str, value: Tensor) -> Tensor:
    return move(_columns(module, over, name, value), Comm.GATHER, over, name)


def _one_head(own: Span, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias[own.slice]
    return F.linear(copied(value, over, name), module.weight[own.slice], bias)


def _rows(add: Sum, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    """The bias is added once, after the sum."""
    over.last = None
    weight = module.weight.t() if is_conv1d(module) else module.weight
    total = add(F.linear(value, weight), over, name)
    return total if module.bias is None else total + module.bias


def _split_rows(add: Sum, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    return _rows(add, module, over, name, move(value, Comm.SPLIT, over, name))


def _latent(parent: nn.Module, module: Any, over: Activations, name: str, value: Tensor) -> Tensor:
    found = _whole(module, over, name, value)
    size = rotary_size(name, parent)
    latent, rotary = found.split([found.shape[-1] - size, size], -1)
    return torch.cat((latent, move(rotary, Comm.COPY, over, name)), -1)


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


# -------------------------------------------------------------------- the same batch on all tensor ranks


_LOOKED_AT = 1 << 16
"""The elements of an input that are looked at; those of a whole batch may take a while."""
_FAR = 0.01
"""The part of its norm by which floating-point inputs may differ: a device may have computed them."""


class _Digest(NamedTuple):
    """The facts about a tensor that its ranks compare."""

    kind: str
    """Dtype and shape."""
    digest: str
    """Of integers; empty for floating-point numbers."""
    numbers: tuple[float, float] = (0.0, 0.0)
    """Of floating-point numbers: the norm, and the product with a vector of cosines."""

    @staticmethod
    def of(tensor: Tensor) -> _Digest:
        """Look at a tensor."""
        kind = f"{tensor.dtype} {list(tensor.shape)}"
        if tensor.is_meta or tensor.layout is not torch.strided:
            return _Digest(kind, "")
        values = tensor.detach().reshape(-1)[:_LOOKED_AT].cpu()
        if not (values.is_floating_point() or values.is_complex()):
            return _Digest(kind, blake2b(values.contiguous().numpy().tobytes(), digest_size=8).hexdigest())
        values = (torch.view_as_real(values).reshape(-1) if values.is_complex() else values).double()
        weights = torch.arange(values.numel(), dtype=torch.float64).cos_()
        return _Digest(kind, "", (values.norm().item(), values.dot(weights).item()))

    def is_like(self, other: _Digest) -> bool:
        """True if both may be of the same tensor; also if there are numbers that are not finite."""
        far = sum(abs(a - b) for a, b in zip(self.numbers, other.numbers, strict=True))
        is_far = far > _FAR * max(self.numbers[0], other.numbers[0])
        return self.kind == other.kind and self.digest == other.digest and not is_far


class _InputComparison:
    """Compares the inputs of the root at forwards 1, 2, 4, 8, ... in training, and in evaluation."""

    def __init__(self, axis: Axis) -> None:
        self._axis, self._num_forwards = axis, {True: 0, False: 0}
        """Forwards in training, and in evaluation."""

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_in_backward():
            return
        self._num_forwards[module.training] = number = self._num_forwards[module.training] + 1
        if number & (number - 1):  # 1, 2, 4, 8, ...
            return
        tensors = find_tensors((args, kwargs))[0]
        if not module.training:  # a cache of keys and values has other heads on each rank
            tensors = [tensor for tensor in tensors if not tensor.is_floating_point()]
        own = [_Digest.of(tensor) for tensor in tensors]
        everyone = self._axis.all_gather_object(own, "comparison of inputs")
        for rank, theirs in enumerate(everyone):
            if not _are_like(everyone[0], theirs):
                raise RuntimeError(self._explain(rank, everyone[0], theirs))

    def _explain(self, rank: int, first: Sequence[_Digest], theirs: Sequence[_Digest]) -> str:
        ranks = self._axis.global_ranks
        found = [", ".join(seen.kind for seen in one) or "no tensors" for one in (first, theirs)]
        if found[0] == found[1]:
            found = [f"{text} of some values" for text in found[:1]] + ["others of the same shapes"]
        size = len(ranks)
        return (
            f"expected the same batch on the tensor ranks {ranks}, which compute parts of it; rank "
            f"{ranks[0]} was given {found[0]}, rank {ranks[rank]} {found[1]}. Ranks with other batches are "
            f"those of DistributedSampler(data, num_replicas=world_size // {size}, rank=rank // {size})"
        )


def compare_inputs(runtime: Runtime) -> None:
    """Have the first forward of a model compare its inputs over the tensor ranks, if there are several."""
    axis = runtime.context.axes.tp
    if axis.size > 1:
        root = runtime.root.modules[0]
        compare = _InputComparison(axis)
        runtime.changes.hook(root.register_forward_pre_hook(compare, prepend=True, with_kwargs=True))


def _are_like(one: Sequence[_Digest], other: Sequence[_Digest]) -> bool:
    return len(one) == len(other) and all(a.is_like(b) for a, b in zip(one, other, strict=True))
