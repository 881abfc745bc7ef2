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
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
        if file in found:
            found[file] += float(case.attrib["time"])
    return {file: round(seconds, 1) for file, seconds in found.items()}


def kept() -> dict[str, float]:
    """The seconds by file in seconds.json, which has a line for each folder."""
    folders: dict[str, dict[str, float]] = json.loads(KEPT.read_text(encoding="utf-8"))
    return {file: seconds for of_files in folders.values() for file, seconds in of_files.items()}


def keep(seconds: dict[str, float]) -> None:
    """Write seconds.json."""
    folders: dict[str, dict[str, float]] = {}
    for file, value in seconds.items():
        folders.setdefault(str(Path(file).parent), {})[file] = value
    lines = (f"{json.dumps(folder)}: {json.dumps(of_files)}" for folder, of_files in folders.items())
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    keep(of_run(Path(sys.argv[1])))
