"""The versions of weights that this rank keeps, and those that each of its actions computes with.

A version is this rank's shard of the weights, in the compute dtype. So a version of the W bytes of a stage
costs W / N on each of its N data-parallel ranks, if these divide the main parameters.

    an action          its units have the weights that it uses; `places.py` tells how
    at a step          the version before it is kept, if an action behind it uses that
    at the next steps  it is dropped when no action behind them uses it

The lists of `uses.py` tell which versions that are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from zeroshard.parallel.pipeline.actions import Action, Schedule
from zeroshard.parallel.pipeline.asynchronous.ages import Ages
from zeroshard.parallel.pipeline.asynchronous.directions import Change
from zeroshard.parallel.pipeline.asynchronous.places import place_of
from zeroshard.parallel.pipeline.asynchronous.uses import WEIGHTS, Use, count_live, kept_versions
from zeroshard.sharding.runtime import Runtime


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


class Versions:
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
            self._runtime.refresh()

    def enter(self, use: Use) -> None:
        """Let the units of this rank have the weights of an action that begins."""
        for place in self._places:
            place.enter(use, self._newest)
        self._runtime.refresh()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Keep the weights from before the step inside, if they are used behind it, and drop older ones."""
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
