"""The loss scale of float16: a state machine with the constants of torch.amp.GradScaler.

overflow                                 value / 2, at least MINIMUM
GROWTH_INTERVAL steps without overflow   value * 2
"""

from __future__ import annotations

from dataclasses import dataclass, replace

INITIAL = 65536.0
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000
MINIMUM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor on the loss that keeps small gradients from vanishing in float16."""

    value: float = 1.0
    is_dynamic: bool = False
    num_steps: int = 0
    """Steps without overflow since the value last changed; counted where it is dynamic."""

    @classmethod
    def of(cls, asked: float | str | None) -> LossScale:
        """What `Precision.loss_scale` asks for: a number stays as it is, anything else is dynamic."""
        return cls(value=asked) if isinstance(asked, float) else cls(value=INITIAL, is_dynamic=True)

    @property
    def can_fall(self) -> bool:
        """Whether an overflow lowers it."""
        return self.is_dynamic and self.value > MINIMUM

    def after(self, *, overflow: bool) -> LossScale:
        """The scale of the next step."""
        if not self.is_dynamic:
            return self
        if overflow:
            return replace(self, value=max(MINIMUM, self.value * BACKOFF), num_steps=0)
        if self.num_steps + 1 < GROWTH_INTERVAL:
            return replace(self, num_steps=self.num_steps + 1)
        return replace(self, value=self.value * GROWTH, num_steps=0)
