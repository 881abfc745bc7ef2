from __future__ import annotations

import pytest

from tests.pretend.run import run_scenario
from tests.pretend.scenarios import SCENARIOS
from tests.ranks import Ranks

QUICK = {
    *("stage2", "stage3", "stage3_frozen", "hybrid", "one_rank"),
    *("edits_after_step_stage3", "exceptions_stage3", "branches_stage3"),
    *("offloaded_stage3", "ema_dropped", "muon_stage3", "tensor_stage3"),
    *("pipeline_stage3", "host_plain_loop"),
    *("parameters_on_host_in_pieces", "files_stage3_clip"),
    *("host_batches_1", "host_stepped_in_backward", "host_lamb_alone"),
    *("host_gradients_are_held", "main_read_where_gathered", "host_one_unit", "hook_stage1", "outer_step"),
}
"""The others repeat a feature with another option or use, or are rare uses: they are long."""


def test_quick_scenarios_exist() -> None:
    assert SCENARIOS.keys() >= QUICK


@pytest.mark.long_where(name=[name for name in SCENARIOS if name not in QUICK])
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_accelerator_would_run_it_without_mistakes(ranks: Ranks, name: str) -> None:
    outcome = run_scenario(ranks, SCENARIOS[name])
    assert not outcome.findings, outcome.describe()
