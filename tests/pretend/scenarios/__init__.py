"""All scenarios: importing this package makes them known."""

from tests.pretend.scenario import SCENARIOS
from tests.pretend.scenarios import (
    around,
    averaged,
    divided,
    hooked,
    logged,
    offloaded,
    pipelined,
    plain,
    tiers,
    uneven,
    wholes,
)

__all__ = [
    "SCENARIOS",
    "around",
    "averaged",
    "divided",
    "hooked",
    "logged",
    "offloaded",
    "pipelined",
    "plain",
    "tiers",
    "uneven",
    "wholes",
]
