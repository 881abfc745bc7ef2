from __future__ import annotations

import pytest

from tests.pretend.run import run_scenario
from tests.pretend.scenarios import SCENARIOS
from tests.ranks import Ranks

PLAIN = {"stage1", "stage1_bf16_clip", "stage1_accumulate", "stage2"}


def is_repeated(name: str) -> bool:
    """True for a scenario of a feature that is also there without bf16, or at stage 3."""
    others = {name.removesuffix("_bf16"), name.replace("stage2", "stage3"), name.replace("stage1", "stage3")}
    return name not in PLAIN and not SCENARIOS.keys().isdisjoint(others - {name})


@pytest.mark.long_where(name=[name for name in SCENARIOS if is_repeated(name)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_accelerator_would_run_it_without_mistakes(ranks: Ranks, name: str) -> None:
    outcome = run_scenario(ranks, SCENARIOS[name])
    assert not outcome.findings, outcome.describe()
