"""`zeroshard estimate`: tables for somebody who plans a training run.

The settings with which a training fits into the memory of its ranks, the fastest first.

The order is by what a setting costs in each step, without a measurement:

    1. tier           values on the host move over its bus in each step, those in files over a disk
    2. recompute      a forward more: 8 operations in place of 6 for each parameter and token
    3. bytes sent     stages 1 and 2 send what stage 0 sends, stage 3 up to half as much again; where one
                      rank sends nothing, stage 3 still makes parameters in the compute dtype again
    4. bits           states of 8 bits cost no time, but precision: they come after states of 32 bits, and
                      bf16 main parameters, which take the fewest bytes, come last
    5. memory         of what is left, the setting that leaves the most
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from zeroshard.cli.options import EstimateOptions, MeshOptions
from zeroshard.config.checked import show
from zeroshard.config.dtypes import dtype_of
from zeroshard.config.sections import Config, Mesh
from zeroshard.memory.estimate import Counted, Estimate, side_by_side
from zeroshard.memory.tiered import byte_rows
from zeroshard.memory.typical import RECOMPUTED, planned_bytes, typical_sizes
from zeroshard.plan.arrangement import AXES, Arrangement
from zeroshard.planning.machine import read_cluster
from zeroshard.planning.timeline import TIERS
from zeroshard.tables import draw, format_bytes, format_count, render

if TYPE_CHECKING:
    from torch import nn

SHARE = 0.9
"""The part of a device that an estimate may take: tests hold activations to within 10 % of a measurement. And
the part of a host, which needs the rest for its processes."""

_RANKS_PER_NODE = 8


class _Tried(NamedTuple):
    """A setting with its estimate."""

    config: Config
    bits: int
    """Bits of each optimizer state."""
    estimate: Estimate

    @property
    def tiers(self) -> tuple[str, str]:
        return self.config.offload.optimizer, self.config.offload.parameters

    @property
    def cost(self) -> tuple[float, ...]:
        """Its place in the order."""
        config, found = self.config, self.estimate
        place = TIERS.index(self.tiers), config.recompute in RECOMPUTED, found.wire_bytes_per_step
        precise = -self.bits, config.precision.main_dtype == dtype_of("bfloat16")
        return *place, config.stage == 3, *precise, found.peak

    def __str__(self) -> str:
        more = ["bf16 main parameters"] if self.config.precision.main_dtype == dtype_of("bfloat16") else []
        more += ["recompute"] if self.config.recompute in RECOMPUTED else []
        tiers = zip(("optimizer", "parameters"), self.tiers, strict=True)
        offloaded = [f"{name}={tier}" for name, tier in tiers if tier != "none"]
        if share := self.config.offload.device_fraction:
            offloaded.append(f"device_fraction={share:g}")
        return ", ".join([f"stage {self.config.stage}", f"{self.bits}-bit states", *more, *offloaded])


def _settings(counted: Counted, configs: Sequence[Config], options: EstimateOptions) -> Iterator[_Tried]:
    """Yield the settings on each tier that has room."""
    settings = [
        (base, recompute)
        for base in configs
        for recompute in ((base.recompute,) if options.recompute or base.memory_budget else ("none", "unit"))
    ]
    sizes = (32, 8) if options.optimizer_bits is None else (options.optimizer_bits,)
    mains = (None, dtype_of("bfloat16")) if options.precision == "bf16" else (None,)
    for (optimizer, parameters), (base, recompute), bits, main in product(TIERS, settings, sizes, mains):
        is_far, is_in_files = optimizer != "none", "nvme" in (optimizer, parameters)
        has_room = (options.host or not is_far) and (options.nvme or not is_in_files)
        if has_room and (main is None or bits == 8):
            path = (base.offload.nvme_path or ".") if is_in_files else None
            offload = replace(base.offload, optimizer=optimizer, parameters=parameters, nvme_path=path)
            precision = replace(base.precision, main_dtype=main or base.precision.main_dtype)
            try:
                config = replace(base, recompute=recompute, offload=offload, precision=precision)
            except ValueError:  # the config rules some tiers out, as parameters at stages below 3
                continue
            for each in _shares_on_device(config):
                found = counted.on(options.ranks, each, optimizer_bits=bits)
                if _has_room(found, base, options):
                    break
            yield _Tried(each, bits, found)


def _shares_on_device(config: Config) -> Iterator[Config]:
    """Yield a config with less and less of what is on the host left on the device, at last with none."""
    offload = config.offload
    if offload.optimizer == "cpu":  # with all parameters on the device it is another setting
        for tenths in range(9 if offload.parameters == "none" else 4, 0, -1):
            yield replace(config, offload=replace(offload, device_fraction=tenths / 10))
    yield config


def _has_room(found: Estimate, config: Config, options: EstimateOptions) -> bool:
    """True if a rank, and its node, have the memory of an estimate of a config."""
    per_node = min(options.ranks, _RANKS_PER_NODE)
    far = per_node * found.host <= SHARE * options.host and per_node * found.nvme <= options.nvme
    room = min(SHARE * (options.memory or 0), planned_bytes(config) or math.inf)
    return far and found.peak <= room


_NO_BREAK = "\u00a0"  # keeps a number and its unit on one line
_LINE = 79  # characters of a line of text
_MOST_FITS = 8
_FIGURES = {"peak": "peak", "host": "host", "NVMe": "nvme", "sent": "wire_bytes_per_step"}
_LEGEND = "a micro-batch, F forward, f forward again, B backward, > < activations to the host and back"
_NOTE = (
    "The peak is the time at which most parameters are gathered: a unit that computes, those that are "
    "prefetched, and the root."
)
_ONE = (
    "A step has one micro-batch: with more, which a --config has as gradient_accumulation_steps, stages 0 "
    "and 1 hold whole sums of the gradients."
)
_NOT_COUNTED = "Activations and temporary buffers come on top and are not counted."
_ORDER = (
    "The order is by the cost of a step: first without offload, then without recomputation, then by the "
    "bytes sent, then with states of 32 bits, then with fp32 main parameters, then by memory."
)


def estimate(options: EstimateOptions) -> None:
    """Run `zeroshard estimate`."""
    names = ("stage", "precision", "tp", "pp", "microbatches", "recompute", "memory_budget")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    if options.config is not None and given:
        raise ValueError(f"--config is in the place of {', '.join(given)}: leave them out")
    _refuse_unused(options)
    model = _model(options)
    if options.length and options.tokens % options.length:
        raise ValueError(f"--length: expected a divisor of the {options.tokens} tokens, got {options.length}")
    length = options.length or options.tokens
    configs, bits = _configs(options), options.optimizer_bits or 32
    link = _link_of(options.cluster, configs[0]) if options.cluster else None
    counted = Counted(model, (options.tokens // max(1, length), length), link=link)
    lines = [fill(_about(model), _LINE).replace(_NO_BREAK, " "), _about_training(configs[0], options), ""]
    if options.memory is None:
        estimates = {
            f"stage {config.stage}": counted.on(options.ranks, config, optimizer_bits=bits)
            for config in configs
        }
        _refuse_budget(configs[0], min(found.peak for found in estimates.values()))
        table, note = side_by_side(_number(options.ranks), estimates), _NOTE
        for name, found in estimates.items():
            if found.time_line:
                table += f"\n\n{name}: {_LEGEND}\n{draw(found.time_line)}"
    else:
        table, note = _fits(counted, configs, options), _ORDER
    if configs[0].gradient_accumulation_steps * configs[0].pipeline.num_microbatches == 1:
        note += f" {_ONE}"
    print(*lines, table, "", fill(note if options.tokens else f"{note} {_NOT_COUNTED}", _LINE), sep="\n")


def _link_of(cluster: str, config: Config) -> tuple[float, float] | None:
    """Return the rates of the link to the host and back, in bytes per operation; None without one."""
    machine = read_cluster(cluster).machine
    rate = machine.flops.get(show(config.precision.param_dtype or dtype_of("float32")))
    if not (rate and machine.to_host and machine.from_host):
        return None
    return machine.to_host / rate, machine.from_host / rate


def _refuse_unused(options: EstimateOptions) -> None:
    """Refuse options that another option must come with: they would change nothing without it."""
    fits = options.memory is not None
    for name, is_used, needed in (
        ("host", fits, "--memory"),
        ("nvme", fits and options.host, "--memory and --host"),
        ("length", options.tokens, "--tokens"),
        ("memory_budget", options.tokens and options.recompute == "auto", "--tokens and --recompute auto"),
        ("cluster", options.memory_budget and not fits, "--memory-budget"),
    ):
        if getattr(options, name) and not is_used:
            raise ValueError(f"--{name.replace('_', '-')} needs {needed}")


def _refuse_budget(config: Config, least: int) -> None:
    """Refuse a budget of memory that is less than the least peak of all stages."""
    if 0 < (budget := planned_bytes(config)) < least:
        raise ValueError(
            f"memory_budget: expected at least {math.ceil(least / (1 << 20))}MiB, the least of all stages, "
            f"got {format_bytes(budget)}: take a larger budget, fewer --tokens, more --ranks or "
            "--optimizer-bits 8; --memory lists what fits, also with offload"
        )


def _model(options: EstimateOptions) -> nn.Module | int:
    given = options.model
    if isinstance(given, int):
        if options.lora is not None or options.weight_bits is not None:
            raise ValueError("--lora and --weight-bits: expected the config.json of a model, got a number")
        return given
    from zeroshard.hf.pretrained import build_skeleton, with_adapters, with_codes  # a number needs none of it

    model = build_skeleton(given)
    if options.weight_bits is not None:
        model = with_codes(model, options.weight_bits)
    return model if options.lora is None else with_adapters(model, options.lora)


def _configs(options: EstimateOptions) -> list[Config]:
    if options.config is not None:
        return [Config.from_file(options.config)]
    stages = range(4) if options.stage is None else [options.stage]
    given = {
        "precision": options.precision or "fp32",
        "mesh": {"tp": options.tp or 1, "pp": options.pp or 1},
        "pipeline": {"num_microbatches": options.microbatches or 1},
        "recompute": options.recompute or "none",
        "memory_budget": options.memory_budget,
    }
    return [Config.parse({"stage": stage, **given}) for stage in stages]


def _fits(counted: Counted, configs: Sequence[Config], options: EstimateOptions) -> str:
    """Return the settings that fit, as a table."""
    limit = f"{SHARE:.0%} of {format_bytes(options.memory or 0)}"
    if options.host:
        limit += f" and of {format_bytes(options.host)} of a host"
    if options.memory_budget:
        limit += f" and a budget of {format_bytes(options.memory_budget)}"
    tried = sorted(_settings(counted, configs, options), key=lambda one: one.cost)
    # Settings with the same bytes and costs are one: stage 2 of a step with one micro-batch is stage 1.
    fits = {
        (one.estimate, *one.cost): one
        for one in reversed(tried)
        if _has_room(one.estimate, one.config, options)
    }
    if not fits:
        nearest = min(tried, key=lambda one: one.estimate.peak)
        return (
            f"{_number(options.ranks)}: no setting fits into {limit}; the least is "
            f"{format_bytes(nearest.estimate.peak)} with {nearest}"
        )
    best = list(reversed(fits.values()))[:_MOST_FITS]
    names, *cells = zip(*byte_rows([one.estimate for one in best], _FIGURES), strict=True)
    room = _LINE - 13 * len(names)  # three spaces and 1000.00 GiB
    rows = [(fill(str(one), room), *figures) for one, figures in zip(best, cells, strict=True)]
    title = fill(f"{_number(options.ranks)}: settings within {limit}, best first", _LINE)
    table = render(title, ("setting", *names), rows)
    more = len(fits) - len(best)
    return f"{table}\n and {more} more" if more else table


def _about(model: nn.Module | int) -> str:
    if not isinstance(model, int):
        from zeroshard.hf.quantize import count_elements  # a number needs no torch

        num, trained = (count_elements(model.parameters(), only_trainable=only) for only in (False, True))
        of_these = "" if trained == num else f", of which {format_count(trained)} are trained"
        return f"{type(model).__name__} with {num:,} parameters{of_these}"
    sizes = typical_sizes(model)
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
    dtypes = precision.param_dtype, precision.main_dtype
    computed, main = (show(dtype or dtype_of("float32")) for dtype in dtypes)
    divided = f", layers divided over {config.mesh.tp} tensor ranks" if config.mesh.tp > 1 else ""
    if config.mesh.pp > 1:
        divided += f", blocks divided over {config.mesh.pp} pipeline ranks"
    tokens = f", {options.tokens:,} tokens in a micro-batch" if options.tokens else ""
    about = f"computed in {computed}, main parameters in {main}, Adam's states in "
    return fill(f"{about}{options.optimizer_bits or 32} bits{divided}{tokens}", _LINE)


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
