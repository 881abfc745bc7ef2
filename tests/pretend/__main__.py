"""Run scenarios from the command line and print what they give.

python -m tests.pretend                                     # all scenarios, a line each
python -m tests.pretend --only stage3 --collectives --kernels 20
python -m tests.pretend --only stage3 --break no_marks  # what a broken engine gives
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.pretend.breaks import BREAKS
from tests.pretend.run import Outcome, run_scenario
from tests.pretend.scenarios import SCENARIOS
from tests.ranks import RankError, Ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pretend", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, metavar="NAME", help="these scenarios")
    parser.add_argument("--break", dest="break_name", choices=BREAKS, help="damage the engine on purpose")
    parser.add_argument("--collectives", action="store_true", help="print those of rank 0")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="print the N most frequent")
    parser.add_argument("--list", action="store_true", help="print the names of scenarios and breaks")
    arguments = parser.parse_args()
    if arguments.list:
        print("scenarios:", *SCENARIOS, "breaks:", *BREAKS, sep="\n  ")
        return 0
    ranks = Ranks()
    is_clean = True
    try:
        for name in arguments.only or SCENARIOS:
            start = time.perf_counter()
            try:
                outcome = run_scenario(ranks, SCENARIOS[name], arguments.break_name)
            except RankError as error:
                is_clean = False
                print(f"{name}: {error}")
                continue
            is_clean &= not outcome.findings
            _print(outcome, time.perf_counter() - start, arguments.collectives, arguments.kernels)
    finally:
        ranks.stop()
    return 0 if is_clean else 1


def _print(outcome: Outcome, seconds: float, with_collectives: bool, num_kernels: int) -> None:
    first = outcome.reports[0]
    kinds = Counter(finding.kind.value for finding in outcome.findings)
    verdict = ", ".join(f"{number} of kind '{kind}'" for kind, number in kinds.items()) or "no findings"
    size = f"{first.kernels.total()} kernels, {len(first.collectives)} collectives"
    print(f"{outcome.scenario}: {verdict}; {size}, {seconds:.2f} s")
    if outcome.findings:
        print(outcome.describe())
    for collective in first.collectives if with_collectives else ():
        print(f"    on {collective.point.stream:10} {collective} of {collective.communicator}")
    for (stream, what), number in first.kernels.most_common(num_kernels):
        print(f"    {number:6} times on {stream:10} {what}")


if __name__ == "__main__":
    sys.exit(main())
