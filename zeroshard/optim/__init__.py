"""The user's optimizer: taken over, clipped; and zeroshard's own."""

from zeroshard.optim import schedule
from zeroshard.optim.eightbit.rules import (
    Adam8bit,
    AdamW8bit,
    AdEMAMix8bit,
    LAMB8bit,
    LARS8bit,
    Lion8bit,
    SGD8bit,
)
from zeroshard.optim.layerwise import LAMB, LARS
from zeroshard.optim.muon import Muon, muon_groups
from zeroshard.optim.onebit import OneBitAdam
from zeroshard.stepping.wholes import Deferred, UsesWholes, wholes_here

__all__ = [
    "LAMB",
    "LARS",
    "AdEMAMix8bit",
    "Adam8bit",
    "AdamW8bit",
    "Deferred",
    "LAMB8bit",
    "LARS8bit",
    "Lion8bit",
    "Muon",
    "OneBitAdam",
    "SGD8bit",
    "UsesWholes",
    "muon_groups",
    "schedule",
    "wholes_here",
]
