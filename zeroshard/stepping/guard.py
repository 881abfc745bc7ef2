"""Between the gradients and the optimizer: they are clipped, judged, and followed by the loss scale.

At steps 1, 2, 4, 8 and so on, tensor ranks compare losses, and gradients of parameters that each holds whole.
Tensor ranks compute the same values between divided layers, so they step these parameters alike and exchange
nothing for them. If they were given other batches, drew another dropout, or use such a parameter for a part
of the heads only, the parameters would drift apart, and no error would tell. A loss of values that are parts,
as of a last layer that stays divided, is another loss on each rank.

The loss scale of float16 has the defaults of torch.amp.GradScaler:

overflow                        value / 2, at least the minimum; the first `hysteresis` - 1 are let pass
`window` steps without overflow   value * 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.config.sections import Config, DynamicLossScale
from zeroshard.internals.foreach import foreach_norm
from zeroshard.internals.warn import warn_user
from zeroshard.parameters.gradient import gradient_of
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.clipping import (
    by_device,
    global_norm,
    limit_norm,
    own_gradients,
)
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
        config: the config; it says what happens to large gradients, and to gradients that are not finite.
        optimizer: the one optimizer that steps after `make_ready`; None if there may be others.
    """

    def __init__(self, runtime: Runtime, config: Config, optimizer: Optimizer | None = None) -> None:
        self._runtime, self._max_norm, self._nonfinite = runtime, config.clip_grad_norm, config.nonfinite
        is_half = runtime.reducer.is_half
        self.loss_scale = LossScale.of(config.precision.loss_scale) if is_half else LossScale()
        is_narrow = config.precision.main_dtype is torch.bfloat16
        self.rounding = Rounding.agreed(runtime.context.axes.world) if is_narrow else None
        """The rounding of updates into main parameters of bfloat16; None for wider ones."""
        self.grad_norm: Tensor | None = None
        """The global norm before the last clipping, 0-dim; None before."""
        self.may_skip = is_half or config.nonfinite == "skip"
        """True if a step may have to be left out."""
        self._judges = self.may_skip or config.nonfinite == "error"
        self._watches = optimizer is not None and not self._judges
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
        if self._runtime.context.axes.tp.size > 1:
            self._num_steps += 1
            if not self._num_steps & (self._num_steps - 1):  # 1, 2, 4, 8, ...
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
        policy = self.loss_scale.policy
        if (policy is not None and self.loss_scale.value > policy.minimum) or self._nonfinite == "skip":
            return
        what = describe_nonfinite(self._runtime)
        if self._nonfinite == "error":
            raise RuntimeError(f"{what}. The step was not taken: Config(nonfinite='error')")
        warn_user(
            f"{what}. The step was left out, and every such step will be: the loss scale "
            f"{self.loss_scale.value:g} is not lowered. See engine.skipped_steps"
        )


_NUM_SHOWN = 3


@torch.no_grad()
def all_finite(runtime: Runtime) -> bool:
    """True if no gradient holds inf or nan on any rank; one exchange."""
    is_bad = not all(bool(probe(group).isfinite().all()) for group in by_device(own_gradients(runtime)))
    return not runtime.context.axes.world.any([is_bad], "agreement on whether gradients are finite")()[0]


def probe(tensors: Sequence[Tensor]) -> Tensor:
    """[n]: of each tensor on one device a number that is not finite if an element is not.

    An accelerator finds the largest magnitudes with a few kernels for all tensors of a dtype. A CPU adds up,
    in a fifteenth of the time; a sum that overflows is not finite, too.
    """
    if tensors[0].is_cpu:
        return torch.stack([tensor.sum().double() for tensor in tensors])
    return torch.stack(foreach_norm(tensors, math.inf))


