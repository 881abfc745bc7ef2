"""The memory of devices, by the names that people use.

Sizes are those of the vendors' data sheets, in 10**9 bytes. The tools of a device show more, in 2**30 bytes;
the difference is a reserve for the driver and the libraries.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

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
"""Bytes of a device."""


def memory_of(name: str) -> int:
    """Return the bytes of a device. Raises ValueError for an unknown name."""
    key = name.lower().replace(" ", "").replace("_", "-")
    if key in DEVICES:
        return DEVICES[key]
    close = difflib.get_close_matches(key, DEVICES, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise ValueError(f"expected a device among {', '.join(DEVICES)}, got {name!r}{hint}")
