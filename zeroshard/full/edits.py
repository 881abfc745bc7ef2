"""Edits of full parameters that are kept: every rank must make the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_CALL = "unsharded(write_back=True)"
_REMEDY = "expected the same on every rank. Nothing was written"


class Copy(NamedTuple):
    """A buffer of parameters that several pipeline ranks hold."""

    holders: tuple[int, ...]
    values: bytes
    """A digest."""
    gradients: tuple[tuple[str, bytes], ...]
    """Of those that were changed, digests."""


class Edits(NamedTuple):
    """A rank's message about the full parameters that it has shown."""

    part: int
    """The rank's place among pipeline ranks."""
    problem: str
    """The reason why its edits cannot be kept; empty if they can."""
    buffers: list[tuple[str, bytes]]
    """Descriptions of the buffers, with digests of their parameters."""
    gradients: list[tuple[str, bytes]]
    """Names of the parameters whose gradients were changed, with digests of the gradients."""
    copies: dict[str, Copy]
    """By name of the first parameter of a buffer."""


def check_edits(everyone: Sequence[Edits]) -> None:
    """Compare the edits of all ranks.

    Raises:
        RuntimeError: they differ, or some cannot be kept.
    """
    for rank, edits in enumerate(everyone):
        if edits.problem:
            raise RuntimeError(f"{edits.problem}. Nothing was written (rank {rank})")
    for part in sorted({edits.part for edits in everyone}):
        _check_part([edits for edits in everyone if edits.part == part])
    for name in sorted({name for edits in everyone for name in edits.copies}):
        copies = {edits.part: edits.copies[name] for edits in everyone if name in edits.copies}
        first, *others = copies.values()
        if set(copies) != set(first.holders):
            raise RuntimeError(
                f"{_CALL}: pipeline ranks {list(first.holders)} share '{name}', and it is shown on "
                f"{sorted(copies)} alone: call unsharded() without modules. Nothing was written"
            )
        if any(other != first for other in others):
            raise RuntimeError(f"{_CALL}: pipeline ranks made different edits to '{name}'; {_REMEDY}")


def _check_part(ranks: Sequence[Edits]) -> None:
    """Compare the edits of ranks that hold the same part of the model."""
    first, *others = ranks
    for edits in others:
        if different := sorted(name for name, _ in set(edits.gradients) ^ set(first.gradients)):
            raise RuntimeError(
                f"{_CALL}: the ranks made different edits to the gradient of '{different[0]}'; {_REMEDY}"
            )
    for edits in others:
        for (description, digest), (_, wanted) in zip(edits.buffers, first.buffers, strict=True):
            if digest != wanted:
                raise RuntimeError(f"{_CALL}: the ranks made different edits to {description}; {_REMEDY}")
