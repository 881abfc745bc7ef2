"""The metrics of some steps, of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics of the steps since the last report."""

    step: int
    """Steps so far: those that the optimizer has taken, and those that were skipped."""
    seconds: float
    """Seconds since the log was made."""
    loss: float
    """The mean over the micro-batches of these steps and over the ranks."""
    grad_norm: float | None
    """The gradient norm before the last clipping; None if nothing clips."""
    lr: float | None
    """The learning rate of the last of these steps, of the first parameter group; None: no optimizer."""
    tokens_per_s: float | None
    """Tokens of all ranks per second; None if no number of tokens was given."""
    memory_bytes: int
    """The largest memory of a rank: `peak_allocated` of torch on an accelerator, the resident memory of the
    process on a CPU."""
    skipped_steps: int
    """Steps so far that were skipped because gradients were not finite."""
    loss_scale: float
    """The loss scale of the next step; 1.0 if nothing is computed in float16."""

    def values(self) -> dict[str, float]:
        """Return the metrics that there are, by the names of the fields; without `step`."""
        return {name: value for name, value in asdict(self).items() if name != "step" and value is not None}


class Share(NamedTuple):
    """The part of one rank in the metrics."""

    losses: float
    """The sum of the losses of its micro-batches."""
    num_losses: int
    num_tokens: int | None
    memory: int
    lr: float | None
    grad_norm: float | None


class Sums(NamedTuple):
    """The shares of all ranks together."""

    loss: float
    num_tokens: int | None
    memory: int
    lr: float | None
    grad_norm: float | None


def combine(shares: Sequence[Share], num_data: int) -> Sums:
    """Return the sums and means of all ranks; pure.

    Tensor and pipeline ranks have the same batches, losses and tokens as others. So a mean over all ranks is
    that over the data-parallel ranks, and tokens are counted by their share of the ranks.

    Args:
        shares: those of all ranks, in rank order.
        num_data: the number of data-parallel ranks, a divisor of the number of ranks.
    """
    tokens = [share.num_tokens for share in shares if share.num_tokens is not None]
    return Sums(
        loss=sum(share.losses for share in shares) / sum(share.num_losses for share in shares),
        num_tokens=sum(tokens) * num_data // len(shares) if tokens else None,
        memory=max(share.memory for share in shares),
        lr=next((share.lr for share in shares if share.lr is not None), None),
        grad_norm=next((share.grad_norm for share in shares if share.grad_norm is not None), None),
    )
