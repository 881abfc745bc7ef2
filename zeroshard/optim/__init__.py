"""The user's optimizer: taken over, clipped; and zeroshard's own."""

from zeroshard.optim import schedule
from zeroshard.optim.eightbit.rules import Adam8bit, AdamW8bit, AdEMAMix8bit, Lion8bit, SGD8bit
from zeroshard.optim.eightbit.trustratio import LAMB8bit, LARS8bit
from zeroshard.optim.layerwise import LAMB, LARS
from zeroshard.optim.muon import Muon
from zeroshard.optim.muongroups import muon_groups

__all__ = [
    "LAMB",
    "LARS",
    "AdEMAMix8bit",
    "Adam8bit",
    "AdamW8bit",
    "LAMB8bit",
    "LARS8bit",
    "Lion8bit",
    "Muon",
    "SGD8bit",
    "muon_groups",
    "schedule",
]
