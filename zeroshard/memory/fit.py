"""The settings with which a training fits into the memory of its ranks, the fastest first.

The order is by what a setting costs in each step, without a measurement:

    1. tier           values on the host move over its bus in each step, those in files over a disk
    2. recompute      a forward more: 8 operations in place of 6 for each parameter and token
    3. bytes sent     stages 1 and 2 send what stage 0 sends, stage 3 up to half as much again; where one
                      rank sends nothing, stage 3 still makes parameters in the compute dtype again
    4. bits           states of 8 bits cost no time, but precision: they come after those of 32 bits
    5. memory         of what is left, the setting that leaves the most
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from zeroshard.config.sections import Config, Offload
from zeroshard.memory.estimate import Counted, Estimate

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


_GB = 10**9

DEVICES: Mapping[str, int] = {
    "v100": 32 * _GB,
    "t4": 16 * _GB,
    "a10": 24 * _GB,
    "a6000": 48 * _GB,
    "a100-40": 40 * _GB,
    "a100": 80 * _GB,
    "l4": 24 * _GB,
    "l40s": 48 * _GB,
    "h100": 80 * _GB,
    "h100-nvl": 94 * _GB,
    "h200": 141 * _GB,
    "b200": 180 * _GB,
    "rtx3090": 24 * _GB,
    "rtx4090": 24 * _GB,
    "rtx5090": 32 * _GB,
    "mi250x": 64 * _GB,  # of each of its two devices
    "mi300x": 192 * _GB,
    "mi325x": 256 * _GB,
}
"""Bytes of a device, as its vendor's data sheet has them. Its tools show more: the difference is a reserve
for the driver and the libraries."""


def memory_of(name: str) -> int:
    """Return the bytes of a device. Raises ValueError for an unknown name."""
    key = name.lower().replace(" ", "").replace("_", "-")
    if key in DEVICES:
        return DEVICES[key]
    close = difflib.get_close_matches(key, DEVICES, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise ValueError(f"expected a device among {', '.join(DEVICES)}, got {name!r}{hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory of a node."""

    device: int
    """Bytes of the device of a rank."""
    host: int = 0
    """Bytes of host memory of a node for its ranks."""
    nvme: int = 0
    """Bytes of files of a node for its ranks."""
    ranks_per_node: int = 8

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
    """The reasons for its place: all that it costs beside stage 0 with states of 32 bits."""


def find_fits(counted: Counted, world_size: int, base: Config, room: Room, tried: Tried = _ALL) -> list[Fit]:
    """Return the settings that fit, the fastest first.

    Args:
        counted: the model.
        world_size: number of ranks.
        base: the config of all settings, but for stage, recomputation and tiers.
        room: the memory of a node.
        tried: the stages, recomputation and bits of optimizer states to try.
    """
    found = (fit for fit in _settings(counted, world_size, base, room, tried) if room.holds(fit.estimate))
    # Settings with the same bytes and costs are one: stage 2 of a step with one micro-batch is stage 1.
    distinct: dict[object, Fit] = {}
    for fit in found:
        distinct.setdefault((fit.estimate, fit.costs), fit)
    return sorted(distinct.values(), key=_place)


def least(counted: Counted, world_size: int, base: Config, room: Room, tried: Tried = _ALL) -> Fit:
    """Return the setting that takes the least memory of the device, whether it fits or not."""
    return min(_settings(counted, world_size, base, room, tried), key=lambda fit: fit.estimate.peak)


def _settings(counted: Counted, world_size: int, base: Config, room: Room, tried: Tried) -> Iterator[Fit]:
    for config in _configs(base, room, tried):
        for each in tried.bits:
            estimate = counted.on(world_size, config, optimizer_bits=each)
            yield Fit(config, each, estimate, tuple(_costs(config, each)))


def _configs(base: Config, room: Room, tried: Tried) -> Iterator[Config]:
    for optimizer, parameters in _TIERS:
        if ("cpu" in (optimizer, parameters) and not room.host) or (
            "nvme" in (optimizer, parameters) and not (room.nvme and room.host)
        ):
            continue
        path = (base.offload.nvme_path or ".") if "nvme" in (optimizer, parameters) else None
        offload = Offload(optimizer=optimizer, parameters=parameters, nvme_path=path)
        for recompute in tried.recompute:
            for stage in tried.stages:
                if parameters != "none" and stage != 3:
                    continue
                with suppress(ValueError):  # the config rules some stages out, as a shard group does stage 0
                    yield replace(base, stage=stage, recompute=recompute, offload=offload)


def _tier(config: Config) -> int:
    return _TIERS.index((config.offload.optimizer, config.offload.parameters))


def _place(fit: Fit) -> tuple[int, bool, int, bool, int, int]:
    estimate = fit.estimate
    return (
        _tier(fit.config),
        fit.config.recompute == "unit",
        estimate.wire_bytes_per_step,
        fit.config.stage == 3,
        -fit.bits,
        estimate.peak,
    )


_COSTS: tuple[tuple[Callable[[Config, int], bool], str], ...] = (
    (lambda config, _: config.offload.optimizer == "cpu", "steps on the host"),
    (lambda config, _: config.offload.optimizer == "nvme", "states from files"),
    (lambda config, _: config.offload.parameters == "cpu", "parameters from the host"),
    (lambda config, _: config.offload.parameters == "nvme", "parameters from files"),
    (lambda config, _: config.recompute == "unit", "a forward more"),
    (lambda config, _: config.stage == 3, "gathers of parameters"),
    (lambda _, bits: bits == 8, "states rounded to 8 bits"),
)


def _costs(config: Config, bits: int) -> Iterator[str]:
    return (text for holds, text in _COSTS if holds(config, bits))
