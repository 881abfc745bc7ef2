"""Calls, bytes and waits of the collectives that algorithms asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

CONTROL, ALL_REDUCE, ALL_TO_ALL = "control", "all_reduce", "all_to_all"
KINDS = ("all_gather", "reduce_scatter", ALL_REDUCE, ALL_TO_ALL, "point_to_point", CONTROL)
"""`all_to_all` is the traffic of optimizers that compute with whole tensors, `point_to_point` the
traffic of pipelines; `control` are small agreements outside of the wire formula."""

SILENT = "silent"
"""The kind of what ranks compare and do not send, such as a step."""


@dataclass
class Counter:
    """Running sums since the last reset, by collective; `CommReport` says what they are."""

    bytes_sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*KINDS, SILENT), 0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*KINDS, SILENT), 0))
    waited_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    since: float = field(default_factory=time.monotonic)
