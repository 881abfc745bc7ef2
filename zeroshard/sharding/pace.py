"""The numbers of forwards, backwards and steps of this rank, compared with those of the other ranks.

A rank may leave out a batch, because it caught an exception of its own or skipped a loss. It goes on with its
next batch. At stages 0 to 2 its reductions then meet those of the others, so nothing fails until the ranks
behind wait at the end. The agreement at the end of a backward notices it without another exchange: each bit
of the number of forwards is sent once as it is and once inverted. Steps are noted in the ledger, which is
compared there too.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.internals.warn import warn_user

_NUM_BITS = 4
"""Forwards between two backwards are counted up to 15."""


class Pace:
    """Counts forwards and backwards, and compares them in agreements that are made anyway."""

    def __init__(self) -> None:
        self.num_forwards = 0
        """Forwards with a graph, also failed ones, since the last agreement of all ranks."""
        self.num_backwards = 0
        """Backwards since the last step, or since gradients were dropped."""
        self._has_warned = self._has_stepped = False
        self._num_dropped, self._has_warned_of_drops = 0, False

    def expect_backwards(self, number: int) -> None:
        """Warn of a first step by the user after fewer backwards than a step has.

        Args:
            number: the accumulation steps of the config; only the engine's step counts them.
        """
        had, is_first, self._has_stepped = self.num_backwards, not self._has_stepped, True
        if is_first and 0 < had < number:
            warn_user(
                f"gradient_accumulation_steps={number}, but optimizer.step() was called after {had} "
                f"backward{'s' if had > 1 else ''}: only engine.step() counts micro-batches. Call "
                "engine.backward(loss) and engine.step() for each micro-batch; or set "
                "gradient_accumulation_steps=1, divide the loss, and step after the last micro-batch"
            )

    def expect_division(self, number: int, is_divided: bool) -> None:
        """Warn at the engine's first step if loss.backward() has added up micro-batches undivided.

        Args:
            number: the micro-batches of a whole step.
            is_divided: True if engine.backward or engine.scale got the last loss.
        """
        is_first, self._has_stepped = not self._has_stepped, True
        if is_first and not is_divided and 1 < number <= self.num_backwards:
            warn_user(
                f"gradients of loss.backward() are not divided by gradient_accumulation_steps={number}: call "
                "engine.backward(loss), with scale_wrt_gas=False if the loss is divided already"
            )

    def drop(self, number: int, num_micro_batches: int) -> None:
        """Note that gradients are dropped; warn once if that happens again and again, so that no step comes.

        Args:
            number: the micro-batches of the unfinished step behind them; 0 after a step.
            num_micro_batches: the micro-batches of a whole step.
        """
        self._num_dropped = self._num_dropped + number if number else 0
        if self._num_dropped >= num_micro_batches and not self._has_warned_of_drops:
            self._has_warned_of_drops = True
            warn_user(
                f"zero_grad() has dropped the gradients of {self._num_dropped} micro-batches of steps that "
                f"were not finished: with gradient_accumulation_steps={num_micro_batches}, engine.step() "
                "zeroes the gradients itself, at the end of a step; leave zero_grad() out of the loop"
            )

    def flags(self) -> list[bool]:
        """Each bit of the number of forwards, and its inverse: ranks differ if both are set on any rank."""
        number = min(self.num_forwards, (1 << _NUM_BITS) - 1)
        bits = [bool(number >> bit & 1) for bit in range(_NUM_BITS)]
        return [*bits, *(not bit for bit in bits)]

    def compare(self, any_rank: Sequence[bool]) -> None:
        """Warn once if another rank has called the model another number of times.

        Args:
            any_rank: `flags()` over all ranks; each is set if it is set on any rank.
        """
        own, self.num_forwards = self.num_forwards, 0
        is_set, is_clear = any_rank[:_NUM_BITS], any_rank[_NUM_BITS:]
        if not self._has_warned and any(a and b for a, b in zip(is_set, is_clear, strict=True)):
            self._has_warned = True
            warn_user(
                f"since the last backward this rank has called the model {own} times with gradients on, and "
                "another rank a different number of times: a rank that has left out a batch (after a "
                "caught exception, or to skip a loss) makes the others wait at the end. Leave out a batch "
                "on all ranks or on none, for instance with a loss that is multiplied by 0; for extra "
                "calls on some ranks, as in evaluation, use torch.no_grad()"
            )


def warn_no_gradients() -> None:
    """Warn of an engine's step without gradients."""
    warn_user(
        "engine.step() without a gradient: no backward has reached a parameter since the last step or "
        "zero_grad(), so no step was taken. Call engine.backward(loss) before it, with a loss that depends "
        "on trained parameters"
    )
