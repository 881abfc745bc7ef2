"""A rank's process: pytest's end of it, and what runs inside."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from tests.forks import Forker

GROUP_TIMEOUT = timedelta(seconds=45)
PRINTED_CHARACTERS = 20_000  # of a process's output, the last ones are shown


def wait_for_a_core() -> None:
    """Have a thread that wakes up wait for a core, not take it from a thread that runs (on Linux).

    A thread of Gloo that receives looks for messages without a pause while the thread that sends holds the
    lock of their connection. If it has taken the sender's core, then it does so for milliseconds. With more
    ranks than cores, this happens in most collectives.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def ask_no_name_server() -> None:
    """Have this process look up names of hosts in /etc/hosts alone, where the C library can do that.

    torch looks up the name of each address that a store is reached from, which is ::ffff:127.0.0.1. Only a
    name server could know it, and a question that is lost costs 5 s.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files myhostname")


class Failure(NamedTuple):
    kind: str  # type name of an exception
    message: str
    details: str  # traceback, stacks, output
    lost: bool  # whether the process died or doesn't answer


class Reply(NamedTuple):
    value: Any = None
    failure: Failure | None = None


class Worker:
    """Pytest's end: asks for a step, and gets one reply.

    Args:
        forker: the process that the rank is a fork of.
    """

    def __init__(self, forker: Forker) -> None:
        self.connection, inside = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process runs)
        self._mark = 0
        self._process = forker.fork(inside.fileno(), self._output.fileno())
        inside.close()

    def ask(self, step: str, arguments: tuple[Any, ...]) -> None:
        self._mark = self.output_size()
        with suppress(OSError):  # a process that has died says so in `reply`
            # Not send(): torch has it pass tensors as shared memory.
            self.connection.send_bytes(pickle.dumps((step, arguments)))

    def reply(self) -> Reply:
        try:
            reply: Reply = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return Reply(failure=Failure("ChildProcessError", self._ending(), self.printed(), lost=True))
        if reply.failure:
            return Reply(failure=reply.failure._replace(details=reply.failure.details + self.printed()))
        return reply

    def hung(self, seconds: float) -> Reply:
        """The reply of a process that gives none."""
        message = f"still running after {seconds:.0f} s"
        return Reply(failure=Failure("TimeoutError", message, self.printed(), lost=True))

    def printed(self) -> str:
        """What the process has printed since it was asked."""
        output = os.pread(self._output.fileno(), self.output_size() - self._mark, self._mark)
        return output.decode(errors="replace")[-PRINTED_CHARACTERS:]

    def output_size(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def print_stacks(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def stop(self) -> None:
        self._process.kill()
        self.connection.close()
        self._output.close()

    def _ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout=20)
            return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        return "closed its connection"


def print_stacks(workers: Sequence[Worker], timeout: float = 10.0) -> None:
    """Have the processes print the stacks of all their threads, and wait until they have."""
    before = [worker.output_size() for worker in workers]
    for worker in workers:
        worker.print_stacks()
    deadline, sizes = time.monotonic() + timeout, before
    while workers and time.monotonic() < deadline:
        time.sleep(0.2)
        last, sizes = sizes, [worker.output_size() for worker in workers]
        if sizes == last and all(now > then for now, then in zip(sizes, before, strict=True)):
            break


# ---------------------------------------------------------------------------------- inside the process


def serve(descriptor: int) -> NoReturn:
    """Take the steps that pytest asks for, until it closes the connection or ends."""
    faulthandler.enable()
    ask_no_name_server()
    wait_for_a_core()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    rank, connection = _Rank(), Connection(descriptor)
    while True:
        try:
            step, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        _listen_for_stacks()
        connection.send_bytes(_attempt(getattr(rank, step), arguments))


def _listen_for_stacks() -> None:
    """Print stacks at SIGUSR1. A trainer that ends may have reset all signals: Lightning does."""
    faulthandler.unregister(signal.SIGUSR1)  # else a second registration does nothing
    faulthandler.register(signal.SIGUSR1)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _attempt(step: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """The pickled reply. Nothing that was raised, nor its frames, outlives this."""
    try:
        return pickle.dumps(Reply(step(*arguments)))
    except BaseException as error:
        # A rank that could not open its group counts groups otherwise than the others from now on.
        lost = not dist.is_initialized()
        failure = Failure(type(error).__name__, str(error), traceback.format_exc(), lost)
        return pickle.dumps(Reply(failure=failure))


class _Rank:
    """The steps of `tests.ranks`."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._job: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None

    def load(self, environment: dict[str, str], job: bytes) -> None:
        gc.freeze()  # modules: `close` need not walk through them
        os.environ.update(environment)
        self._job = pickle.loads(job)

    def call(self, process_group: bool) -> Any:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if process_group:
            dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        assert self._job is not None
        function, args, kwargs = self._job
        return function(*args, **kwargs)

    def close(self) -> None:
        self._job = None
        for _ in range(3):  # what a collection frees may hold more, through tensors and their graphs
            gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        os.environ.clear()
        os.environ.update(self._environment)
