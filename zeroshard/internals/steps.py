"""Steps of an optimizer inside a step of the same optimizer: torch calls the hooks of both.

torch wraps `step` of each class. A class whose step calls the step of its base has two wrappers, and each of
them calls all hooks. Their frames tell them apart, also after an exception, which ends a step without the
hooks that come after it.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch.optim import Optimizer

_WRAPPER = Optimizer.profile_hook_step(lambda *_: None).__code__
"""The code of all of these wrappers. The optimizer is their local variable `self`."""


def is_inner_step(optimizer: Optimizer) -> bool:
    """True in a hook of a step that an outer step of the same optimizer has called."""
    frame: FrameType | None = sys._getframe(1)
    num_steps = 0
    while frame is not None and num_steps < 2:
        num_steps += frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return num_steps == 2
