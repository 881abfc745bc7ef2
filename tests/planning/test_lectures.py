"""The planners of the lectures find what an enumeration of their space finds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from zeroshard.parallel.pipeline.partition import BlockProfile, partition
from zeroshard.planning.lectures import LayerOption, flexflow, pipedream, piper


def divisions(num_layers: int, num_ranks: int) -> Iterator[list[tuple[int, int, int]]]:
    """All runs of layers with their ranks: (first, end, ranks) of each stage."""
    for num_stages in range(1, num_layers + 1):
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
            ends = [0, *cuts, num_layers]
            for ranks in itertools.product(range(1, num_ranks + 1), repeat=num_stages):
                if sum(ranks) <= num_ranks:
                    yield list(zip(ends, ends[1:], ranks, strict=False))


@pytest.mark.parametrize("num_layers", [1, 3, 5, 7])
def test_pipedreams_program_equals_brute_force(num_layers: int) -> None:
    for seed in range(20):
        check_pipedream(num_layers, random.Random(100 * num_layers + seed))


def check_pipedream(num_layers: int, draw: random.Random) -> None:
    seconds, weights, outputs = ([draw.uniform(0, 4) for _ in range(num_layers)] for _ in range(3))
    bandwidth = draw.choice((0.5, 2.0, 20.0))

    def slowest(stages: list[tuple[int, int, int]]) -> float:
        parts = []
        for first, end, m in stages:
            synchronized = 4 * (m - 1) * sum(weights[first:end]) / (bandwidth * m)
            parts.append((sum(seconds[first:end]) + synchronized) / m)
            if first:
                parts.append(2 * outputs[first - 1] / (bandwidth * m))
        return max(parts)

    for num_ranks in range(1, 5):
        expected = min(map(slowest, divisions(num_layers, num_ranks)))
        found = pipedream(seconds, weights, outputs, num_ranks, bandwidth)
        assert found.seconds == pytest.approx(expected)
        given = [(one.layers.start, one.layers.stop, one.num_ranks) for one in found.stages]
        assert slowest(given) == pytest.approx(expected)


def test_without_replicas_and_transfers_pipedream_is_the_division_of_the_least_bottleneck() -> None:
    times = [4, 1, 1, 1, 1]
    found = pipedream([*map(float, times)], [1e9] * 5, [0.0] * 5, 2, 1.0)
    runs = partition([BlockProfile(time=time) for time in times], 2)
    assert [one.layers for one in found.stages] == list(runs) == [range(1), range(1, 5)]


@pytest.mark.parametrize("num", [pytest.param(100, marks=pytest.mark.long), 20])
def test_the_walk_of_flexflow_finds_the_optimum_of_the_enumeration(num: int) -> None:
    """On chains of 6 operations with 4 configurations each, for at least 95 % of the seeds."""
    assert sum(map(walk_finds_optimum, range(num))) >= 0.95 * num


def walk_finds_optimum(seed: int) -> bool:
    draw = random.Random(seed)
    own = [[draw.uniform(0.1, 0.5) for _ in range(4)] for _ in range(6)]
    moves = [[[draw.uniform(0, 0.3) for _ in range(4)] for _ in range(4)] for _ in range(5)]

    def cost(choice: tuple[int, ...]) -> float:
        between = sum(moves[at][choice[at]][choice[at + 1]] for at in range(5))
        return sum(own[at][one] for at, one in enumerate(choice)) + between

    best = min(map(cost, itertools.product(range(4), repeat=6)))
    found, choice = flexflow([4] * 6, cost, num_moves=2000, beta=20.0, seed=seed)
    assert cost(choice) == found
    return found == pytest.approx(best)


@pytest.mark.parametrize("num_layers", [2, 4])
def test_pipers_program_over_ideals_equals_brute_force(num_layers: int) -> None:
    """Options of a layer are tensor degrees 1 and 2, each kept or recomputed."""
    for seed in range(25):
        check_piper(num_layers, random.Random(1000 * num_layers + seed))


def check_piper(num_layers: int, draw: random.Random) -> None:
    layers = []
    for _ in range(num_layers):
        time, fixed, kept = draw.uniform(1, 3), draw.uniform(1, 2), draw.uniform(1, 3)
        layers.append(
            [
                LayerOption(num, (time + again) / num + 0.1 * num, fixed / num, held / num)
                for num in (1, 2)
                for again, held in ((0.0, kept), (time / 3, kept / 4))
            ]
        )
    transfers, memory = [draw.uniform(0, 2) for _ in layers], draw.uniform(1.5, 8)

    def slowest(stages: list[tuple[int, int, int]]) -> float:
        worst = 0.0
        for number, (first, end, num) in enumerate(stages):
            in_flight = len(stages) - number
            fitting = [
                sum(one.seconds for one in chosen)
                for chosen in itertools.product(*layers[first:end])
                if all(one.num_ranks == num for one in chosen)
                and sum(one.fixed + in_flight * one.per_stage for one in chosen) <= memory
            ]
            worst = max(worst, min([*fitting, float("inf")]), transfers[first - 1] if first else 0.0)
        return worst

    expected = min(map(slowest, divisions(num_layers, 4)))
    if expected == float("inf"):
        with pytest.raises(ValueError, match="expected layers that fit into"):
            piper(layers, transfers, 4, memory)
    else:
        assert piper(layers, transfers, 4, memory).seconds == pytest.approx(expected)


def test_a_chain_without_layers_or_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="expected layers and at least 1 rank, got 0 and 2"):
        pipedream([], [], [], 2, 1.0)
