"""Run one scenario on its ranks, and put together what they found."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.pretend.breaks import BREAKS
from tests.pretend.device import pretend_device
from tests.pretend.findings import Finding, Kind
from tests.pretend.orders import check_orders
from tests.pretend.scenario import Bench, Scenario
from tests.pretend.scenarios import SCENARIOS
from tests.pretend.trace import Report
from tests.ranks import Ranks


@dataclass(frozen=True)
class Outcome:
    """What a scenario gave."""

    scenario: str
    findings: Counter[Finding]
    """Of all ranks."""
    reports: Sequence[Report]
    """By rank."""

    @property
    def kinds(self) -> set[Kind]:
        return {finding.kind for finding in self.findings}

    def describe(self, most: int = 20) -> str:
        """The findings, a line each, the scenario named."""
        lines = [f"{self.scenario}: {finding} (x{count})" for finding, count in sorted(self.findings.items())]
        rest = [f"{self.scenario}: and {len(lines) - most} more"] if len(lines) > most else []
        return "\n".join(lines[:most] + rest)


def run_on_rank(name: str, break_name: str | None, folder: Path) -> Report:
    """Run a scenario in a rank's process, perhaps with a broken engine; `folder` is for its files."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    with pretend_device() as trace:
        bench = Bench(rank, size, trace, folder)
        if break_name is None:
            SCENARIOS[name].run(bench)
        else:
            with BREAKS[break_name].damage(bench):
                SCENARIOS[name].run(bench)
        bench.engine = None
    for compare in bench.later if break_name is None else ():
        compare()
        bench.engine = None
    return trace.to_report()


def run_scenario(ranks: Ranks, scenario: Scenario, break_name: str | None = None) -> Outcome:
    """Run a scenario and compare its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        reports = ranks(scenario.num_ranks, run_on_rank, scenario.name, break_name, Path(folder))
    findings: Counter[Finding] = Counter()
    for report in reports:
        for finding, count in report.findings.items():
            is_expected = finding.kind is Kind.SYNC and any(p in finding.text for p in scenario.may_sync)
            if not is_expected:
                findings[finding] += count
    findings.update(check_orders([report.collectives for report in reports]))
    return Outcome(scenario.name, findings, reports)
