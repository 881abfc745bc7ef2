"""Three planners of the literature, as pure functions that the search is compared with.

- PipeDream divides a chain into pipeline stages, each with data-parallel ranks of its own: `pipedream`.
- FlexFlow walks at random through configurations of each operation: `flexflow`.
- Piper divides a chain into stages whose layers each have a configuration of their own: `piper`.

None of them plans tiers, and their divisions are not uneven meshes that an engine here could run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple


class Stage(NamedTuple):
    """Layers of a chain that one part of the ranks computes."""

    layers: range
    num_ranks: int


class StagePlan(NamedTuple):
    """A division of a chain into stages."""

    seconds: float
    """Of the slowest stage, or of the slowest transfer between two: a micro-batch leaves in each so many."""
    stages: tuple[Stage, ...]


def _divide(num_layers: int, num_ranks: int, takes: Callable[[int, int, int, int], float]) -> StagePlan:
    """Return the division whose slowest stage or transfer is fastest; its seconds are inf if there is none.

    The state is (ideal, ranks, stages): the layers from i on, over so many ranks, in so many stages.

    Args:
        num_layers: the layers of the chain.
        num_ranks: the ranks to use, at most.
        takes: (first layer, end, ranks, stages from here on) -> seconds of a stage, or of the arrival of its
            input if these are more.
    """

    @cache
    def best(first: int, ranks: int, num_stages: int) -> StagePlan:
        plans = [StagePlan(0.0 if first == num_layers and num_stages == 0 else math.inf, ())]
        ends = range(first + 1, num_layers + 1) if num_stages else ()
        for end, num in product(ends, range(1, ranks + 1)):
            rest = best(end, ranks - num, num_stages - 1)
            slowest = max(takes(first, end, num, num_stages), rest.seconds)
            plans.append(StagePlan(slowest, (Stage(range(first, end), num), *rest.stages)))
        return min(plans, key=lambda plan: plan.seconds)

    found = (best(0, num_ranks, num) for num in range(1, num_layers + 1))
    return min(found, key=lambda plan: plan.seconds)


def pipedream(
    seconds: Sequence[float],
    weights: Sequence[float],
    outputs: Sequence[float],
    num_ranks: int,
    bandwidth: float,
) -> StagePlan:
    """Return the division with the least time of its slowest part, by dynamic programming.

    Layers i to j on m ranks take (compute + 4 (m - 1) |w| / (B m)) / m, a transfer of an output a to a stage
    of m ranks 2 a / (B m).

    Source: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section
    3.1, as its published optimizer computes it.

    Args:
        seconds: the compute of each layer for a micro-batch, forward and backward.
        weights: bytes of the parameters of each layer.
        outputs: bytes of the output of each layer.
        num_ranks: the ranks to use, at most.
        bandwidth: bytes per second between two ranks.

    Raises:
        ValueError: there are no layers or no ranks.
    """
    if not seconds or num_ranks < 1:
        raise ValueError(f"expected layers and at least 1 rank, got {len(seconds)} and {num_ranks}")

    def takes(first: int, end: int, num: int, _: int) -> float:
        synchronized = 4 * (num - 1) * sum(weights[first:end]) / (bandwidth * num)
        arrival = 2 * outputs[first - 1] / (bandwidth * num) if first else 0.0
        return max((sum(seconds[first:end]) + synchronized) / num, arrival)

    return _divide(len(seconds), num_ranks, takes)


def flexflow(
    options: Sequence[int],
    cost: Callable[[tuple[int, ...]], float],
    *,
    num_moves: int = 10_000,
    beta: float = 10.0,
    seed: int = 0,
) -> tuple[float, tuple[int, ...]]:
    """Return the best configuration that a Markov chain has seen, with its cost.

    A move gives one operation another configuration. It is taken with the chance min(1, exp(beta (old cost -
    new cost))), so costs should be near 1.

    Source: Jia, Zaharia and Aiken 2019, "Beyond Data and Model Parallelism for Deep Neural Networks"
    (FlexFlow), section 6.

    Args:
        options: the number of configurations of each operation.
        cost: the cost of a choice for all operations.
        num_moves: moves that are tried.
        beta: how seldom a worse configuration is taken.
        seed: of the random numbers.
    """
    draw = random.Random(seed)
    now = tuple(draw.randrange(num) for num in options)
    cost_now = cost(now)
    best = cost_now, now
    for _ in range(num_moves):
        at = draw.randrange(len(options))
        other = (*now[:at], draw.randrange(options[at]), *now[at + 1 :])
        cost_other = cost(other)
        if draw.random() < math.exp(min(0.0, beta * (cost_now - cost_other))):
            now, cost_now = other, cost_other
            best = min(best, (cost_now, now))
    return best


class LayerOption(NamedTuple):
    """A configuration of a layer: one entry of Piper's lists of time, memory and communication (TMPC)."""

    num_ranks: int
    """Data-parallel ranks times tensor ranks of a stage with it."""
    seconds: float
    """Of a micro-batch, with all communication inside of the stage."""
    fixed: float
    """Bytes on a rank, whatever comes after the stage."""
    per_stage: float
    """Bytes on a rank for each micro-batch in flight: as many as there are stages from here on."""


def piper(
    layers: Sequence[Sequence[LayerOption]], transfers: Sequence[float], num_ranks: int, memory: float
) -> StagePlan:
    """Return the division of a chain whose slowest stage is fastest, with an option for each layer.

    The ideals of a chain are its ends. All layers of a stage have the same number of ranks; a stage takes
    the options of least time that fit into the memory, by a knapsack over its layers.

    Source: Tarnawski, Narayanan and Phanishayee 2021, "Piper: Multidimensional Planner for DNN
    Parallelization", section 4.

    Args:
        layers: the options of each layer.
        transfers: seconds to hand on the output of each layer to another stage.
        num_ranks: the ranks to use, at most.
        memory: bytes of a rank.

    Raises:
        ValueError: nothing fits.
    """

    @cache
    def takes(first: int, end: int, num: int, num_stages: int) -> float:
        """Return the least time of layers on `num` ranks, with micro-batches of `num_stages` in flight."""
        front = [(0.0, 0.0)]
        for layer in layers[first:end]:
            sums = (
                (seconds + one.seconds, held + one.fixed + num_stages * one.per_stage)
                for seconds, held in front
                for one in layer
                if one.num_ranks == num
            )
            fitting = sorted(both for both in sums if both[1] <= memory)
            front = []
            for both in fitting:  # by time; one that holds no less than a faster one is never better
                if not front or both[1] < front[-1][1]:
                    front.append(both)
        arrival = transfers[first - 1] if first else 0.0
        return max(front[0][0], arrival) if front else math.inf

    found = _divide(len(layers), num_ranks, takes)
    if math.isinf(found.seconds):
        raise ValueError(f"expected layers that fit into {memory:g} bytes of {num_ranks} ranks, got none")
    return found
