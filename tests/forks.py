"""Processes that have imported torch, zeroshard and transformers, and fork ranks, which start at once.

The imports take seconds, and many tests kill all ranks. Sets of strings have another order in each process
that imports, by which tests find code whose order differs between ranks. So there are several such
processes, and neighbouring ranks are forks of different ones.

    pytest  --"fork", the file descriptors of a rank-->  forker  --fork-->  rank: `worker.serve`
            --"script", those of a script-->             forker  --fork-->  the script, to its own exit
            --"poll 123"-->                              forker

A worker of pytest-xdist has imported all tests, so it need not start another process that imports: the
first workers fork themselves, and all workers use these forkers (`share`). Such a fork has no threads of the
worker. What holds for a whole process (streams, files, hooks, handlers) is made anew in it. A script, which
leaves through the interpreter's exit, is a fork of a process that was started for it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import io
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

BEFORE_IMPORTS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a fork can use no GPU that its parent has asked CUDA for
}
"""What each process must have in its environment that forks ranks, and pytest as well."""
FROM_MIB = 1 << 20
"""Memory of 1 MiB or more goes back to the system when it is freed, so tests see what one of them takes."""
ENVIRONMENT = BEFORE_IMPORTS | {"MALLOC_MMAP_THRESHOLD_": str(FROM_MIB)}
M_MMAP_THRESHOLD = -3  # of malloc.h
NUM_FORKERS = 2  # neighbouring ranks have other orders of sets
PATIENCE = 60.0  # seconds until another worker has collected its tests
PRELOADED = (
    "tests.distributed.training",
    "tests.distributed.models",
    "transformers.models.llama.modeling_llama",
)


class Fork:
    """A rank's process, a fork of another one than this; as far as it is needed like `subprocess.Popen`."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self._forker, self.pid = forker, pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, the negative number of a signal, or None for a process that runs."""
        if self._status is None:
            self._status = self._forker.poll(self.pid)
        return self._status

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the end, and return the exit code. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and those that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class Forker:
    """Pytest's end of a process that forks.

    Args:
        connection: to the process, which ends with the last connection to it.
        process: the one that was started, where this is its only connection.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket, self._process = connection, process

    def fork(self, source: int, output: int, kind: bytes = b"fork") -> Fork:
        """Fork a rank, which takes its steps from a connection and prints into a file.

        Or, for the kind "script", a process that runs a script: the source is a file of JSON with environment
        and text. It ends as the interpreter does.
        """
        socket.send_fds(self._socket, [kind], [source, output])
        return Fork(self, int(self._answer()))

    def poll(self, pid: int) -> int | None:
        """Return the exit code of a rank that has ended."""
        self._socket.sendall(f"poll {pid}".encode())
        answer = self._answer()
        return None if answer == "runs" else int(answer)

    def _answer(self) -> str:
        answer = self._socket.recv(64).decode()
        if not answer:
            raise ChildProcessError("the process that forks ranks has ended; it has printed the reason above")
        return answer

    def stop(self) -> None:
        """End the process if nobody else uses it, and in any case the ranks that still run."""
        self._socket.close()
        if self._process:
            self._process.wait()


def start_forker(preloaded: tuple[str, ...] = PRELOADED) -> Forker:
    """Start a process that imports some modules and forks."""
    connection, inside = socket.socketpair()
    # What can be imported here can be there.
    code = f"import sys; sys.path = {sys.path!r}; from tests import forks; "
    code += f"exec(compile(forks.serve({inside.fileno()}, {preloaded!r}), 'script.py', 'exec'))"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=[inside.fileno()],
        start_new_session=True,
        env=os.environ | ENVIRONMENT,
    )
    inside.close()
    made = Forker(connection, process)
    atexit.register(made.stop)
    return made


_shared: dict[int, Forker] = {}


@functools.cache
def forker(number: int) -> Forker:
    """Return the forker with a number; all tests of this process share it, for it takes seconds to start."""
    return _shared.get(number) or start_forker()


@functools.cache
def forker_of_scripts() -> Forker:
    """Return a forker whose forks leave through the exit of an interpreter that was started for it."""
    if not _shared:
        return forker(0)
    return start_forker(("tests.distributed.training", "torch._dynamo"))  # what a script of an engine imports


def share(run: str, number: int, num_workers: int) -> None:
    """In a worker that has collected: have all workers use forks of the first ones.

    A worker waits for the others that fork. One that comes later, in the place of one that has crashed,
    starts forkers of its own, and so does each worker if one of them does not come.

    Args:
        run: a name that no other run has.
        number: of this worker.
        num_workers: that the run begins with.
    """
    if not NUM_FORKERS <= num_workers > number:
        return
    if number < NUM_FORKERS:
        connection, pid = _fork_this_process(path(run, number), num_workers)
        _shared[number] = Forker(connection)
        atexit.register(os.waitpid, pid, 0)
    for other in set(range(NUM_FORKERS)) - {number}:
        if found := _connect(path(run, other)):
            _shared[other] = Forker(found)
    for each in _shared.values():
        atexit.register(each.stop)  # before the worker waits for the end of its fork


def path(run: str, number: int) -> Path:
    """Return where a forker of a run listens until all workers are connected."""
    return Path(tempfile.gettempdir(), f"zeroshard-{run}-{number}")


def _connect(path: Path) -> socket.socket | None:
    """Connect to a forker as soon as it is there."""
    connection, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(str(path))
            return connection
        time.sleep(0.05)
    return None


def _fork_this_process(path: Path, num_workers: int) -> tuple[socket.socket, int]:
    """Fork a forker, which ends with the last worker; return the connection to it, and its number."""
    connection, inside = socket.socketpair()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the worker has a thread, which only receives
        pid = os.fork()
    if not pid:
        try:
            connection.close()
            _renew(inside.fileno(), listener.fileno())
            _Server(inside, listener, num_workers - 1).run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # nothing of pytest's goes on here
    inside.close()
    listener.close()
    return connection, pid


# ---------------------------------------------------------------------------------- inside the process


def serve(descriptor: int, preloaded: tuple[str, ...]) -> str:
    """Fork ranks, and tell how they have ended, until pytest closes the connection or ends.

    Only a fork that is to run a script returns: its text.
    """
    gc.disable()  # imports free next to nothing, and would take a third longer
    for name in preloaded:
        with suppress(ImportError):  # transformers may not be installed
            import_module(name)
    return _Server(socket.socket(fileno=descriptor)).run()


class _Server:
    """Forks ranks for whoever is connected.

    Args:
        client: the first connection.
        listener: where others connect.
        num_others: how many of them will.
    """

    def __init__(
        self, client: socket.socket, listener: socket.socket | None = None, num_others: int = 0
    ) -> None:
        self._run: Callable[[int], NoReturn] = import_module("tests.worker").serve
        self._forks: dict[socket.socket, set[int]] = {}
        self._listener, self._num_others = listener, num_others
        self._selector = selectors.DefaultSelector()
        self._join(client)
        if listener:
            self._selector.register(listener, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()
        gc.enable()

    def run(self) -> str:
        """Serve until the last connection is closed. Only the fork of a script returns: the script."""
        while self._forks:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept(self._listener)
                elif (script := self._answer(key.fileobj)) is not None:  # type: ignore[arg-type]
                    return script
        if self._listener:
            self._close(self._listener)
        os._exit(0)

    def _join(self, client: socket.socket) -> None:
        self._forks[client] = set()
        self._selector.register(client, selectors.EVENT_READ)

    def _accept(self, listener: socket.socket) -> None:
        self._join(listener.accept()[0])
        self._num_others -= 1
        if not self._num_others:
            self._close(listener)

    def _close(self, listener: socket.socket) -> None:
        """Nobody else will come, so leave no file."""
        self._selector.unregister(listener)
        Path(listener.getsockname()).unlink(missing_ok=True)
        listener.close()
        self._listener = None

    def _answer(self, client: socket.socket) -> str | None:
        """Do what pytest asks for; in the fork of a script return its text."""
        message, descriptors = b"", list[int]()
        with suppress(ConnectionError):  # a pytest that was killed
            message, descriptors, _, _ = socket.recv_fds(client, 64, 2)
        if not message:
            self._drop(client)
        elif message.startswith(b"poll"):
            pid = int(message.split()[1])
            if (status := _status(pid)) != b"runs":
                self._forks[client].discard(pid)
            self._send(client, status)
        else:
            pid = os.fork()
            if not pid:
                return self._in_fork(message, *descriptors)
            self._forks[client].add(pid)
            with suppress(OSError):  # the rank does so itself, too
                os.setpgid(pid, pid)
            for each in descriptors:
                os.close(each)
            self._send(client, str(pid).encode())
        return None

    def _send(self, client: socket.socket, answer: bytes) -> None:
        with suppress(ConnectionError):  # of a pytest that was killed: its end comes next
            client.sendall(answer)

    def _in_fork(self, message: bytes, source: int, output: int) -> str:
        """Become a rank, or a process for the script that is returned."""
        self._selector.close()
        for each in (*self._forks, *filter(None, [self._listener])):
            each.close()
        _become_rank(output)
        if message != b"script":
            self._run(source)
        return _read_script(source)

    def _drop(self, client: socket.socket) -> None:
        """Kill the forks of a pytest that has ended; others use this process."""
        self._selector.unregister(client)
        client.close()
        for pid in self._forks.pop(client):
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _renew(*kept: int) -> None:
    """Make this fork of a worker of pytest a process of its own.

    Files that the worker has open lead nowhere here: while one of them is open, pytest-xdist does not see
    that its worker has ended. Their numbers stay taken, for objects of Python hold them.
    """
    os.setsid()
    os.environ.update(ENVIRONMENT)
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, FROM_MIB)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number not in kept and number > 2:
            with suppress(OSError):  # the one that has listed them
                os.dup2(nowhere, number, inheritable=False)
    os.dup2(nowhere, 0)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = sys.__stdout__ = _unbuffered(1)
    sys.stderr = sys.__stderr__ = _unbuffered(2)
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    logging.root.handlers.clear()  # those of pytest


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), write_through=True)


def _become_rank(output: int) -> None:
    os.setpgid(0, 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    numpy = import_module("numpy")
    numpy.random.seed()  # as Python does with its own random numbers


def _read_script(descriptor: int) -> str:
    with os.fdopen(descriptor) as file:
        environment, text = json.load(file)
    os.environ.update(environment)
    sys.setswitchinterval(100)
    return str(text)


def _status(pid: int) -> bytes:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return str(os.waitstatus_to_exitcode(status)).encode() if ended else b"runs"
