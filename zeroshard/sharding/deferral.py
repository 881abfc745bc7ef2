"""The part that a backward has in a step: gradients that it defers, and the loss scale in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

from zeroshard.sharding.gradients import Gradients
from zeroshard.sharding.unit import Unit


class Meaning(NamedTuple):
    """The part that a backward is asked to have in a step."""

    defers: bool = False
    """True if it adds gradients up locally and sends nothing."""
    has_more: bool = False
    """True if a later backward adds to its gradients."""
    ending: Collection[Unit] = ()
    """The units to whose gradients no later backward adds: it reduces them, though it defers the others."""


class Deferral:
    """The meaning of the next backward, or of that under way.

    Args:
        gradients: of all buffers.
        is_averaged: True if several ranks average them; else there is nothing to defer.
        is_half: True if gradients pass through float16.
    """

    _scaling: ClassVar[Deferral | None] = None
    """The one whose loss scale, other than 1, is in the backward that this process runs."""

    def __init__(self, gradients: Sequence[Gradients], *, is_averaged: bool, is_half: bool) -> None:
        self._all, self._is_averaged = tuple(gradients), is_averaged
        self._asked = Meaning()
        """Set around a backward by `deferring`."""
        self.is_deferring = False
        """True if backward adds gradients up locally and sends nothing, but for units in `ending`."""
        self.ending: Collection[Unit] = ()
        """The units that a backward reduces though it defers all others."""
        self.is_half = is_half
        """True if gradients pass through float16, where small ones vanish: the loss must be scaled."""
        self.lacks_scale = self.is_half
        """True if gradients that arrive now belong to an unscaled loss."""
        self.accumulates = True
        """False in a backward that gives no gradients to parameters: deferred sums stay deferred."""

    @contextmanager
    def deferring(self, more: bool, *, send: bool = False, but: Collection[Unit] = ()) -> Iterator[None]:
        """Defer reductions while `more` is true: this backward adds up locally, and a later one adds to it.

        Args:
            send: reduce the gradients nevertheless, into p.grad unless that is narrower than float32.
            but: units to whose gradients no later backward of the step adds: these are reduced, and arrive in
                p.grad with the others. All ranks name the same ones.
        """
        before = self._asked
        defers = before.defers or (more and not send and self._is_averaged)
        ending = before.ending if before.defers else but  # to what is deferred around it, more is added
        self._asked = Meaning(defers, before.has_more or more, ending)
        self._follow()
        try:
            yield
        finally:
            self._asked = before
            self._follow()

    @property
    def has_more(self) -> bool:
        """True if a later backward is to add to the gradients of this one."""
        return self._asked.has_more

    def _follow(self) -> None:
        self.is_deferring = self._asked.defers or not self.accumulates
        self.ending = self._asked.ending if self.is_deferring and self.accumulates else ()

    def _forget_backward(self) -> None:
        """Forget the backward that is over; the next one may have no scaled loss."""
        self.accumulates, self.lacks_scale = True, self.is_half
        self._follow()

    def check_scale(self) -> None:
        """Check that the backward that begins is not that of another engine, with a loss scale of its own.

        Raises:
            RuntimeError: it is, and there are trained parameters: their gradients would be multiplied by the
                scale.
        """
        parameters = (p for gradients in self._all for p in gradients.buffer.unsharded)
        if Deferral._scaling not in (None, self) and any(p.requires_grad for p in parameters):
            raise RuntimeError(
                "the backward of one engine, whose loss is multiplied by a loss scale, comes to the "
                "trained parameters of another engine, which does not know the scale: call backward(loss) of "
                "each engine on a loss of its own; for one loss over two models, put both into one module, "
                "with one engine"
            )

    @contextmanager
    def scaled(self, loss_scale: float) -> Iterator[None]:
        """Take the loss scale out of gradients: the loss of a backward inside was multiplied by it.

        The scale may change only when there are no gradients.
        """
        before = Deferral._scaling
        Deferral._scaling, self.lacks_scale = self if loss_scale != 1.0 else None, False
        for gradients in self._all:
            gradients.unscale = 1.0 / loss_scale
        try:
            yield
        finally:
            Deferral._scaling, self.lacks_scale = before, self.is_half
