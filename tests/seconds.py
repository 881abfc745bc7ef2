"""The seconds that each test file takes in `make test` on two quiet cores, kept in seconds.json.

    make test ARGS="--junitxml run.xml" && python -m tests.seconds run.xml

writes them anew. `tests/test_selection.py` has the budget of their sum.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).with_suffix(".json")
FOLDER = FILE.parent


def of_run(report: Path) -> dict[str, float]:
    """Return the seconds of each file, of a report in the form of JUnit."""
    found = Counter[str]({str(file.relative_to(FOLDER)): 0 for file in FOLDER.rglob("test_*.py")})
    for case in ElementTree.parse(report).iter("testcase"):
        _, *path = case.attrib["classname"].split(".")
        found["/".join(path) + ".py"] += float(case.attrib["time"])  # type: ignore[assignment]
    return {name: round(seconds, 1) for name, seconds in sorted(found.items())}


def kept() -> dict[str, float]:
    """Return the seconds in seconds.json."""
    seconds: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return seconds


if __name__ == "__main__":
    text = json.dumps(of_run(Path(sys.argv[1])), indent=0)
    FILE.write_text(text + "\n", encoding="utf-8")
