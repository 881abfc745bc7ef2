"""Steps that succeed on all ranks or fail on all with the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zeroshard.comm.collectives import Axis

T = TypeVar("T")


def on_all(axis: Axis, label: str, step: Callable[[], T]) -> list[T]:
    """Do something on every rank; collective.

    Args:
        label: the name of the exchange in errors.
        step: the function to call on each rank; it exchanges nothing itself.

    Returns:
        The result of each rank, in rank order.

    Raises:
        ValueError, RuntimeError: the error of the first rank that failed, on all ranks; an error of another
            class becomes a RuntimeError.
    """
    error: Exception | None = None
    answer: T | None = None
    try:
        answer = step()
    except Exception as caught:  # of whatever kind: the other ranks wait
        error = caught
    failure = None if error is None else (isinstance(error, ValueError), _tell(error))
    everyone = axis.all_gather_object((failure, answer), label)
    for rank, (failed, _) in enumerate(everyone):
        if failed is not None:
            is_value_error, text = failed
            place = f" (rank {rank})" if axis.size > 1 else ""
            raise (ValueError if is_value_error else RuntimeError)(text + place) from error
    return [given for _, given in everyone]


def _tell(error: Exception) -> str:
    speaks_for_itself = isinstance(error, ValueError | RuntimeError | OSError)
    return str(error) if speaks_for_itself else f"{type(error).__name__}: {error}"


def on_first(axis: Axis, label: str, step: Callable[[], T]) -> T:
    """Do something on rank 0 alone and give every rank its answer; collective. As `on_all` otherwise."""
    answers = on_all(axis, label, lambda: step() if axis.rank == 0 else None)
    answer: T = answers[0]  # type: ignore[assignment]
    return answer
