"""The loss scale of float16: a state machine with the defaults of torch.amp.GradScaler.

overflow                        value / 2, at least the minimum; the first `hysteresis` - 1 are let pass
`window` steps without overflow   value * 2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zeroshard.config.sections import DynamicLossScale

GROWTH = 2.0
BACKOFF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor on the loss that keeps small gradients from vanishing in float16."""

    value: float = 1.0
    policy: DynamicLossScale | None = None
    """The policy by which overflows move the scale; None for a fixed number."""
    num_steps: int = 0
    """Steps without overflow since the value last changed; counted for a dynamic scale."""
    num_spared: int = 0
    """Overflows that were let pass since the value last grew."""

    @classmethod
    def of(cls, asked: float | str | DynamicLossScale | None) -> LossScale:
        """The scale that `Precision.loss_scale` asks for: a number is fixed, anything else is dynamic."""
        if isinstance(asked, float):
            return cls(value=asked)
        policy = asked if isinstance(asked, DynamicLossScale) else DynamicLossScale()
        return cls(value=policy.start, policy=policy)

    @property
    def is_dynamic(self) -> bool:
        """True if overflows move the scale."""
        return self.policy is not None

    @property
    def can_fall(self) -> bool:
        """True if an overflow can lower the scale."""
        return self.policy is not None and self.value > self.policy.minimum

    def after(self, *, overflow: bool) -> LossScale:
        """The scale of the next step."""
        if self.policy is None:
            return self
        if overflow and self.num_spared + 1 < self.policy.hysteresis:
            return replace(self, num_steps=0, num_spared=self.num_spared + 1)
        if overflow:
            return replace(self, value=max(self.policy.minimum, self.value * BACKOFF), num_steps=0)
        if self.num_steps + 1 < self.policy.window:
            return replace(self, num_steps=self.num_steps + 1)
        return replace(self, value=self.value * GROWTH, num_steps=0, num_spared=0)

    def state(self) -> dict[str, Any]:
        """The part that a checkpoint keeps; the policy is the config's."""
        state = {"value": self.value, "is_dynamic": self.is_dynamic, "num_steps": self.num_steps}
        return state | {"num_spared": self.num_spared} if self.num_spared else state

    def resumed(self, saved: LossScale | None) -> LossScale:
        """This scale with the value and counts of a saved one, unless one of them is fixed."""
        if saved is None or not self.is_dynamic:
            return self
        return replace(self, value=saved.value, num_steps=saved.num_steps, num_spared=saved.num_spared)
