"""The seconds that the tests of each file take in `make test` on two quiet cores: seconds.json keeps them.

    make test ARGS="--junitxml build/run.xml" && python -m tests.seconds build/run.xml

writes them anew. `tests/test_selection.py` has the budget of their sum.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
KEPT = TESTS / "seconds.json"
RENEW = 'make test ARGS="--junitxml build/run.xml" && python -m tests.seconds build/run.xml'


def files() -> list[str]:
    """The test files, as paths under tests/."""
    return sorted(file.relative_to(TESTS).as_posix() for file in TESTS.rglob("test_*.py"))


def of_run(report: Path) -> dict[str, float]:
    """The seconds by file in a report in the form of JUnit; 0 for a file whose tests it has not."""
    found = dict.fromkeys(files(), 0.0)
    for case in ElementTree.parse(report).iter("testcase"):
        _, *path = case.attrib["classname"].split(".")
        found["/".join(path) + ".py"] += float(case.attrib["time"])
    return {file: round(seconds, 1) for file, seconds in found.items()}


def kept() -> dict[str, float]:
    """The seconds by file in seconds.json."""
    seconds: dict[str, float] = json.loads(KEPT.read_text(encoding="utf-8"))
    return seconds


if __name__ == "__main__":
    KEPT.write_text(json.dumps(of_run(Path(sys.argv[1])), indent=0) + "\n", encoding="utf-8")
