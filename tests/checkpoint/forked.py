"""Ranks that may be killed: forked from a process that has imported torch, which takes seconds.

For modules that are run as scripts. The process that forks must have no threads: so the store through which
ranks find each other has a process of its own, and what is computed is computed in forks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by optimizers, otherwise in each fork
import torch.distributed as dist
import torch.distributed.tensor

from tests.ranks import _torchrun_environment
from tests.worker import ask_no_name_server

STACKS_S = 1.0
"""Seconds for a process to print its stacks."""


class Fork:
    """A process that calls a function and leaves through the interpreter's own exit, as a script does."""

    def __init__(self, output: Path, function: Callable[..., Any], *args: Any) -> None:
        self.output = output
        self.code: int | None = None
        """What it exited with; the negative of the signal that killed it."""
        self.ended_at = 0.0
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            faulthandler.register(signal.SIGUSR1)
            ask_no_name_server()
            torch.set_num_threads(1)
            function(*args)
            sys.exit(0)  # through the frames of the process that forked, none of which may hold it up

    @property
    def is_running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code, self.ended_at = os.waitstatus_to_exitcode(status), time.monotonic()
        return self.code is None

    @property
    def printed(self) -> str:
        return self.output.read_text(errors="replace")

    def kill(self) -> None:
        if self.is_running:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Whether it ends within that time; if not, it prints its stacks and is killed."""
        until = time.monotonic() + seconds
        while self.is_running and time.monotonic() < until:
            time.sleep(0.002)
        ended = not self.is_running
        if not ended and seconds:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(STACKS_S)
        self.kill()
        while self.is_running:
            time.sleep(0.002)
        return ended


class Group:
    """Ranks that call `function(*args)`, in the environment of torchrun.

    Args:
        num_ranks: how many.
        folder: where files for what they print are made.
        function, args: what each of them calls.
    """

    def __init__(self, num_ranks: int, folder: Path, function: Callable[..., Any], *args: Any) -> None:
        port = folder / "port"
        self._store = Fork(folder / "store", _serve, port, os.getpid())
        while not port.exists():
            assert self._store.is_running, self._store.printed
            time.sleep(0.005)

        def run(rank: int) -> None:
            os.environ.update(_torchrun_environment(rank, num_ranks, int(port.read_text())))
            function(*args)

        self.ranks = [Fork(folder / f"rank-{rank}", run, rank) for rank in range(num_ranks)]

    def stop(self) -> None:
        """Kill what is left of it."""
        for process in (*self.ranks, self._store):
            process.wait(0)


def _serve(file: Path, parent: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(str(store.port))
    temporary.rename(file)
    with contextlib.suppress(KeyboardInterrupt):
        while os.getppid() == parent:
            time.sleep(0.5)
