"""The user's optimizer: taken over, clipped; and zeroshard's own."""

from zeroshard.optim import schedule
from zeroshard.optim.eightbit.rules import Adam8bit, AdamW8bit, AdEMAMix8bit, Lion8bit, SGD8bit
from zeroshard.optim.eightbit.trustratio import LAMB8bit, LARS8bit
from zeroshard.optim.layerwise import LAMB, LARS

__all__ = [
    "LAMB",
    "LARS",
    "AdEMAMix8bit",
    "Adam8bit",
    "AdamW8bit",
    "LAMB8bit",
    "LARS8bit",
    "Lion8bit",
    "SGD8bit",
    "schedule",
]
