"""Between the gradients and the optimizer: they are clipped, judged, and followed by the loss scale.

At steps 1, 2, 4, 8 and so on, tensor ranks are compared (see `parallel/tensor/replicas.py`).

The loss scale of float16 has the defaults of torch.amp.GradScaler:

overflow                        value / 2, at least the minimum; the first `hysteresis` - 1 are let pass
`window` steps without overflow   value * 2
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm import streams
from zeroshard.config.sections import DynamicLossScale
from zeroshard.internals.warn import first_of, warn_user
from zeroshard.parallel.tensor.replicas import check_replicas
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.clipping import global_norm, limit_norm
from zeroshard.stepping.rounding import Rounding

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
        state = {"value": self.value, "is_dynamic": self.policy is not None, "num_steps": self.num_steps}
        return state | {"num_spared": self.num_spared} if self.num_spared else state

    def resumed(self, value: float, num_steps: int, num_spared: int) -> LossScale:
        """This scale with the value and counts of a dynamic one that was saved, unless this one is fixed."""
        if self.policy is None:
            return self
        return replace(self, value=value, num_steps=num_steps, num_spared=num_spared)


class StepGuard:
    """Makes gradients ready for a step and judges them, the same on all ranks.

    Its construction is collective.

    Args:
        runtime: the runtime of the gradients.
        max_norm: the largest norm of gradients, which are clipped above it; None: none are clipped.
        nonfinite: "report", "skip" or "error": the answer to gradients that are not finite.
        loss_scale: the loss scale of float16, see `LossScale.of`.
        is_alone: True if one optimizer steps after `make_ready`, False if there may be others.
    """

    def __init__(
        self,
        runtime: Runtime,
        max_norm: float | None = None,
        nonfinite: str = "report",
        loss_scale: float | str | DynamicLossScale | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        self._runtime, self._max_norm, self._nonfinite = runtime, max_norm, nonfinite
        is_half = runtime.reducer.is_half
        self.loss_scale = LossScale.of(loss_scale) if is_half else LossScale()
        is_narrow = runtime.context.setting.dtypes.main_dtype is torch.bfloat16
        self.rounding = Rounding.agreed(runtime.context.axes.world) if is_narrow else None
        """The rounding of updates into main parameters of bfloat16; None for wider ones."""
        self.grad_norm: Tensor | None = None
        """The global norm before the last clipping, 0-dim; None before."""
        self.may_skip = is_half or nonfinite == "skip"
        """True if a step may have to be left out."""
        self._judges = self.may_skip or nonfinite == "error"
        seen = (float,) if streams.has_streams(runtime.context.device) else (float, Tensor)
        self._watched = seen if is_alone and not self._judges else ()
        """The types of losses and norms that `watch` looks at."""
        self.loss: Tensor | None = None
        """The loss of the last backward, which tensor ranks compare; None if it is not known."""
        self._num_steps = 0
        """The steps so far of tensor ranks, which compare gradients now and then: some are zero at first."""

    def clip(self, max_norm: float, order: float, must_be_finite: bool) -> Tensor:
        """Scale all gradients by min(1, max_norm / (norm + 1e-6)).

        Args:
            max_norm: the limit of the norm.
            order: the order of the norm, above 0 or inf.
            must_be_finite: True for an error if the norm is not finite.

        Returns:
            The norm before, 0-dim.

        Raises:
            RuntimeError: `must_be_finite`, and the norm is not; gradients are as they were.
        """
        self.grad_norm = norm = global_norm(self._runtime, order)
        if must_be_finite and not norm.isfinite():
            what = describe_nonfinite(self._runtime, norm)
            raise RuntimeError(f"{what}. Nothing was clipped: clip_grad_norm_(error_if_nonfinite=True)")
        limit_norm(self._runtime, norm, max_norm)
        return norm

    def make_ready(self) -> bool:
        """Clip the gradients and judge them, as the config asks. To judge, the host waits for the device.

        Returns:
            True if the optimizer may step.

        Raises:
            RuntimeError: gradients are not finite, with `nonfinite="error"`; or tensor ranks have different
                ones of a parameter that each holds whole.
        """
        if self._runtime.context.axes.tp.size > 1:
            self._num_steps += 1
            if not self._num_steps & (self._num_steps - 1):  # 1, 2, 4, 8, ...
                check_replicas(self._runtime, self.loss)
        if self._max_norm is None and not self._judges:
            return True
        norm = global_norm(self._runtime)
        if self._max_norm is not None:
            self.grad_norm = norm
        if self._judges and not norm.isfinite():
            self._answer_nonfinite(norm)
            return False
        if self._max_norm is not None:
            limit_norm(self._runtime, norm, self._max_norm)
        return True

    def watch(self, step: int, *values: Tensor | float | None) -> None:
        """Look at losses and norms, and warn once that a step was taken with one that is not finite."""
        if not all(math.isfinite(value) for value in values if isinstance(value, self._watched)):
            self._watched = ()
            warn_user(
                f"step {step} was taken with a loss or a gradient norm that is not finite. To leave out such "
                "steps, set nonfinite='skip'; to stop before the first one, nonfinite='error'"
            )

    def _answer_nonfinite(self, norm: Tensor) -> None:
        """Raise or warn, unless a lower loss scale is the remedy."""
        policy = self.loss_scale.policy
        if (policy is not None and self.loss_scale.value > policy.minimum) or self._nonfinite == "skip":
            return
        what = describe_nonfinite(self._runtime, norm)
        if self._nonfinite == "error":
            raise RuntimeError(f"{what}. The step was not taken: Config(nonfinite='error')")
        warn_user(
            f"{what}. The step was left out, and every such step will be: the loss scale "
            f"{self.loss_scale.value:g} is not lowered. See engine.skipped_steps"
        )


def describe_nonfinite(runtime: Runtime, norm: Tensor) -> str:
    """The message, the same on all ranks: the norm, and the first parameters with such gradients."""
    parameters = list(runtime.parameters)
    own = [p.grad is not None and not bool(p.grad.isfinite().all()) for p in parameters]
    axes, label = runtime.context.axes, "search for gradients that are not finite"
    answer = axes.everyone.any(own, label)()  # pipeline ranks hold other parameters
    found = [p.fqn for p, is_bad in zip(parameters, answer, strict=True) if is_bad]
    names = list(dict.fromkeys(name for part in axes.pp.all_gather_object(found, label) for name in part))
    shown = first_of(names) or "none: they are too large to be added up"
    return f"the gradient norm is {norm.item()}; not finite are the gradients of {shown}"
