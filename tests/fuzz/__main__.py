"""Run the fuzz: `python -m tests.fuzz --cases 300`, or one case of it: `python -m tests.fuzz --seed 123`."""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence

from tests.fuzz import pipeline
from tests.fuzz.cases import build_case, num_ranks_of
from tests.fuzz.place import VARIABLE, device
from tests.fuzz.run import failures, run_case, run_cases
from tests.fuzz.tensor import divided_case, tensor_ranks_of
from tests.ranks import RankError, Ranks

PER_CALL = 20
"""Cases that the same process group serves."""
PIPELINES = 5
"""Without `--kind` one of so many seeds has a case of pipelines, too."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random models and configs.")
    parser.add_argument("--cases", type=int, default=300, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one and describe it")
    parser.add_argument(
        "--device", default="cpu", help="cuda: see tests/gpu/training.py for ranks of one GPU"
    )
    parser.add_argument("--most-ranks", type=int, default=4, help="leave out cases of more ranks")
    parser.add_argument("--tensor", type=int, help="tensor ranks for each rank of all cases; else 1 or 2")
    parser.add_argument("--kind", choices=("models", "pipelines"), help="run cases of this kind alone")
    options = parser.parse_args()
    os.environ[VARIABLE] = options.device
    seeds = range(options.first, options.first + options.cases)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
        options.kind = options.kind or "models"
        print(_describe(options), flush=True)
    start, ranks, failed = time.monotonic(), Ranks(), []
    if options.kind in (None, "models"):
        failed += _run_models(ranks, seeds, options)
    if options.kind in (None, "pipelines") and device().type == "cpu":
        failed += _run_pipelines(ranks, seeds if options.kind else seeds[::PIPELINES], options.most_ranks)
    ranks.stop()
    print(f"{time.monotonic() - start:.0f} s")
    return bool(failed)


def _describe(options: argparse.Namespace) -> str:
    """The one case that the command line asks for."""
    if options.kind == "pipelines":
        return pipeline.build_case(options.seed).describe()
    tp = _tp(options.seed, options)
    case = build_case(options.seed) if tp == 1 else divided_case(options.seed, tp)
    return "no layer can be divided" if case is None else case.describe()


def _run_models(ranks: Ranks, seeds: Sequence[int], options: argparse.Namespace) -> list[int]:
    cases: dict[tuple[int, int], list[int]] = {}
    for seed in seeds:
        num_ranks, tp = num_ranks_of(seed), _tp(seed, options)
        if num_ranks * tp <= options.most_ranks:
            cases.setdefault((num_ranks, tp), []).append(seed)
    failed = []
    for (num_ranks, tp), own in sorted(cases.items()):
        failed += _run(ranks, num_ranks * tp, functools.partial(run_case, tp=tp), own)
    num_divided = sum(len(own) for (_, tp), own in cases.items() if tp > 1)
    print(f"{sum(map(len, cases.values()))} cases, {num_divided} of them over tensor ranks", end=", ")
    print(f"{len(failed)} failed: {sorted(failed)}")
    return failed


def _tp(seed: int, options: argparse.Namespace) -> int:
    """The tensor ranks of a case: those that the command line asks for, or that the seed draws."""
    tp: int | None = options.tensor
    return tensor_ranks_of(seed, options.most_ranks) if tp is None else tp


def _run_pipelines(ranks: Ranks, seeds: Sequence[int], most_ranks: int) -> list[int]:
    cases: dict[int, list[int]] = {}
    for seed in seeds:
        if (num_ranks := pipeline.num_ranks_of(seed)) <= most_ranks:
            cases.setdefault(num_ranks, []).append(seed)
    failed = []
    for num_ranks, own in sorted(cases.items()):
        failed += _run(ranks, num_ranks, pipeline.run_case, own)
    print(f"{sum(map(len, cases.values()))} cases of pipelines, {len(failed)} failed: {sorted(failed)}")
    return failed


def _run(ranks: Ranks, num_ranks: int, run: Callable[[int], list[str]], seeds: list[int]) -> list[int]:
    """Run cases of so many ranks; return those that failed."""
    left, failed = list(seeds), []
    while left:
        chunk = left[:PER_CALL]
        try:
            timeout, is_cpu = 60 + 10 * len(chunk), device().type == "cpu"
            results = ranks(num_ranks, run_cases, chunk, run, process_group=is_cpu, timeout=timeout)
        except RankError as error:  # a rank died or hung, and the cases before have no result
            begun = re.findall(r"^seed (\d+)$", str(error), re.MULTILINE)
            results = [{int(begun[-1]) if begun else chunk[0]: [str(error)]}]
        left = [seed for seed in left if seed not in results[0]]
        for seed, lines in failures(results).items():
            failed.append(seed)
            print(f"seed {seed} failed", *lines, sep="\n", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
