"""Scripts on forked ranks, and how their processes end.

Each rank runs a script and leaves through the interpreter's own exit, as a script does under torchrun.

What aborts a process whose group is open, or is still held by a mesh, is a thread of Gloo that waits for the
interpreter lock, to drop a tensor, while the interpreter ends. A long switch interval lets that thread wait
until then: so what happens to one run in five happens to every other one.
"""

from __future__ import annotations

import json
import tempfile
import time
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.forks import Fork, forker_of_scripts
from tests.ranks import _torchrun_environment

AT_ONCE = 4
"""Scripts that run at the same time."""


class Ending(NamedTuple):
    """How a rank's process ended."""

    code: int
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Without the name of the rank that torch puts before each line."""
        return self.output.rstrip().splitlines()[-1].split("]: ", 1)[-1]


class Forks:
    """What the fixture `run` gives to a test."""

    def __call__(self, *scripts: str, num_ranks: int = 2) -> list[tuple[Ending, ...]]:
        """Run each script on some ranks; the endings of all of them, by script."""
        found: list[tuple[Ending, ...]] = []
        for first in range(0, len(scripts), AT_ONCE):
            found += self._run(scripts[first : first + AT_ONCE], num_ranks)
        return found

    def _run(self, scripts: tuple[str, ...], num_ranks: int) -> list[tuple[Ending, ...]]:
        stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in scripts]
        forker_of_scripts()  # the first one takes seconds
        running, endings, begun = {}, {}, time.monotonic()
        for number, (store, script) in enumerate(zip(stores, scripts, strict=True)):
            for rank in range(num_ranks):
                environment = _torchrun_environment(rank, num_ranks, store.port)
                running[number, rank] = self._start(environment, script)
        while running:
            time.sleep(0.02)
            for at, (fork, output) in list(running.items()):
                if (code := fork.poll()) is not None:
                    output.seek(0)
                    text = output.read().decode(errors="replace")
                    endings[at] = Ending(code, text, time.monotonic() - begun)
                    del running[at]
        return [tuple(endings[number, rank] for rank in range(num_ranks)) for number in range(len(scripts))]

    def _start(self, environment: dict[str, str], script: str) -> tuple[Fork, Any]:
        output = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process runs)
        with tempfile.TemporaryFile("w+") as source:
            json.dump((environment, script), source)
            source.flush()
            source.seek(0)
            return forker_of_scripts().fork(source.fileno(), output.fileno(), b"script"), output


@pytest.fixture
def run() -> Forks:
    return Forks()
