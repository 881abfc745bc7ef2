from __future__ import annotations

import pytest

from tests.pretend.breaks import BREAKS
from tests.pretend.run import run_scenario
from tests.pretend.scenarios import SCENARIOS
from tests.ranks import Ranks

CASES = [(name, scenario) for name, b in BREAKS.items() for scenario in b.scenarios]
LATER = sorted(CASES, key=lambda case: case[1] != "stage3")[::-1]
FIRST = {BREAKS[name].kinds: (name, scenario) for name, scenario in LATER}
"""A break of each kind of finding, in a plain training where it shows there."""


@pytest.mark.parametrize(
    ("name", "scenario"),
    [pytest.param(*case, marks=[] if case in FIRST.values() else pytest.mark.long) for case in CASES],
)
def test_a_broken_engine_is_found(ranks: Ranks, name: str, scenario: str) -> None:
    outcome = run_scenario(ranks, SCENARIOS[scenario], name)
    expected = BREAKS[name].kinds
    assert expected <= outcome.kinds, outcome.describe() or "no findings"
    assert outcome.kinds or not expected
    assert all(line.startswith(f"{scenario}: ") for line in outcome.describe().splitlines())
