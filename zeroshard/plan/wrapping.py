"""The modules that become units, and the unit of each parameter."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroshard.plan.choices import chosen_among
from zeroshard.plan.ignored import find_ignored
from zeroshard.plan.originals import Original, is_coded, is_packed
from zeroshard.plan.overrides import DtypesByName, find_overrides
from zeroshard.plan.refusals import check_tensors
from zeroshard.plan.replicated import FrozenChoice, find_replicated
from zeroshard.plan.together import find_together

LARGE = 1 << 20
"""Elements from which a layer outside the repeated blocks (embedding, head) is a unit of its own."""

UnitPolicy = Sequence[str | Sequence[str]] | Callable[[nn.Module], bool] | None
"""Class names and lists of module names, a predicate, or None: find the repeated blocks."""


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit to be: its modules and the parameters that it owns, by name."""

    name: str
    modules: tuple[nn.Module, ...]
    """The modules whose forwards use the parameters; several only if `units=` lists them together."""
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
        ValueError: a class name that no module has; a parameter that cannot be sharded; a pattern that fits
            no parameter.
    """
    for name, module in root.named_modules():
        _check_module(module, name)
    chosen = _choose(root, policy)
    together = find_together(root, policy, chosen)
    modules = (chosen.keys() | together.keys()) - {root}
    specs = {root: UnitSpec("", (root,), reason=_why_root(root))}
    for name, module in root.named_modules():
        if module in together:
            group = together[module]
            specs.setdefault(group.modules[0], UnitSpec(group.name, group.modules, reason=group.reason))
        elif module in modules:
            specs[module] = UnitSpec(name, (module,), reason=chosen[module])
    left_out = find_ignored(root, ignored)
    chains: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    names: dict[nn.Parameter, str] = {}
    owners: dict[nn.Parameter, dict[tuple[nn.Module, str], None]] = {}
    firsts = {module: together[module].modules[0] if module in together else module for module in modules}
    for chain, prefix, module in _walk(root, (), "", firsts):
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter not in left_out:
                chains.setdefault(parameter, []).append(chain)
                names.setdefault(parameter, prefix + attribute)
                owners.setdefault(parameter, {})[module, attribute] = None
    compute_dtypes = find_overrides(root, overrides, left_out)
    replicated = find_replicated(root, frozen, left_out)
    for parameter, name in names.items():
        _check(parameter, name)
    check_tensors({name: parameter for parameter, name in names.items()}, root.named_buffers())
    for parameter, name in names.items():
        original = Original(
            parameter,
            name,
            tuple(owners[parameter]),
            compute_dtype=compute_dtypes.get(parameter),
            is_replicated=parameter in replicated,
        )
        specs[_lowest_common(chains[parameter])].originals.append(original)
    return [spec for spec in specs.values() if spec.originals or root in spec.modules]


def _walk(
    module: nn.Module, chain: tuple[nn.Module, ...], prefix: str, units: Mapping[nn.Module, nn.Module]
) -> Iterator[tuple[tuple[nn.Module, ...], str, nn.Module]]:
    """Every path to every module: (the units that enclose it, its name with a dot, the module).

    Args:
        units: the modules that become units, each with the first module of its unit.
    """
    if module in units or not chain:
        chain = (*chain, units.get(module, module))
    yield chain, prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, chain, f"{prefix}{name}.", units)


def _lowest_common(chains: list[tuple[nn.Module, ...]]) -> nn.Module:
    return [unit for unit in chains[0] if all(unit in chain for chain in chains[1:])][-1]


_WRAPPERS = {
    "DistributedDataParallel": "give initialize the model inside, its attribute `module`",
    "DataParallel": "give initialize the model inside, its attribute `module`",
    "FullyShardedDataParallel": "give initialize the model without that wrapper",
    "FSDPModule": "leave fully_shard out, zeroshard shards the parameters",
    "ReplicateModule": "leave replicate out, zeroshard reduces the gradients",
}
"""Classes of torch that distribute a module over the ranks themselves, and the remedy for each."""


def _check_module(module: nn.Module, name: str) -> None:
    for base in type(module).__mro__:
        if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
            place = f"module '{name}'" if name else "the model"
            raise ValueError(
                f"{place} is a {base.__name__} of torch, which distributes it over the ranks already: "
                f"{_WRAPPERS[base.__name__]}"
            )
    if isinstance(module, torch.jit.ScriptModule):
        what = f"module '{name}'" if name else "the model"
        raise ValueError(
            f"{what} is a scripted or traced module (torch.jit), and its compiled forward keeps parameters "
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
    if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
        raise ValueError(
            f"parameter '{name}' is a DTensor, which is distributed over ranks already; expected a plain "
            "parameter. Leave out the call that distributed it (fully_shard, parallelize_module, "
            "distribute_tensor), or replace it by nn.Parameter(parameter.full_tensor())"
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
            "bitsandbytes or torchao, can be sharded. Keep an untrained tensor in a buffer "
            "(register_buffer), and a complex parameter as its real view"
        )
    if is_packed(parameter) and parameter.requires_grad:
        raise ValueError(
            f"parameter '{name}' holds codes of a quantized weight, which no gradient can change: expected "
            "requires_grad=False. Train adapters beside it"
        )


# -- which modules ---------------------------------------------------------------------------------------

Chosen = dict[nn.Module, str]
"""Modules that become units, with the reason."""


def _choose(root: nn.Module, policy: UnitPolicy) -> Chosen:
    if policy is None:
        blocks = _named_blocks(root) or dict(_repeated_blocks(root))
        return blocks | _large_layers(root, blocks)
    if callable(policy):
        chosen = {module: "chosen by the predicate in units=" for module in root.modules() if policy(module)}
    else:
        chosen = _by_class_name(root, policy)
    for name, module in root.named_modules():
        if module in chosen:
            _check_forward(module, name)
    return chosen


def _check_forward(module: nn.Module, name: str) -> None:
    """Refuse a list of modules: nobody calls it, so its parameters would never be gathered."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
    if is_list and type(module).forward is nn.Module.forward:
        inside = sorted({type(child).__name__ for child in module.children()})
        raise ValueError(
            f"config key 'units': '{name}' is a {type(module).__name__}, whose forward is never called, so "
            "its parameters would not be gathered: name the class of the modules inside "
            f"({', '.join(inside)}) or of the module around it"
        )


