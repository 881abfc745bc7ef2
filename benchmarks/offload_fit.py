"""The settings of offload that fit on a machine, from `zeroshard.estimate`; prints tables of the docs.

python benchmarks/offload_fit.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import zeroshard

GIGABYTE = 10**9
LEFT_ON_DEVICE = 0.75
"""The part of GPU memory for model states; the rest is for activations and buffers of kernels."""
LEFT_ON_HOST = 0.9
"""The part of host memory for model states; the rest is for processes and the system."""
BF16 = {"param_dtype": "bf16", "main_dtype": "bf16"}

SETTINGS: dict[str, dict[str, Any]] = {
    "A": {},
    "B": {"optimizer": "cpu", "step_in_backward": True},
    "C": {"optimizer": "cpu", "parameters": "cpu", "step_in_backward": True},
    "D": {"optimizer": "nvme", "parameters": "cpu", "step_in_backward": True},
    "E": {"optimizer": "nvme", "parameters": "nvme", "step_in_backward": True},
}
"""`Config.offload` without nvme_path, from the fastest setting to the slowest."""
SIZES = {"1B": 1e9, "7B": 7e9, "13B": 13e9, "30B": 30e9, "70B": 70e9}


@dataclass(frozen=True)
class Machine:
    """A machine with one GPU; gigabytes of 10**9 bytes."""

    device: float
    host: float
    disk: float


MACHINES = (
    Machine(24, 32, 0),
    Machine(24, 64, 500),
    Machine(24, 128, 1000),
    Machine(80, 64, 500),
    Machine(80, 128, 0),
    Machine(80, 128, 1000),
    Machine(80, 256, 1000),
    Machine(80, 512, 0),
)


@cache
def needs(num_params: float, letter: str, fraction: float = 0.0) -> tuple[int, int, int]:
    """Bytes on one GPU, on the host and in files, with 8-bit states and bf16 main parameters.

    Args:
        num_params: parameters of the model.
        letter: the setting.
        fraction: its `device_fraction`.
    """
    offload = SETTINGS[letter] | ({"device_fraction": fraction} if fraction else {})
    if "nvme" in offload.values():
        offload = offload | {"nvme_path": "/local"}
    config = {"stage": 3, "precision": BF16, "offload": offload}
    found = zeroshard.estimate(num_params, 1, config, optimizer_bits=8)
    return found.peak, found.host, found.nvme


def fits(need: tuple[int, int, int], machine: Machine) -> bool:
    """True if the bytes fit on a machine beside what is left free."""
    device, host, disk = need
    return (
        device <= LEFT_ON_DEVICE * machine.device * GIGABYTE
        and host <= LEFT_ON_HOST * machine.host * GIGABYTE
        and disk <= machine.disk * GIGABYTE
    )


def first_that_fits(num_params: float, machine: Machine) -> str:
    """The letter of the fastest setting that fits, with a `device_fraction` where it needs one; "-": none."""
    for letter, offload in SETTINGS.items():
        for fraction in (tenths / 10 for tenths in range(10 if offload else 1)):
            if fits(needs(num_params, letter, fraction), machine):
                return f"{letter}, {fraction}" if fraction else letter
    return "-"


def settings_table() -> str:
    """The markdown table of machines."""
    lines = ["| GPU | host | free disk | " + " | ".join(SIZES) + " |", "|---" * (3 + len(SIZES)) + "|"]
    for machine in MACHINES:
        letters = [first_that_fits(num_params, machine) for num_params in SIZES.values()]
        disk = f"{machine.disk:.0f} GB" if machine.disk else "none"
        lines.append(
            f"| {machine.device:.0f} GB | {machine.host:.0f} GB | {disk} | " + " | ".join(letters) + " |"
        )
    return "\n".join(lines)


def bytes_table() -> str:
    """The markdown table of the gigabytes that each setting needs."""
    lines = ["| setting | " + " | ".join(SIZES) + " |", "|---" * (1 + len(SIZES)) + "|"]
    for letter in SETTINGS:
        cells = [
            ", ".join(f"{count / GIGABYTE:.3g}" for count in needs(num_params, letter))
            for num_params in SIZES.values()
        ]
        lines.append(f"| {letter} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(settings_table())
    print()
    print(bytes_table())
