"""Between the gradients and the optimizer: they are clipped, judged, and followed by the loss scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.config.sections import Config
from zeroshard.internals.warn import warn_user
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.clipping import Scaling, factor_of, global_norm, has_far_parameters, limit_norm
from zeroshard.stepping.loss_scale import LossScale
from zeroshard.stepping.nonfinite import all_finite, describe_nonfinite
from zeroshard.stepping.replicas import check_replicas
from zeroshard.stepping.rounding import Rounding


class StepGuard:
    """Makes gradients ready for a step and judges them, the same on all ranks.

    Its construction is collective.

    Args:
        runtime: the runtime of the gradients.
        config: the config; it tells of clipping, and of gradients that are not finite.
        optimizer: the one optimizer that steps after `make_ready`; None if there may be others.
    """

    def __init__(self, runtime: Runtime, config: Config, optimizer: Optimizer | None = None) -> None:
        self._runtime, self._max_norm, self._nonfinite = runtime, config.clip_grad_norm, config.nonfinite
        is_half = runtime.reducer.is_half
        self.loss_scale = LossScale.of(config.precision.loss_scale) if is_half else LossScale()
        is_narrow = config.precision.main_dtype is torch.bfloat16
        self.rounding = Rounding.agreed(runtime.context.axes.world) if is_narrow else None
        """The rounding of updates into main parameters of bfloat16; None for wider ones."""
        clips = config.clip_grad_norm is not None and has_far_parameters(runtime)
        self.scaling = Scaling(optimizer, runtime.state) if clips and optimizer is not None else None
        """Clips part by part; None where main parameters lie on the device."""
        self.grad_norm: Tensor | None = None
        """The global norm before the last clipping, 0-dim; None before."""
        self.may_skip = is_half or config.nonfinite == "skip"
        """True if a step may have to be left out."""
        self._judges = self.may_skip or config.nonfinite == "error"
        self._watches = optimizer is not None and not self._judges
        self._compares = runtime.context.axes.tp.size > 1
        """True if tensor ranks compare gradients, now and then: some are zero at first."""
        self.loss: Tensor | None = None
        """The loss of the last backward, for this comparison; None if it is not known."""
        self._num_compared = 0
        """The steps so far, if they do."""

    @property
    def needs_gradients(self) -> bool:
        """True if gradients must be there before the optimizer's step begins."""
        return self._judges or self._max_norm is not None

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
        self._runtime.state.finish_scaling()
        self.grad_norm = norm = global_norm(self._runtime, order)
        if must_be_finite and not norm.isfinite():
            what = describe_nonfinite(self._runtime, order)
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
        self._runtime.state.finish_scaling()  # the last step may have failed halfway
        if self._compares:
            self._num_compared += 1
            if not self._num_compared & (self._num_compared - 1):  # 1, 2, 4, 8, ...
                check_replicas(self._runtime, self.loss)
        norm = None
        if self._max_norm is not None:
            self.grad_norm = norm = global_norm(self._runtime)
        if self._judges:
            is_finite = all_finite(self._runtime) if norm is None else bool(norm.isfinite())
            if not is_finite:
                self._answer_nonfinite()
                return False
        if self._max_norm is not None and norm is not None:
            factor, scaling = factor_of(norm, self._max_norm), self.scaling
            if scaling is None or not scaling.begin(self._runtime.parameters, factor):
                limit_norm(self._runtime, norm, self._max_norm)
        return True

    def watch(self, step: int, *values: Tensor | float | None) -> None:
        """Read values, and warn once that a step was taken with a norm or loss that is not finite."""
        if self._watches and not all(value is None or math.isfinite(value) for value in values):
            self._watches = False
            warn_user(
                f"step {step} was taken with a loss or a gradient norm that is not finite. To leave out such "
                "steps, set nonfinite='skip'; to stop before the first one, nonfinite='error'"
            )

    def _answer_nonfinite(self) -> None:
        """Raise or warn, unless a lower loss scale is the remedy."""
        if self.loss_scale.can_fall or self._nonfinite == "skip":
            return
        what = describe_nonfinite(self._runtime)
        if self._nonfinite == "error":
            raise RuntimeError(f"{what}. The step was not taken: Config(nonfinite='error')")
        warn_user(
            f"{what}. The step was left out, and every such step will be: the loss scale "
            f"{self.loss_scale.value:g} is not lowered. See engine.skipped_steps"
        )
