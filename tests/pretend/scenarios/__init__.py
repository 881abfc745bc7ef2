"""All scenarios: importing this package makes them known."""

from tests.pretend.scenario import SCENARIOS
from tests.pretend.scenarios import around, divided, offloaded, pieces, pipelined, plain, tiers, uneven

__all__ = ["SCENARIOS", "around", "divided", "offloaded", "pieces", "pipelined", "plain", "tiers", "uneven"]
