"""A step that an exception or Ctrl-C ends halfway: some parameters have been stepped, others have not."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class InterruptedStep:
    """The mark of a step that has begun and has not ended."""

    def __init__(self) -> None:
        self._has_begun = False

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
        """Note that the optimizer's step begins; with a closure, when that has returned.

        Returns:
            The arguments for the step; None for the same ones.
        """
        optimizer, *others = args
        if not any(map(callable, (*others, *kwargs.values()))):
            self._has_begun = True
            return None
        watched = {key: self._watched(value) for key, value in kwargs.items()}
        return (optimizer, *map(self._watched, others)), watched

    def _watched(self, value: Any) -> Any:
        if not callable(value):
            return value

        @functools.wraps(value)
        def closure() -> Any:
            loss = value()
            self._has_begun = True
            return loss

        return closure

    def end(self) -> None:
        """Note the end of the step, or a load of a checkpoint that has replaced its values."""
        self._has_begun = False

    def check(self, what: str) -> None:
        """Refuse `what` for a model that is between two steps.

        Raises:
            RuntimeError: the last step has begun and not ended.
        """
        if self._has_begun:
            raise RuntimeError(
                f"{what} after a step that was interrupted: some parameters have been stepped and others "
                "have not, so nothing was saved. Load the last checkpoint, or take a whole step before saving"
            )