def _by_class_name(root: nn.Module, policy: Sequence[str | Sequence[str]]) -> Chosen:
    known = {type(module).__name__ for module in root.modules()}
    names = [name for name in policy if isinstance(name, str)]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"config key 'units': the model has no module of class '{name}'{hint}")
    wanted = set(names)
    of_class = {module: type(module).__name__ for module in root.modules()}
    return {module: f"a {name}, listed in units=" for module, name in of_class.items() if name in wanted}


def _named_blocks(root: nn.Module) -> Chosen:
    """Blocks that a transformers model names itself, in `_no_split_modules`.

    If the forward of the module around them may leave out some, that module is the unit.
    """
    names = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return dict(_outermost(root, names)) if names else {}


def _outermost(module: nn.Module, names: set[str]) -> Iterator[tuple[nn.Module, str]]:
    left_whole = chosen_among(module)
    for name, child in module.named_children():
        if name in left_whole:
            continue
        if (kind := type(child).__name__) in names:
            yield child, f"a {kind}, named in the model's _no_split_modules"
        elif inside := {name for name in chosen_among(child) if _kinds(child, name) & names}:
            blocks = sorted(set().union(*(_kinds(child, name) & names for name in inside)))
            yield child, f"{_whose_forward_chooses(child, inside)}; units={blocks} cuts it"
        else:
            yield from _outermost(child, names)


def _kinds(module: nn.Module, name: str) -> set[str]:
    return {type(part).__name__ for part in module.get_submodule(name).modules()}


def _whose_forward_chooses(module: nn.Module, among: Iterable[str]) -> str:
    listed = ", ".join(map(repr, sorted(among)))
    return f"a {type(module).__name__}, whose forward chooses among the modules in {listed}"


def _repeated_blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str]]:
    """Children of a ModuleList or Sequential that share their class and have children of their own.

    If a forward chooses among modules, the module around them is the block: ranks call different ones, and
    would wait for each other.
    """
    counts: Counter[type[nn.Module]] = Counter()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        counts.update(type(child) for child in module if _is_block(child))
    left_whole = chosen_among(module)
    for name, child in module.named_children():
        if name in left_whole:
            continue
        inside = chosen_among(child)
        if counts[type(child)] > 1:
            where = f"in '{prefix[:-1]}'" if prefix else "in the model"
            yield child, f"one of {counts[type(child)]} of class {type(child).__name__} {where}"
        elif inside:
            yield child, _whose_forward_chooses(child, inside)
        else:
            yield from _repeated_blocks(child, f"{prefix}{name}.")


def _is_block(module: nn.Module) -> bool:
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and next(module.children(), None) is not None and not is_list


def _large_layers(root: nn.Module, blocks: Chosen) -> Chosen:
    """Embeddings and linear layers with many elements, outside the blocks and not chosen among."""
    inside = {module for block in blocks for module in block.modules()}
    for module in root.modules():
        for name in chosen_among(module):
            inside.update(module.get_submodule(name).modules())
    sizes = {
        module: sum(parameter.numel() for parameter in module.parameters())
        for module in root.modules()
        if module not in inside and type(module) in (nn.Embedding, nn.Linear)
    }
    return {
        module: f"a {type(module).__name__} of {size:,} elements, {LARGE:,} or more, outside of blocks"
        for module, size in sizes.items()
        if size >= LARGE
    }


def _why_root(root: nn.Module) -> str:
    listed = ", ".join(map(repr, sorted(chosen_among(root))))
    return f"the rest; its forward chooses among the modules in {listed}" if listed else "the rest"
