"""The modules that become units, and the unit of each parameter.

All ranks gather a unit together, so they must call the same units in the same order. Modules of which a
forward may run a part, another part on each rank, belong into one unit with the module around them. Some are
known by a name or by a chance in a config, see `_chosen_among`; of others the user says it in `units=`. Ranks
that call other units than each other end in an error of the ledger, or of the watchdog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.plan.names import (
    DtypesByName,
    FrozenChoice,
    beginnings,
    find_ignored,
    find_modules,
    find_overrides,
    find_replicated,
)
from zeroshard.plan.originals import Original, is_coded, is_packed
from zeroshard.plan.placement import REPLICATED

LARGE = 1 << 20
"""Elements from which a layer outside the repeated blocks (embedding, head) is a unit of its own."""

_CHOSEN_FROM = frozenset(("experts", "routers"))
"""Names of modules of which each rank runs a part; transformers and most others call their list `experts`."""
_DROPS = ("layerdrop", "speech_encoder_layerdrop")
"""The chance to leave out a layer, in a config of transformers; a module may have the first one itself."""

_LISTS = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict

UnitPolicy = Sequence[str] | Callable[[nn.Module], bool] | None
"""Names of classes, patterns of names of modules, a predicate, or None: find the repeated blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class UnitSpec:
    """A unit to be: its module and the parameters that it owns, by name."""

    name: str
    module: nn.Module
    """The module whose forward uses the parameters."""
    originals: list[Original] = field(default_factory=list)
    reason: str = ""
    """The reason why the module was chosen."""


