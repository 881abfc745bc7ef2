"""Break the engine: `python -m tests.net`, or a few breaks of it: `python -m tests.net --only NAME ...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.net.breaks import BREAKS
from tests.net.runner import TIMEOUT_S, find_breaks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.net", description="Breaks that tests must find.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run breaks with this in their names")
    parser.add_argument("--list", action="store_true", help="print the breaks and run none")
    parser.add_argument("--jobs", type=int, default=1, help="how many breaks to run at a time")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for the tests of a break")
    options = parser.parse_args()
    asked = options.only or [""]
    breaks = [one for one in BREAKS if any(part in one.name for part in asked)]
    if options.list:
        for one in breaks:
            print(f"{one.name}: {one.says}\n    {one.file}; {', '.join(one.tests)}")
        return 0
    if not breaks:
        parser.error(f"no break has {' or '.join(asked)} in its name")
    with TemporaryDirectory() as folder:
        root = Path(__file__).parents[2]
        return not find_breaks(root, breaks, Path(folder), jobs=options.jobs, timeout_s=options.timeout)


if __name__ == "__main__":
    sys.exit(main())
