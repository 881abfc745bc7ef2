"""The user's optimizer: taken over, clipped; and zeroshard's own."""

from zeroshard.optim import schedule
from zeroshard.optim.layerwise import LAMB, LARS

__all__ = ["LAMB", "LARS", "schedule"]
