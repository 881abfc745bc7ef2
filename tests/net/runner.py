"""Breaks the engine in one place at a time, and runs the tests that must find it.

copy       the checkout, once, to a temporary folder
intact     all named tests pass there
a break    its text is replaced, its tests run up to the first that fails, the file is restored
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import NamedTuple

TIMEOUT_S = 300.0
"""Seconds for the tests of a break. A test over ranks ends by itself within a minute or two."""
FUZZ = "seed "
"""The beginning of a test that is a seed of the fuzz."""
_NO_END = 124


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A damage, and the tests that must find it."""

    name: str
    says: str
    """The behaviour that is broken. After a change of the code it shows where the break belongs."""
    file: str
    """A file, from `zeroshard/` on."""
    find: str
    """A text that stands in the file once."""
    replace: str
    tests: tuple[str, ...]
    """Names of tests, arguments of pytest (a file, or file::test), or seeds of the fuzz: "seed 12"."""

    def damaged(self, root: Path) -> str:
        """Return the text of the damaged file.

        Raises:
            ValueError: the file does not have the text once.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (num := text.count(self.find)) != 1:
            raise ValueError(f"{self.name}: expected the text once in {self.file}, found it {num} times")
        return text.replace(self.find, self.replace)


class Outcome(NamedTuple):
    """The end of the tests of a break."""

    code: int
    """0: they pass; 1: one failed; another number: they could not be run."""
    shown: str
    """The first test that failed, and the first line of its error."""
    seconds: float


class Checkout:
    """A copy of a checkout, which may be damaged.

    Args:
        source: the root of the checkout; git lists its files.
        target: the folder of the copy.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.root = target
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=source, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (source / name).is_file():  # a file that was removed and is not yet committed is none
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / name, target / name)

    @contextmanager
    def damage(self, one: Break) -> Iterator[None]:
        """Inside, a file is damaged."""
        file = self.root / one.file
        before = file.read_bytes()
        self._write(file, one.damaged(self.root).encode())
        try:
            yield
        finally:
            self._write(file, before)

    def _write(self, file: Path, content: bytes) -> None:
        file.write_bytes(content)
        # Python compares seconds and sizes: two writes in one second may look the same.
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()

    def run(self, tests: Iterable[str], timeout_s: float = TIMEOUT_S, *options: str) -> Outcome:
        """Run tests, and then seeds of the fuzz, up to the first that fails."""
        begun, shown, code = time.monotonic(), "", 0
        for command in commands([located(self.root, test) for test in tests], options):
            code, printed = self._call(command, timeout_s)
            shown = first_error(printed)
            if code:
                break
        return Outcome(code, shown, time.monotonic() - begun)

    def _call(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        with subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that it can be killed with the processes that it has started
        ) as process:
            try:
                printed, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return _NO_END, f"no end after {timeout_s:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, printed


@functools.cache
def files_of(root: Path) -> dict[str, list[str]]:
    """Return the files that have a test, by its name."""
    found: dict[str, list[str]] = {}
    for file in sorted((root / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, []).append(str(file.relative_to(root)))
    return found


def located(root: Path, test: str) -> str:
    """Return the argument of pytest for a name of a test; what is one already stays.

    Raises:
        ValueError: no file has the test, or several have one of this name.
    """
    if not test.startswith("test_"):
        return test
    files = files_of(root).get(test.partition("[")[0], [])
    if len(files) != 1:
        raise ValueError(f"{test}: expected one file with this test, found {files}")
    return f"{files[0]}::{test}"


def commands(tests: Iterable[str], options: Sequence[str]) -> list[list[str]]:
    """Return the arguments of Python for tests: one run of pytest, and one of the fuzz for each seed."""
    tests = list(tests)
    own = [test for test in tests if not test.startswith(FUZZ)]
    seeds = [test.removeprefix(FUZZ) for test in tests if test.startswith(FUZZ)]
    # A long test that is named would run: -m leaves it out.
    fast = ["-m", "not long", "-q", "-p", "no:cacheprovider", *options]
    return [["pytest", *fast, *own]] * bool(own) + [["tests.fuzz", "--seed", seed] for seed in seeds]


def first_error(printed: str) -> str:
    """Return the name of the first test that failed, and the first line of its error; else the last line."""
    lines = printed.strip().splitlines() or [""]
    seed = next((at for at, line in enumerate(lines) if re.match(r"seed \d+ failed", line)), None)
    if seed is not None:
        return " ".join(lines[seed : seed + 2])
    failed = next((line for line in lines if re.match(r"(FAILED|ERROR) ", line)), None)
    if failed is None:
        return lines[-1]
    name = failed.split(" - ")[0].removeprefix("FAILED ")
    error = next((line.removeprefix("E").strip() for line in lines if re.match(r"E +\S", line)), "")
    return f"{name}: {error:.120}"


def find_breaks(
    source: Path, breaks: Sequence[Break], folder: Path, *, jobs: int = 1, timeout_s: float = TIMEOUT_S
) -> bool:
    """Run all breaks, and print a table.

    Args:
        source: the checkout.
        breaks: the breaks.
        folder: an empty folder for the copies.
        jobs: how many breaks run at a time, each in a copy of its own.
        timeout_s: seconds for the tests of a break.

    Returns:
        True if the tests pass on the intact code and find each break.
    """
    checkouts = Queue[Checkout]()
    for number in range(jobs):
        checkouts.put(checkout := Checkout(source, folder / str(number)))
    tests = list(dict.fromkeys(test for one in breaks for test in one.tests))
    code, shown, seconds = checkout.run(tests, timeout_s * max(1, len(breaks)))
    print(f"{'passes' if not code else 'FAILS':9} {seconds:6.1f} s  without a break  {shown}", flush=True)
    if code:
        return False

    def run(one: Break) -> bool:
        own = checkouts.get()
        with own.damage(one):
            code, shown, seconds = own.run(one.tests, timeout_s, "-x")
        checkouts.put(own)
        state = {0: "NOT FOUND", 1: "found"}.get(code, f"CODE {code}")
        print(f"{state:9} {seconds:6.1f} s  {one.name}  {shown}", flush=True)
        return code == 1

    with ThreadPoolExecutor(jobs) as pool:
        num_found = sum(pool.map(run, breaks))
    print(f"{num_found} of {len(breaks)} breaks were found")
    return num_found == len(breaks)
