"""Tiers as data: the places of a rank's model states, from the device to files.

Main parameters, the gradients that the optimizer reads and its states lie together on one tier. At stage 3
the sharded parameters that gathers read may lie on another tier. Main parameters with which a device computes
stay there, with their gradients: states alone rest on another tier, and travel to it for their step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """A place of values, by the word of `Config.offload`."""

    DEVICE = "none"
    """The device that computes."""
    HOST = "cpu"
    """Host memory; on a rank that computes on the CPU, this is the device."""
    DISK = "nvme"
    """Files."""

    @property
    def distance(self) -> int:
        """The number of the tier, counted from the device."""
        return list(Tier).index(self)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of one rank."""

    optimizer: Tier = Tier.DEVICE
    """The tier of optimizer states, and of main parameters that the device does not compute with."""
    parameters: Tier = Tier.DEVICE
    """The tier of the sharded parameters in the compute dtype."""

    @staticmethod
    def of(optimizer: str, parameters: str, *, host_computes: bool) -> Tiers:
        """Return the tiers that a config asks for.

        Args:
            optimizer: `Config.offload.optimizer`.
            parameters: `Config.offload.parameters`.
            host_computes: True for a rank on the CPU, whose device is host memory.
        """
        asked = map(Tier, (optimizer, parameters))
        return Tiers(*(Tier.DEVICE if host_computes and tier is Tier.HOST else tier for tier in asked))
