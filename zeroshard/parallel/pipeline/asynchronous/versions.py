"""The versions of weights that this rank keeps, and those that each of its actions computes with.

A version is this rank's shard of the weights, in the compute dtype. It is gathered when an action uses it, in
the place of the main parameters, and freed after that as any unit is. So a version of the W bytes of a stage
costs W / N on each of its N data-parallel ranks.

    stage 0 to 3       each unit is filled before a forward and a backward, and freed after it
    at a step          the version before it is copied, if an action behind it uses that
    at the next steps  it is dropped when no action behind them uses it

Source: the places of versions in a list are those of `uses.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from zeroshard.parallel.pipeline.actions import Action, Schedule
from zeroshard.parallel.pipeline.asynchronous.ages import Ages
from zeroshard.parallel.pipeline.asynchronous.directions import Change, moved
from zeroshard.parallel.pipeline.asynchronous.uses import WEIGHTS, Use, kept_versions
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
            its chunk does not have yet.
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
                f"pipeline.weights={weights!r}: {action} uses the weights behind step {use.version} of the first "
                f"pipeline rank, but comes behind step {ages.before[action]} of its own: move that step "
                "before it in the lists of pipeline.schedule"
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
        self._runtime, self._change = runtime, change
        self._buffers = [buffer for buffer in runtime.buffers if buffer.trainable]
        self._kept: dict[int, list[Tensor]] = {}
        """By version, the shards of all trained buffers."""
        self._newest = 0
        self.peak_bytes = 0
        """The most bytes of versions at a time since `reset_peak`."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all versions but the newest one, which are the main parameters."""
        return sum(values.nbytes for shards in self._kept.values() for values in shards)

    def reset_peak(self) -> None:
        """Count the peak anew."""
        self.peak_bytes = self.num_bytes

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Run a list: versions are counted from 0, and none are left behind it."""
        self._newest = 0
        try:
            yield
        finally:
            self._kept = {}
            for buffer in self._buffers:
                buffer.use_main()
            self._runtime.refresh()

    def enter(self, use: Use) -> None:
        """Let the units of this rank have the weights of an action that begins."""
        is_newest = use.version in (None, self._newest) and not use.ahead
        for number, buffer in enumerate(self._buffers):
            if is_newest:
                buffer.use_main()
            elif use.ahead and self._change is not None:
                buffer.use((self._newest, use.ahead), moved(buffer, self._change, use.ahead))
            else:
                assert use.version is not None, "an older version"
                buffer.use((use.version, 0), _give(self._kept[use.version][number]))
        self._runtime.refresh()

    @contextmanager
    def stepping(self, kept: frozenset[int]) -> Iterator[None]:
        """Keep the weights from before the step inside, if they are used behind it.

        Args:
            kept: the versions that are used behind the step, without the new one.
        """
        self._kept = {version: shards for version, shards in self._kept.items() if version in kept}
        if self._newest in kept:
            dtype_of = {buffer: buffer.plan.compute_dtype for buffer in self._buffers}
            self._kept[self._newest] = [
                buffer.main.detach().to(dtype_of[buffer], copy=True) for buffer in self._buffers
            ]
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        yield
        self._newest += 1


def _give(values: Tensor) -> Callable[[], Tensor]:
    return lambda: values