def find_units(
    root: nn.Module,
    policy: UnitPolicy,
    ignored: Sequence[str] | None = None,
    overrides: DtypesByName = None,
    frozen: FrozenChoice = "shard",
) -> list[UnitSpec]:
    """The units of a model, the root first, then in the order of registration.

    A parameter belongs to the lowest unit around all modules that hold it. Units without parameters are left
    out, except the root.

    Args:
        root: the model.
        policy: the choice of modules that become units.
        ignored: patterns of names of parameters that no unit owns.
        overrides: compute dtypes by patterns of names, see `find_overrides`.
        frozen: the choice of frozen parameters that are replicated, see `find_replicated`.

    Raises:
        ValueError: a class that no module has, or a pattern that fits none; a parameter that cannot be
            sharded; a pattern that fits no parameter.
    """
    for name, module in root.named_modules():
        _check_module(module, name)
    specs = {root: UnitSpec("", root, reason="the rest")} | _choose(root, policy)
    left_out = find_ignored(root, ignored)
    modules = dict(root.named_modules(remove_duplicate=False))
    places: dict[nn.Parameter, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if parameter not in left_out:
            _check(parameter, name)
            places.setdefault(parameter, []).append(name)
    compute_dtypes = find_overrides(root, overrides, left_out)
    replicated = find_replicated(root, frozen, left_out)
    _check_tensors({parameter: own[0] for parameter, own in places.items()}, root.named_buffers())
    for parameter, own in places.items():
        paths = [name.rpartition(".")[::2] for name in own]
        original = Original(
            parameter,
            own[0],
            tuple(dict.fromkeys((modules[path], attribute) for path, attribute in paths)),
            compute_dtype=compute_dtypes.get(parameter),
            placements=REPLICATED if parameter in replicated else None,
        )
        chains = [[specs[m] for m in map(modules.get, ("", *beginnings(name))) if m in specs] for name in own]
        lowest = [spec for spec in chains[0] if all(spec in chain for chain in chains)][-1]
        lowest.originals.append(original)
    return [spec for spec in specs.values() if spec.originals or spec.module is root]


_WRAPPERS = {
    "DistributedDataParallel": "give initialize the model inside, its attribute `module`",
    "DataParallel": "give initialize the model inside, its attribute `module`",
    "FullyShardedDataParallel": "give initialize the model without that wrapper",
    "FSDPModule": "leave fully_shard out, zeroshard shards the parameters",
    "ReplicateModule": "leave replicate out, zeroshard reduces the gradients",
}
"""Classes of torch that distribute a module over the ranks themselves, and the remedy for each."""


def _check_module(module: nn.Module, name: str) -> None:
    place = f"module '{name}'" if name else "the model"
    for base in type(module).__mro__:
        if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
            raise ValueError(
                f"{place} is a {base.__name__} of torch, which distributes it over the ranks already: "
                f"{_WRAPPERS[base.__name__]}"
            )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"{place} is a scripted or traced module (torch.jit), and its compiled forward keeps parameters "
            "of its own: expected the module before torch.jit. Config(compile=True) compiles it"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.sparse:
            raise ValueError(f"module '{name}' has sparse gradients; expected sparse=False")
        if module.max_norm is not None:
            raise ValueError(
                f"module '{name}' renormalizes its weight in forward, which sharding would lose; expected "
                "max_norm=None"
            )


def _check(parameter: nn.Parameter, name: str) -> None:
    if hasattr(parameter, "full_shape"):
        raise ValueError(
            f"parameter '{name}' is sharded already: call engine.close() on all ranks first, which gives the "
            "whole model back"
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"parameter '{name}' has gradient hooks, which sharding would drop: register them after "
            "initialize, on the parameter of that name in engine.named_parameters()"
        )
    if nn.parameter.is_lazy(parameter):
        raise ValueError(f"parameter '{name}' is lazy: run the model once before it is sharded")
    if not parameter.is_floating_point() and not is_coded(parameter):
        raise ValueError(
            f"parameter '{name}' has dtype {parameter.dtype}; only floating-point parameters, and codes of "
            "bitsandbytes, can be sharded. Keep an untrained tensor in a buffer "
            "(register_buffer), and a complex parameter as its real view"
        )
    if is_packed(parameter) and parameter.requires_grad:
        raise ValueError(
            f"parameter '{name}' holds codes of a quantized weight, which no gradient can change: expected "
            "requires_grad=False. Train adapters along with it"
        )
    kind = type(parameter)
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    plain = (Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__)  # type: ignore[attr-defined]
    is_plain = function in plain and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    # The own operations of bitsandbytes only keep `quant_state` along.
    if not (is_plain or hasattr(parameter, "quant_state")):
        raise ValueError(
            f"parameter '{name}' is a {kind.__name__} with operations of its own, so a shard of plain "
            "numbers cannot replace it: expected a torch.nn.Parameter. Shard the model before it is "
            "converted or distributed, quantize it with zeroshard.quantize, replace a DTensor by "
            "nn.Parameter(parameter.full_tensor()), or leave the parameter out with Config(ignored=...), "
            "whole on each rank"
        )


# -- which modules ---------------------------------------------------------------------------------------


def _choose(root: nn.Module, policy: UnitPolicy) -> dict[nn.Module, UnitSpec]:
    """The units of a choice other than the root, by their modules, in the order of registration."""
    names = {module: name for name, module in root.named_modules() if module is not root}
    if policy is None:
        named = {name for part in root.modules() for name in getattr(part, "_no_split_modules", None) or ()}
        blocks = dict(_find_blocks(root, named)) or dict(_find_blocks(root, ()))
        reasons = blocks | _large_layers(root, blocks)
    elif callable(policy):
        reasons = {module: "chosen by the predicate in units=" for module in names if policy(module)}
    else:
        reasons = {m: f"a {type(m).__name__}, listed in units=" for m in find_modules(root, policy)}
    found = {m: UnitSpec(name, m, reason=reasons[m]) for m, name in names.items() if m in reasons}
    for module, spec in found.items():
        if isinstance(module, _LISTS) and type(module).forward is nn.Module.forward:
            inside = sorted({type(child).__name__ for child in module.children()})
            raise ValueError(
                f"config key 'units': '{spec.name}' is a {type(module).__name__}, whose forward is never "
                "called, so its parameters would not be gathered: name the class of the modules inside "
                f"({', '.join(inside)}), or of the module around it"
            )
    return found


def _find_blocks(
    module: nn.Module, named: Collection[str], prefix: str = ""
) -> Iterator[tuple[nn.Module, str]]:
    """The outermost blocks, and the modules that may run a part of some modules, each with the reason.

    Args:
        module: the module to look in.
        named: classes of blocks that a model of transformers names itself, in `_no_split_modules`. Without
            them blocks are children of a ModuleList or Sequential that share their class and have children of
            their own.
        prefix: the name of the module, with a dot.
    """
    counts: Counter[type[nn.Module]] = Counter()
    if not named and isinstance(module, nn.ModuleList | nn.Sequential):
        counts.update(type(child) for child in module if _is_block(child))
    left_whole = _chosen_among(module)
    for name, child in module.named_children():
        if name in left_whole:
            continue
        kind, inside = type(child).__name__, sorted(_chosen_among(child))
        if named:  # other modules are in the unit around them anyway
            kinds = {part: {type(m).__name__ for m in child.get_submodule(part).modules()} for part in inside}
            inside = [part for part in inside if not kinds[part].isdisjoint(named)]
        if kind in named:
            yield child, f"a {kind}, named in the model's _no_split_modules"
        elif counts[type(child)] > 1:
            where = f"in '{prefix[:-1]}'" if prefix else "in the model"
            yield child, f"one of {counts[type(child)]} of class {kind} {where}"
        elif inside:
            yield child, f"a {kind}, which may run some modules of {', '.join(map(repr, inside))} alone"
        else:
            yield from _find_blocks(child, named, f"{prefix}{name}.")


def _chosen_among(module: nn.Module) -> set[str]:
    """The names of the children of a module of which its forward may run a part."""
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    config = getattr(module, "config", None)
    rates = [getattr(place, name, None) for place in (module, config) for name in _DROPS]
    if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss) or any(rates):
        return {name for name, child in module._modules.items() if isinstance(child, lists)}
    return set(_CHOSEN_FROM & module._modules.keys())


