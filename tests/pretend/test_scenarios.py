from __future__ import annotations

import pytest

from tests.pretend.run import run_scenario
from tests.pretend.scenarios import SCENARIOS
from tests.ranks import Ranks


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_accelerator_would_run_it_without_mistakes(ranks: Ranks, name: str) -> None:
    outcome = run_scenario(ranks, SCENARIOS[name])
    assert not outcome.findings, outcome.describe()
