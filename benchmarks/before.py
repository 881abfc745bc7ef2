"""The zeroshard of another commit, under a name of its own, so that both run in one process."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch import end_rank, inside_rank, process_group, run_ranks

NAME = "zeroshard_before"
FOLDER = "ZEROSHARD_BEFORE"
"""The environment variable that tells ranks the folder of the renamed package."""

_FIRST_NUMBER = 1 << 10
"""The first number of its engines, whose exchanges then have other tags than those of the package itself."""


@contextmanager
def package_of(commit: str | None) -> Iterator[None]:
    """Let ranks that are started inside import the package of `commit` as `zeroshard_before`; None: none."""
    if commit is None:
        yield
        return
    root = Path(__file__).parent.parent
    archive = subprocess.run(
        ["git", "archive", commit, "zeroshard"], cwd=root, check=True, capture_output=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        package = Path(folder, "zeroshard").rename(Path(folder, NAME))
        for path in package.rglob("*.py"):
            path.write_text(re.sub(r"\bzeroshard\b", NAME, path.read_text()))
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


def run_on_ranks(script: str, args: argparse.Namespace, measure: Callable[[argparse.Namespace], None]) -> int:
    """Start ranks that run `script` beside the package of `args.before`; inside a rank, measure.

    Args:
        script: the file of the benchmark.
        args: its command line, with `ranks`, and with `before` (a commit or None), `device` (else the CPU)
            and `threads` (else 1) if it has them.
        measure: the function to call in each rank, with an open process group.

    Returns:
        The exit status of the ranks.
    """
    if inside_rank():
        with process_group(getattr(args, "device", "cpu"), getattr(args, "threads", 1)):
            measure(args)
        end_rank()
    with package_of(getattr(args, "before", None)):
        return run_ranks(script, sys.argv[1:], args.ranks)


def is_there() -> bool:
    """True in ranks that were started inside `package_of` with a commit."""
    return FOLDER in os.environ


def load() -> Any:
    """The renamed package."""
    if os.environ[FOLDER] not in sys.path:
        sys.path.append(os.environ[FOLDER])
    package = importlib.import_module(NAME)
    mesh = importlib.import_module(f"{NAME}.comm.mesh")
    counter = "_numbers_used" if hasattr(mesh, "_numbers_used") else "_tag_ranges_used"
    setattr(mesh, counter, max(_FIRST_NUMBER, getattr(mesh, counter)))
    return package