def _is_block(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and next(module.children(), None) is not None and not isinstance(module, _LISTS)


def _large_layers(root: nn.Module, blocks: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Embeddings and linear layers with many elements, outside the blocks and not chosen among."""
    inside = {module for block in blocks for module in block.modules()}
    for module in root.modules():
        for name in _chosen_among(module):
            inside.update(module.get_submodule(name).modules())
    return {
        module: f"a {type(module).__name__} of {size:,} elements, {LARGE:,} or more, outside of blocks"
        for module in root.modules()
        if module not in inside
        and type(module) in (nn.Embedding, nn.Linear)
        and (size := sum(parameter.numel() for parameter in module.parameters())) >= LARGE
    }


# -- parameters and buffers that sharding would change ------------------------------------------------------


def _check_tensors(names: Mapping[nn.Parameter, str], buffers: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters and buffers that a flat buffer cannot replace.

    Args:
        names: the parameters that are sharded, with their names.
        buffers: the buffers of the model, with their names.

    Raises:
        ValueError: parameters, or a parameter and a buffer, that share memory; a buffer that is not dense.
    """
    areas = [_Area.of(parameter, name) for parameter, name in names.items()]
    for name, buffer in buffers:
        if buffer.layout is not torch.strided or buffer.is_quantized or buffer.is_nested:
            kind = "nested" if buffer.is_nested else buffer.dtype if buffer.is_quantized else buffer.layout
            raise ValueError(
                f"buffer '{name}' is {kind}; expected a dense buffer, which can be sent to all ranks. "
                "Register its parts (indices and values, integers and scale, ...) as buffers and put them "
                "together in forward; or keep it as a plain attribute, with values of its own on each rank"
            )
        areas.append(_Area.of(buffer, name))
    _check_apart(area for area in areas if area.stop > area.start)


class _Area(NamedTuple):
    """The memory of a tensor; for a tensor without memory, its part of the storage."""

    home: str
    """The device, or the storage."""
    start: int
    stop: int
    tensor: Tensor
    name: str

    @staticmethod
    def of(tensor: Tensor, name: str) -> _Area:
        storage, size = tensor.untyped_storage(), tensor.element_size()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = (1 + sum((extent - 1) * step for extent, step in steps)) * size if tensor.numel() else 0
        # Two storages may be over one memory, as of from_numpy; a storage without memory has address 0.
        home = str(tensor.device) if storage.data_ptr() else f"storage {storage._cdata}"
        start = storage.data_ptr() + int(tensor.storage_offset()) * size
        return _Area(home, start, start + length, tensor, name)


def _check_apart(areas: Iterable[_Area]) -> None:
    """Refuse memory that two names share, if one of them is trained."""
    longest = _Area("", 0, 0, torch.empty(0), "")
    """The area so far that ends last in its home."""
    for area in sorted(areas, key=lambda area: area[:2]):
        if area.home != longest.home or area.start >= longest.stop:
            longest = area
            continue
        first, second = sorted((longest, area), key=lambda one: not isinstance(one.tensor, nn.Parameter))
        is_trained = longest.tensor.requires_grad or area.tensor.requires_grad
        if is_trained and isinstance(first.tensor, nn.Parameter):
            kind, remedy = "parameter", "assign one Parameter object to both modules (b.weight = a.weight)"
            if not isinstance(second.tensor, nn.Parameter):
                kind, remedy = "buffer", "compute the buffer in forward"
            raise ValueError(
                f"parameter '{first.name}' and {kind} '{second.name}' share memory but are two objects, so "
                f"sharding would separate them: {remedy}, or give each its own values with clone()"
            )
        longest = max(longest, area, key=lambda area: area.stop)
