"""Medians of paired measurements with a confidence interval that assumes no distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Median(NamedTuple):
    """A median and the bounds of its interval, in the unit of the values."""

    value: float
    low: float
    high: float


def rank_of_bound(count: int, confidence: float = 0.95) -> int:
    """The number of values to leave out at each end, so that the rest covers the median with `confidence`.

    The number of values below the median is binomial with probability 1/2 (David and Nagaraja,
    Order Statistics, section 7.1). With fewer than 6 values nothing reaches 95%: 0 then, the extremes.
    """
    tail, left_out = 0.0, 0
    for below in range(count // 2):
        tail += math.comb(count, below) / 2**count
        if tail > (1 - confidence) / 2:
            break
        left_out = below
    return left_out


def median_of(values: Sequence[float], confidence: float = 0.95) -> Median:
    """The median of `values` and the order statistics that bound it."""
    ordered = sorted(values)
    left_out = rank_of_bound(len(ordered), confidence)
    return Median(statistics.median(ordered), ordered[left_out], ordered[-1 - left_out])


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Median:
    """The median of the ratios of values measured in the same round."""
    return median_of([a / b for a, b in zip(numerators, denominators, strict=True)])
