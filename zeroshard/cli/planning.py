"""`zeroshard estimate`: tables for somebody who plans a training run.

The settings with which a training fits into the memory of its ranks, the fastest first.

The order is by what a setting costs in each step, without a measurement:

    1. tier           values on the host move over its bus in each step, those in files over a disk
    2. recompute      a forward more: 8 operations in place of 6 for each parameter and token
    3. bytes sent     stages 1 and 2 send what stage 0 sends, stage 3 up to half as much again; where one
                      rank sends nothing, stage 3 still makes parameters in the compute dtype again
    4. bits           states of 8 bits cost no time, but precision: they come after states of 32 bits
    5. memory         of what is left, the setting that leaves the most
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from textwrap import fill
from typing import Any

import torch
from torch import nn

from zeroshard.cli.options import EstimateOptions, MeshOptions
from zeroshard.config.checked import show
from zeroshard.config.sections import Config, Mesh
from zeroshard.hf.pretrained import build_skeleton, with_adapters, with_codes
from zeroshard.memory.activations import Tokens, typical_sizes
from zeroshard.memory.estimate import Counted, Estimate, side_by_side
from zeroshard.plan.arrangement import AXES, Arrangement
from zeroshard.sharded import count_elements
from zeroshard.tables import format_bytes, format_count, render

SHARE = 0.9
"""The part of a device that an estimate may take: tests hold activations to within 10 % of a measurement."""

_TIERS = (
    ("none", "none"),
    ("cpu", "none"),
    ("cpu", "cpu"),
    ("nvme", "cpu"),
    ("nvme", "nvme"),
)
"""Tiers of optimizer states and of parameters, by their cost."""


_RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory of a node."""

    device: int
    """Bytes of the device of a rank."""
    host: int = 0
    """Bytes of host memory of a node for its ranks."""
    nvme: int = 0
    """Bytes of files of a node for its ranks."""
    ranks_per_node: int = _RANKS_PER_NODE

    def holds(self, estimate: Estimate) -> bool:
        """True if a rank and its node have room for an estimate."""
        num = self.ranks_per_node
        far = num * estimate.host <= self.host and num * estimate.nvme <= self.nvme
        return far and estimate.peak <= SHARE * self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The settings to try, on each tier that has room."""

    stages: Sequence[int] = range(4)
    recompute: Sequence[str] = ("none", "unit")
    bits: Sequence[int] = (32, 8)
    """Bits of each optimizer state."""


_ALL = Tried()


@dataclass(frozen=True, slots=True)
class Fit:
    """A setting with its estimate."""

    config: Config
    bits: int
    """Bits of each optimizer state."""
    estimate: Estimate
    costs: tuple[str, ...]
    """The reasons for its place: all that it costs compared with stage 0 and states of 32 bits."""


def find_fits(counted: Counted, world_size: int, base: Config, room: Room, tried: Tried = _ALL) -> list[Fit]:
    """Return the settings that fit, the fastest first.

    Args:
        counted: the model.
        world_size: number of ranks.
        base: the config of all settings, but for stage, recomputation and tiers.
        room: the memory of a node.
        tried: the stages, recomputation and bits of optimizer states to try.
    """
    # Settings with the same bytes and costs are one: stage 2 of a step with one micro-batch is stage 1.
    distinct: dict[object, Fit] = {}
    for fit in _settings(counted, world_size, base, room, tried):
        if room.holds(fit.estimate):
            distinct.setdefault((fit.estimate, fit.costs), fit)
    return sorted(distinct.values(), key=_place)


def least(counted: Counted, world_size: int, base: Config, room: Room, tried: Tried = _ALL) -> Fit:
    """Return the setting that takes the least memory of the device, whether it fits or not."""
    return min(_settings(counted, world_size, base, room, tried), key=lambda fit: fit.estimate.peak)


def _settings(counted: Counted, world_size: int, base: Config, room: Room, tried: Tried) -> Iterator[Fit]:
    for config in _tried_configs(base, room, tried):
        for each in tried.bits:
            for own in _by_share_on_device(config):
                estimate = counted.on(world_size, own, optimizer_bits=each)
                if room.holds(estimate):
                    break
            yield Fit(own, each, estimate, tuple(cost for holds, cost in _COSTS if holds(own, each)))


def _by_share_on_device(config: Config) -> Iterator[Config]:
    """Yield a config with less and less of what is on the host left on the device, at last with none."""
    if config.offload.optimizer == "cpu":  # with all parameters on the device it is another setting
        for tenths in range(9 if config.offload.parameters == "none" else 4, 0, -1):
            yield replace(config, offload=replace(config.offload, device_fraction=tenths / 10))
    yield config


def _tried_configs(base: Config, room: Room, tried: Tried) -> Iterator[Config]:
    for optimizer, parameters in _TIERS:
        if ("cpu" in (optimizer, parameters) and not room.host) or (
            "nvme" in (optimizer, parameters) and not (room.nvme and room.host)
        ):
            continue
        path = (base.offload.nvme_path or ".") if "nvme" in (optimizer, parameters) else None
        offload = replace(base.offload, optimizer=optimizer, parameters=parameters, nvme_path=path)
        for recompute in tried.recompute:
            for stage in tried.stages:
                if parameters != "none" and stage != 3:
                    continue
                with suppress(ValueError):  # the config rules some stages out, as a shard group does stage 0
                    yield replace(base, stage=stage, recompute=recompute, offload=offload)


def _place(fit: Fit) -> tuple[int, bool, int, bool, int, int]:
    estimate = fit.estimate
    return (
        _TIERS.index((fit.config.offload.optimizer, fit.config.offload.parameters)),
        fit.config.recompute == "unit",
        estimate.wire_bytes_per_step,
        fit.config.stage == 3,
        -fit.bits,
        estimate.peak,
    )


_COSTS: tuple[tuple[Callable[[Config, int], bool], str], ...] = (
    (lambda config, _: config.offload.optimizer == "cpu", "states from the host"),
    (lambda config, _: config.offload.optimizer == "nvme", "states from files"),
    (lambda config, _: config.offload.parameters == "cpu", "parameters from the host"),
    (lambda config, _: config.offload.parameters == "nvme", "parameters from files"),
    (lambda config, _: config.recompute == "unit", "a forward more"),
    (lambda config, _: config.stage == 3, "gathers of parameters"),
    (lambda _, bits: bits == 8, "states rounded to 8 bits"),
)


_NO_BREAK = "\u00a0"  # keeps a number and its unit on one line
_LINE = 79  # characters of a line of text
_MOST_FITS = 8
_NOTE = (
    "The peak is the time at which most parameters are gathered: a unit that computes, those that are "
    "prefetched, and the root."
)
_NOT_COUNTED = "Activations and temporary buffers come on top and are not counted."
_ORDER = (
    "The order is by the cost of a step: first without offload, then without recomputation, then by the "
    "bytes sent, then with states of 32 bits, then by memory."
)


def estimate(options: EstimateOptions) -> None:
    """Run `zeroshard estimate`."""
    names = ("stage", "precision", "tp", "pp", "microbatches", "recompute")
    if options.config is not None and any(getattr(options, name) is not None for name in names):
        raise ValueError(
            "--config has stage, precision, mesh, pipeline and recompute: leave out --stage, --precision, "
            "--tp, --pp, --microbatches and --recompute"
        )
    _refuse_unused(options)
    _refuse_missing(options)
    model = _model(options)
    tokens = Tokens(options.tokens, options.length, options.attention == "eager")
    counted, configs, bits = Counted(model, tokens), _configs(options), options.optimizer_bits or 32
    lines = [fill(_about(model), _LINE).replace(_NO_BREAK, " "), _about_training(configs[0], options), ""]
    if options.memory is None:
        found = {
            (num_ranks, config.stage): counted.on(num_ranks, config, optimizer_bits=bits)
            for num_ranks in options.ranks
            for config in configs
        }
        lines += [_table(found), "", fill(_NOTE if options.tokens else f"{_NOTE} {_NOT_COUNTED}", _LINE)]
    else:
        lines += [_fits(counted, num_ranks, configs, options) for num_ranks in options.ranks]
        lines += ["", fill(_ORDER if options.tokens else f"{_ORDER} {_NOT_COUNTED}", _LINE)]
    print(*lines, sep="\n")


def _refuse_unused(options: EstimateOptions) -> None:
    """Refuse options that another option must come with: they would change nothing without it."""
    fits = options.memory is not None
    for name, is_used, needed in (
        ("host", fits, "--memory"),
        ("nvme", fits and options.host, "--memory and --host"),
        ("length", options.tokens, "--tokens"),
        ("attention", options.tokens, "--tokens"),
    ):
        if getattr(options, name) and not is_used:
            raise ValueError(f"--{name.replace('_', '-')} needs {needed}")


def _refuse_missing(options: EstimateOptions) -> None:
    """Refuse options whose packages are not installed, before a model is built for seconds."""
    lora = "--lora needs transformers and peft: pip install zeroshard[hf,lora]"
    codes = "--weight-bits needs transformers and bitsandbytes: pip install zeroshard[hf,eightbit]"
    asked = ((options.lora, "peft", lora), (options.weight_bits, "bitsandbytes", codes))
    for given, package, remedy in asked:
        if given is not None and not (find_spec("transformers") and find_spec(package)):
            raise ImportError(remedy)


def _model(options: EstimateOptions) -> nn.Module | int:
    given = options.model
    if isinstance(given, int):
        if options.lora is not None or options.weight_bits is not None:
            raise ValueError("--lora and --weight-bits: expected the config.json of a model, got a number")
        return given
    model = build_skeleton(given) if isinstance(given, Path) else build_model(given)
    if options.weight_bits is not None:
        model = with_codes(model, options.weight_bits)
    return model if options.lora is None else with_adapters(model, options.lora)


def build_model(path: str) -> nn.Module:
    """Import a function or a class and call it on the meta device.

    Args:
        path: package.module:name; modules in the current directory are found, too.

    Raises:
        ValueError: it cannot be imported, raises an error, or gives no module.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        make = resolve_name(path)
        with torch.device("meta"):
            model = make if isinstance(make, nn.Module) else make()
    except Exception as error:  # of any kind, as the code is the user's
        raise ValueError(f"'{path}': {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"'{path}': expected a function that returns a model, got {type(model).__name__}")
    return model


def _configs(options: EstimateOptions) -> list[Config]:
    if options.config is not None:
        return [Config.from_file(options.config)]
    stages = _ALL.stages if options.stage is None else [options.stage]
    given = _given(
        precision=options.precision,
        mesh=_given(tp=options.tp, pp=options.pp),
        pipeline=_given(num_microbatches=options.microbatches),
        recompute=options.recompute,
    )
    return [Config.parse({"stage": stage, **given}) for stage in stages]


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _fits(counted: Counted, num_ranks: int, configs: Sequence[Config], options: EstimateOptions) -> str:
    """Return the settings that fit, as a table."""
    device, per_node = options.memory or 0, min(num_ranks, _RANKS_PER_NODE)
    room = Room(device=device, host=options.host, nvme=options.nvme, ranks_per_node=per_node)
    chosen = _given(stages=options.stage, recompute=options.recompute, bits=options.optimizer_bits)
    tried = Tried(**{name: [value] for name, value in chosen.items()})
    fits = find_fits(counted, num_ranks, configs[-1], room, tried)
    title = (
        f"{_number(num_ranks)}: settings that take at most {SHARE:.0%} of {format_bytes(device)}, best first"
    )
    if not fits:
        nearest = least(counted, num_ranks, configs[-1], room, tried)
        need = f"{format_bytes(nearest.estimate.peak)} with {_setting(nearest)}"
        limit = f"{SHARE:.0%} of {format_bytes(device)}"
        return f"{_number(num_ranks)}: no setting fits into {limit}; the least is {need}"
    rows = [_row(fit) for fit in fits[:_MOST_FITS]]
    columns = ("setting", "peak", "host", "NVMe", "sent in a step", "costs")
    used = [0, 1, *(at for at in (2, 3) if any(row[at] for row in rows)), 4, 5]
    table = render(title, [columns[at] for at in used], [[row[at] for at in used] for row in rows], 120)
    more = len(fits) - len(rows)
    return f"{table}\n and {more} more" if more else table


def _row(fit: Fit) -> tuple[str, ...]:
    found = fit.estimate
    far = [format_bytes(number) if number else "" for number in (found.host, found.nvme)]
    costs = ", ".join(fit.costs) or "nothing"
    return (_setting(fit), format_bytes(found.peak), *far, format_bytes(found.wire_bytes_per_step), costs)


def _setting(fit: Fit) -> str:
    config, tiers = fit.config, {n: getattr(fit.config.offload, n) for n in ("optimizer", "parameters")}
    recomputed = ["recompute"] if config.recompute == "unit" else []
    offloaded = [f"{name}={tier}" for name, tier in tiers.items() if tier != "none"]
    if share := config.offload.device_fraction:
        offloaded.append(f"device_fraction={share:g}")
    return ", ".join([f"stage {config.stage}", f"{fit.bits}-bit states", *recomputed, *offloaded])


def _table(found: dict[tuple[int, int], Estimate]) -> str:
    """Return all rows for stages or numbers of ranks side by side; the peaks alone if both are several."""
    ranks, stages = sorted({num for num, _ in found}), sorted({stage for _, stage in found})
    if len(ranks) == 1:
        return side_by_side(_number(ranks[0]), {f"stage {s}": found[ranks[0], s] for s in stages})
    if len(stages) == 1:
        return side_by_side(f"stage {stages[0]}", {_number(num): found[num, stages[0]] for num in ranks})
    rows = [(_number(num), *(format_bytes(found[num, s].peak) for s in stages)) for num in ranks]
    return render("total at the peak, for each rank", ("", *(f"stage {s}" for s in stages)), rows)


def _about(model: nn.Module | int) -> str:
    if isinstance(model, nn.Module):
        num, trained = (count_elements(model.parameters(), only_trainable=only) for only in (False, True))
        of_these = "" if trained == num else f", of which {format_count(trained)} are trained"
        return f"{type(model).__name__} with {num:,} parameters{of_these}"
    sizes = typical_sizes(model)
    if not sizes.depth:
        return f"{model:,} parameters, gathered all at once"
    block, embedding = (
        format_count(number).replace(" ", _NO_BREAK) for number in (sizes.blocks[0], sizes.embedding)
    )
    tables = "embedding, which is the head too," if sizes.is_tied else "embedding and head"
    return (
        f"{model:,} parameters, taken as a typical language model: {sizes.depth} blocks of "
        f"{block}, {tables} of {embedding} "
        f"(width {sizes.width:,}, vocabulary {sizes.vocabulary:,}). "
        "A config.json in place of the number is exact."
    )


def _about_training(config: Config, options: EstimateOptions) -> str:
    precision = config.precision
    by_name = sorted({show(dtype) for dtype in dict(precision.overrides or ()).values()})
    others = f" and by name in {', '.join(by_name)}" if by_name else ""
    computed, main = (show(dtype or torch.float32) for dtype in (precision.param_dtype, precision.main_dtype))
    divided = f", layers divided over {config.mesh.tp} tensor ranks" if config.mesh.tp > 1 else ""
    if config.mesh.pp > 1:
        divided += f", blocks divided over {config.mesh.pp} pipeline ranks"
    tokens = f", {options.tokens:,} tokens in a micro-batch" if options.tokens else ""
    states = f"Adam's states in {options.optimizer_bits or 32} bits"
    about = f"computed in {computed}{others}, main parameters in {main}, {states}{divided}{tokens}"
    return fill(about, _LINE)


# -------------------------------------------------------------------------------------- places of ranks


_MAX_RANKS = 1 << 12  # nobody reads the lines of more


def mesh(options: MeshOptions) -> None:
    """Run `zeroshard mesh`."""
    if options.ranks > _MAX_RANKS:
        raise ValueError(f"--ranks: expected at most {_MAX_RANKS:,}, got {options.ranks:,}")
    config = Config(mesh=Mesh(pp=options.pp, tp=options.tp), shard_group_size=options.shard_group_size)
    sizes = Arrangement(options.ranks, config.mesh.pp, config.mesh.tp, config.shard_group_size).sizes
    product_of_sizes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
    rows = [tuple(map(str, (rank, *place))) for rank, place in enumerate(product(*map(range, sizes)))]
    print(render(f"{_number(options.ranks)}: {product_of_sizes}", ("rank", *AXES), rows))


def _number(count: int) -> str:
    return f"{count:,} rank" + "s" * (count != 1)
