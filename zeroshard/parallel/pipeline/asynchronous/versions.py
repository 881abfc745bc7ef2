"""The versions of weights that this rank keeps, and those that each of its actions computes with.

A version is this rank's shard of the weights, in the compute dtype. So a version of the W bytes of a stage
costs W / N on each of its N data-parallel ranks, if these divide the main parameters.

    an action          its units have the weights that it uses
    at a step          the version before it is kept, if an action after it uses that
    at the next steps  it is dropped when no action after them uses it

The lists of `uses.py` show which versions that are. Each buffer has its own place, from which its units read:

GatheredWeights    a version is this rank's shard. The units gather it before each forward and backward, in
                   the place of the main parameters, and free it after that. Weights that are moved along a
                   direction are computed for each gather, and at stage 3 for each use by a rank that gathers
                   nothing
ShownWeights       a version is whole, as nothing is gathered. The parameters are views of it, without a copy.
                   If later actions use the weights before a step, the step writes to new memory, and the old
                   memory becomes a version
MovedWeights       the same for weights that are moved, where units stay whole: all actions read one copy,
                   which is written where they differ. The weights of a forward and its backward share memory,
                   so autograd finds the new ones
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.parallel.pipeline.actions import Action, Schedule
from zeroshard.parallel.pipeline.asynchronous.ages import Ages
from zeroshard.parallel.pipeline.asynchronous.directions import Change, moved, write_moved
from zeroshard.parallel.pipeline.asynchronous.uses import WEIGHTS, Use, count_live, kept_versions
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime


class WeightsPlace:
    """The weights of one buffer; a subclass tells how the units get them.

    Args:
        buffer: the buffer.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer
        self._kept: dict[int, Tensor] = {}
        """Older versions by their numbers."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights here, beside the main parameters."""
        return sum(values.nbytes for values in self._kept.values())

    def begin(self, *, moves: bool) -> None:
        """Begin a list; `moves` if it has actions whose weights are moved."""

    def enter(self, use: Use, newest: int) -> None:
        """Let the units have the weights of an action.

        Args:
            use: the weights.
            newest: the number of the newest version.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """Show the main parameters where units stay gathered: a step may call hooks of the user."""

    def drop(self, but: Collection[int]) -> None:
        """Drop versions that nobody uses any more."""
        for version in self._kept.keys() - but:
            del self._kept[version]

    def keep(self, newest: int) -> None:
        """Keep the newest version, before a step."""
        self._kept[newest] = _copy(self._buffer)

    def end(self) -> None:
        """Let the units have the main parameters again."""
        self._kept = {}
        self.rest()


class GatheredWeights(WeightsPlace):
    """The weights of a buffer that is gathered or computed before each action.

    Args:
        buffer: the buffer.
        change: the change of a step, if the method moves weights.
    """

    def __init__(self, buffer: FlatBuffer, change: Change | None) -> None:
        super().__init__(buffer)
        self._change = change

    def enter(self, use: Use, newest: int) -> None:
        """Let gathers start from the weights of an action; see `WeightsPlace`."""
        if use.ahead and self._change is not None:
            self._buffer.use((newest, use.ahead), moved(self._buffer, self._change, use.ahead))
        elif use.version in (None, newest):
            self._buffer.use_main()
        else:
            values = self._kept[use.version]
            self._buffer.use((use.version, 0), lambda: values)

    def end(self) -> None:
        """Let the units have the main parameters again."""
        super().end()
        self._buffer.use_main()


class ShownWeights(WeightsPlace):
    """The weights of a buffer that shows versions, for a method that keeps them."""

    def enter(self, use: Use, newest: int) -> None:
        """Show the weights of an action; see `WeightsPlace`."""
        if use.version is None or use.version == newest:
            self._buffer.show(None)
        else:
            self._buffer.show(self._kept[use.version])

    def rest(self) -> None:
        """Show the main parameters; see `WeightsPlace`."""
        self._buffer.show(None)

    def keep(self, newest: int) -> None:
        """Keep the newest version, before a step; graphs have its memory if an action has read it."""
        self._kept[newest] = _copy(self._buffer) if self._buffer.is_stale else self._buffer.leave()


class MovedWeights(WeightsPlace):
    """The weights of a buffer that shows versions, for a method that moves them.

    Args:
        buffer: the buffer.
        change: the change of a step.
    """

    def __init__(self, buffer: FlatBuffer, change: Change) -> None:
        super().__init__(buffer)
        self._change = change
        self._copy: Tensor | None = None
        self._written: tuple[int, int] | None = None
        """The version that is in the copy, and by how many steps it is moved."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the copy."""
        return 0 if self._copy is None else self._copy.nbytes

    def begin(self, *, moves: bool) -> None:
        """Make the copy, if an action needs it."""
        self._copy, self._written = _copy(self._buffer) if moves else None, (0, 0)

    def rest(self) -> None:
        """Show the main parameters; see `WeightsPlace`."""
        self._buffer.show(None)

    def enter(self, use: Use, newest: int) -> None:
        """Write the weights of an action into the copy; see `WeightsPlace`."""
        self._buffer.show(self._copy)
        if self._copy is not None and self._written != (newest, use.ahead):
            write_moved(self._copy, self._buffer, self._change, use.ahead)
            self._written = newest, use.ahead

    def end(self) -> None:
        """Let the units have the main parameters again."""
        self._copy = None
        super().end()


