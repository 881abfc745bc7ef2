"""All scenarios: importing this package makes them known."""

from tests.pretend.scenario import SCENARIOS
from tests.pretend.scenarios import around, offloaded, plain, tiers, uneven

__all__ = ["SCENARIOS", "around", "offloaded", "plain", "tiers", "uneven"]
