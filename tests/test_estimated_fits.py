"""The time that an estimate takes itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import zeroshard
from zeroshard.memory.activations import Tokens

ROOT = Path(__file__).parents[1]


def test_a_trillion_parameters_on_4096_ranks_take_less_than_5_seconds():
    started = time.perf_counter()
    for stage in range(4):
        found = zeroshard.estimate(1e12, 4096, {"stage": stage}, num_tokens=Tokens(8192, 4096))
    assert found.parameters == pytest.approx(4e12 / 4096, rel=1e-3)
    assert time.perf_counter() - started < 5