def place_of(buffer: FlatBuffer, change: Change | None) -> WeightsPlace:
    """Return the place of a buffer's weights; `change` is that of a step, if the method moves weights."""
    if not buffer.plan.shows_versions:
        return GatheredWeights(buffer, change)
    return ShownWeights(buffer) if change is None else MovedWeights(buffer, change)


@torch.no_grad()
def _copy(buffer: FlatBuffer) -> Tensor:
    return buffer.main.detach().to(buffer.plan.compute_dtype, copy=True)


class Delays(NamedTuple):
    """The delays of one pipeline rank in a list, as its methods use them."""

    uses: Mapping[Action, Use]
    """The weights of each of its compute actions."""
    kept: tuple[frozenset[int], ...]
    """For each of its steps, the older versions that are used behind it."""
    taus: tuple[int, ...]
    """For each of its steps, the most steps since a forward whose gradient it applies."""


def read_delays(schedule: Schedule, rank: int, weights: str, max_crossed: int | None = None) -> Delays:
    """Return the delays of a pipeline rank with one chunk.

    Args:
        schedule: an asynchronous schedule.
        rank: the pipeline rank.
        weights: the name of a method in `WEIGHTS`.
        max_crossed: the most steps that may be crossed. None: any number.

    Raises:
        ValueError: a micro-batch crosses more steps on any rank; or an action of any rank uses a version that
            its chunk does not have yet; or a rank keeps more than two versions with "double".
    """
    ages, (chunk,) = Ages(schedule), schedule.chunks[rank]
    crossed = max(map(ages.most_crossed, range(schedule.num_chunks)))
    if max_crossed is not None and crossed > max_crossed:
        raise ValueError(
            f"pipeline.max_crossed_steps={max_crossed}: a micro-batch crosses {crossed} steps between its "
            "forward and its backward: take more micro-batches in each step (pipeline.microbatches_per_step)"
        )
    uses = WEIGHTS[weights].uses(ages)
    for action, use in uses.items():
        if use.version is not None and use.version > ages.before[action]:
            raise ValueError(
                f"pipeline.weights={weights!r}: {action} uses the weights behind step {use.version} of the "
                f"first pipeline rank, but comes behind step {ages.before[action]} of its own: move that "
                "step before it in the lists of pipeline.schedule"
            )
    if weights == "double" and (live := max(count_live(ages, uses))) > 2:
        raise ValueError(
            f"pipeline.weights='double': a pipeline rank keeps {live} versions with this pipeline.schedule, "
            "and this method has two: let more micro-batches begin behind each step, or take 'stash'"
        )
    kept = kept_versions(ages, rank, chunk, uses)
    own = {action: use for action, use in uses.items() if action.chunk == chunk}
    taus = tuple(ages.tau_of_step(chunk, step) for step in range(len(kept)))
    return Delays(own, kept, taus)


class WeightVersions:
    """The versions of the trained weights of one rank.

    Args:
        runtime: the runtime of the units.
        change: the change of a step, if the method moves weights.
    """

    def __init__(self, runtime: Runtime, change: Change | None) -> None:
        self._runtime = runtime
        self._places = [place_of(buffer, change) for buffer in runtime.buffers if buffer.trainable]
        self._kept: tuple[frozenset[int], ...] = ()
        self._newest = 0
        self.peak_bytes = 0
        """The most bytes of versions at a time since `reset_peak`."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights beside the main parameters and what is gathered of them."""
        return sum(place.num_bytes for place in self._places)

    def reset_peak(self) -> None:
        """Count the peak anew."""
        self.peak_bytes = self.num_bytes

    @contextmanager
    def batch(self, delays: Delays) -> Iterator[None]:
        """Run a list: versions are counted from 0, and none are left behind it."""
        self._kept, self._newest = delays.kept, 0
        moves = any(use.ahead for use in delays.uses.values())
        try:
            for place in self._places:
                place.begin(moves=moves)
            yield
        finally:
            for place in self._places:
                place.end()
            self._runtime.passes.refresh()

    def enter(self, use: Use) -> None:
        """Let the units of this rank have the weights of an action that begins.

        Raises:
            RuntimeError: the action before it has edited weights that are not the main parameters.
        """
        self._runtime.check_edits()
        for place in self._places:
            place.enter(use, self._newest)
        self._runtime.passes.refresh()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Keep the weights from before the step inside, if they are used behind it, and drop older ones."""
        self._runtime.check_edits()
        kept = self._kept[self._newest]
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        for place in self._places:
            place.rest()
            place.drop(but=kept)
            if self._newest in kept:
                place.keep(self._newest)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        yield
        self._newest += 1
