"""Run the fuzz: `python -m tests.fuzz --cases 300`, or one case of it: `python -m tests.fuzz --seed 123`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time

from tests.fuzz.cases import build_case, num_ranks_of
from tests.fuzz.place import VARIABLE, device
from tests.fuzz.run import failures, run_cases
from tests.fuzz.tensor import divided_case
from tests.ranks import RankError, Ranks

PER_CALL = 20
"""Cases that the same process group serves."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random models and configs.")
    parser.add_argument("--cases", type=int, default=300, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one and describe it")
    parser.add_argument(
        "--device", default="cpu", help="cuda: see tests/gpu/training.py for ranks of one GPU"
    )
    parser.add_argument("--most-ranks", type=int, default=4, help="leave out cases of more ranks")
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks, for each rank of a case")
    options = parser.parse_args()
    os.environ[VARIABLE] = options.device
    seeds = range(options.first, options.first + options.cases)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
        case = build_case(options.seed) if options.tensor == 1 else divided_case(options.seed, options.tensor)
        print("no layer can be divided" if case is None else case.describe(), flush=True)
    start, ranks = time.monotonic(), Ranks()
    numbers = range(1, options.most_ranks // options.tensor + 1)
    failed = [seed for num_ranks in numbers for seed in _run(ranks, num_ranks, seeds, options.tensor)]
    ranks.stop()
    num_run = sum(num_ranks_of(seed) in numbers for seed in seeds)
    print(f"{num_run} cases in {time.monotonic() - start:.0f} s, {len(failed)} failed: {sorted(failed)}")
    return bool(failed)


def _run(ranks: Ranks, num_ranks: int, seeds: range, tp: int) -> list[int]:
    """Run those of the cases that are for so many data-parallel ranks; return those that failed."""
    left, failed = [seed for seed in seeds if num_ranks_of(seed) == num_ranks], []
    while left:
        chunk = left[:PER_CALL]
        try:
            timeout, is_cpu = 60 + 10 * len(chunk), device().type == "cpu"
            results = ranks(num_ranks * tp, run_cases, chunk, tp, process_group=is_cpu, timeout=timeout)
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
