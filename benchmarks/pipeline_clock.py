"""The durations of the actions of an engine of ours, and the makespan that they predict."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from medians import median_of, median_ratio
from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule
from zeroshard.parallel.pipeline.simulate import ActionCosts, simulate

Durations = Mapping[tuple[Kind, int | None], float]
"""Seconds by kind and chunk. A step is one of all chunks of a rank, and has no chunk."""


class Walk(NamedTuple):
    """The time of this rank between the first and the last action of a batch, on the clock of all ranks."""

    start: float
    end: float


class Clock:
    """Notes the durations of the actions of an engine, and its walks through the schedule.

    The duration of an action is the time up to the next one, less that in which the rank waits for messages.

    Args:
        engine: an engine that has run a batch.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._durations: dict[tuple[Kind, int | None], list[float]] = defaultdict(list)
        self._begun: tuple[Action, float] | None = None
        self.walks: list[Walk] = []
        self._enter = engine._pipeline.enter
        for runner in engine._pipeline._runners.values():
            runner.run = self._timed(runner.run)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note durations inside, which takes time itself, instead of walks."""
        self._engine._pipeline.enter = self._note
        walks, self.walks = self.walks, []
        try:
            yield
        finally:
            self._engine._pipeline.enter, self.walks = self._enter, walks

    def medians(self) -> dict[tuple[Kind, int | None], float]:
        """The median duration of each kind of action in each chunk of this rank, and of its steps."""
        return {key: statistics.median(values) for key, values in self._durations.items()}

    def _busy(self) -> float:
        """The time of this thread's clock without its waits for messages."""
        return time.monotonic() - self._engine.comm_report().waited_s["point_to_point"]

    def _note(self, action: Action) -> None:
        now = self._busy()
        self._end(now)
        self._begun = action, now
        self._enter(action)

    def _end(self, now: float) -> None:
        if self._begun is not None:
            action, since = self._begun
            if action.is_compute or action.kind is Kind.STEP:
                self._durations[action.kind, action.chunk].append(now - since)
        self._begun = None

    def _timed(self, run: Any) -> Any:
        def timed(shapes: Any) -> Any:
            start = time.monotonic()
            found = run(shapes)
            self._end(self._busy())
            self.walks.append(Walk(start, time.monotonic()))
            return found

        return timed


class MeasuredCosts(ActionCosts):
    """The durations of the actions of all ranks, in seconds.

    Args:
        durations: see `Durations`.
        transfer: as `ActionCosts` has it.
    """

    def __init__(self, durations: Durations, transfer: float) -> None:
        super().__init__(transfer=transfer)
        vars(self)["seconds"] = {str(Action(*key, None)): number for key, number in durations.items()}

    def of(self, action: Action) -> float:
        """Return the duration of an action; 0 for an action without one."""
        return float(vars(self)["seconds"].get(str(action._replace(microbatch=None)), 0.0))


def predict(schedule: Schedule, clock: Clock, transfer: float) -> tuple[float, ActionCosts]:
    """The makespan that our simulator predicts, and the costs of all ranks; collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, clock.medians())
    durations: dict[tuple[Kind, int | None], float] = {}
    for own in everyone:
        for key, seconds in own.items():
            durations[key] = max(seconds, durations.get(key, 0.0))  # steps alone are of several ranks
    costs = MeasuredCosts(durations, transfer)
    return simulate(schedule, costs).makespan, costs


def makespans(clock: Clock) -> list[float]:
    """The times from the first start of a rank to the last end of one, batch by batch; collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, clock.walks)
    return [
        max(walk.end for walk in walks) - min(walk.start for walk in walks)
        for walks in zip(*everyone, strict=True)
    ]


def against_simulator(schedule: Schedule, clock: Clock, transfer: float, title: str) -> dict[str, Any]:
    """The makespans of an engine as `title`, and the one that our simulator predicts; collective."""
    (predicted, costs), measured = predict(schedule, clock, transfer), makespans(clock)
    return {
        title: median_of(measured),
        "predicted, s a makespan": predicted,
        "ratio predicted/measured": median_ratio([predicted] * len(measured), measured),
        "costs, s": vars(costs),
    }


def measure_transfer(num_bytes: int, rounds: int = 50) -> float:
    """Seconds of a message from one rank to the next, the median of half round trips; collective."""
    values, seconds = torch.zeros(num_bytes, dtype=torch.uint8), [0.0]
    rank = dist.get_rank()
    dist.barrier()
    if rank < 2:
        for _ in range(rounds):
            start = time.perf_counter()
            for sender in (0, 1):
                if rank == sender:
                    dist.send(values, 1 - rank)
                else:
                    dist.recv(values, 1 - rank)
            seconds.append((time.perf_counter() - start) / 2)
    found = [statistics.median(seconds[1:])] if rank == 0 else [None]
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    return found[0]