def describe_nonfinite(runtime: Runtime, order: float = 2.0) -> str:
    """The message, the same on all ranks: the norm, and the first parameters with such gradients."""
    parameters = list(runtime.parameters)
    own = [p.grad is not None and not bool(p.grad.isfinite().all()) for p in parameters]
    axes, label = runtime.context.axes, "search for gradients that are not finite"
    answer = axes.everyone.any(own, label)()  # pipeline ranks hold other parameters
    found = [p.fqn for p, is_bad in zip(parameters, answer, strict=True) if is_bad]
    names = list(dict.fromkeys(name for part in axes.pp.all_gather_object(found, label) for name in part))
    shown = _shown(names) or "none: they are too large to be added up"
    norm = global_norm(runtime, order).item()
    return f"the gradient norm is {norm}; not finite are the gradients of {shown}"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(map(repr, names[:_NUM_SHOWN])) + more


_LOOKED_AT = 1 << 16
"""The elements of a slice that are looked at: an embedding would take memory for as many weights."""
_FAR = 0.01
"""The part of its norm by which a gradient may be off: atomic additions of a device come in any order."""
_FAR_LOSS = 2e-4
"""Twice the part by which a loss may be off. Ranks compute it of the same values, mostly to the bit."""

_Seen = tuple[float, float] | None
"""The magnitude of a value, and a number in which it differs from others; None for no value."""


@torch.no_grad()
def check_replicas(runtime: Runtime, loss: Tensor | None = None) -> None:
    """Compare gradients over the tensor ranks, if all of them are finite; collective.

    Args:
        runtime: the runtime of the gradients.
        loss: the loss that they come from, if it is known; it is compared, too.

    Raises:
        RuntimeError: on all ranks, some of them differ.
    """
    axes = runtime.context.axes
    trained = (buffer for buffer in runtime.buffers if buffer.trainable)
    parameters = [p for buffer in trained for p in buffer.sharded if p.cut is None]
    gradients = [gradient_of(p) for p in parameters]
    value = None if loss is None else loss.item()
    own = [None if value is None else (abs(value), value), *map(_see, gradients)]
    everyone = axes.tp.all_gather_object(own, "comparison of gradients")
    losses, *others = zip(*everyone, strict=True)
    is_odd = not math.isfinite(sum(one[0] for one in own if one is not None))
    flags = [is_odd, _differ(losses, _FAR_LOSS), *(_differ(seen, _FAR) for seen in others)]
    label = "agreement on gradients of tensor ranks"
    is_odd, has_odd_loss, *answer = axes.everyone.any(flags, label)()
    names = [p.fqn for p, is_bad in zip(parameters, answer, strict=True) if is_bad]
    if is_odd or not (has_odd_loss or names):
        return
    if has_odd_loss:
        raise RuntimeError(
            f"the tensor ranks {axes.tp.global_ranks} have different losses. Expected a loss of values that "
            "all of them have: is the last layer 'colwise' in tp_plan, in place of 'colwise_gather_output'? "
            "Does the loss use values inside of blocks, which are parts? The step was not taken"
        )
    raise RuntimeError(
        f"the tensor ranks have different gradients of {_shown(names)}, "
        "which each of them holds whole, so they would train different models. Expected the same random "
        "numbers on all ranks of a tensor group, and 'replicated_with_grad_allreduce' in tp_plan for a layer "
        "that gets a part of the heads. The step was not taken"
    )


def _see(gradient: Tensor | None) -> _Seen:
    """The norm of a gradient, and its product with a vector of cosines."""
    if gradient is None:
        return None
    values = gradient[:_LOOKED_AT].double()
    weights = torch.ones_like(values).cumsum_(0).cos_()
    norm, product = torch.stack((values.norm(), values.dot(weights))).tolist()
    return norm, product


def _differ(everyone: Sequence[_Seen], far: float) -> bool:
    """True if ranks have seen other values than the first one; none that is not finite differs."""
    (norm, product), *others = [one for one in everyone if one is not None] or [(0.0, 0.0)]
    return any(abs(norm - n) + abs(product - q) > far * max(norm, n) for n, q in others)
