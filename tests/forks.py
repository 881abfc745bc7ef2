"""Processes that have imported torch, zeroshard and transformers, and fork ranks, which start at once.

The imports take seconds, and many tests kill all ranks. Sets of strings have another order in each process
that imports, by which tests find code whose order differs between ranks. So there are several such
processes, and neighbouring ranks are forks of different ones.

    pytest  --"fork", the file descriptors of a rank-->  forker  --fork-->  rank: `worker.serve`
            --"script", those of a script-->             forker  --fork-->  the script, to its own exit
            --"poll 123"-->                              forker
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Memory of 1 MiB or more goes back to the system when it is freed, so tests see what one of them takes.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a fork can use no GPU that its parent has asked CUDA for
}
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
    """Pytest's end of a process that forks."""

    def __init__(self) -> None:
        self._socket, inside = socket.socketpair()
        # What can be imported here can be there.
        code = f"import sys; sys.path = {sys.path!r}; from tests import forks; "
        code += f"exec(compile(forks.serve({inside.fileno()}), 'script.py', 'exec'))"
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[inside.fileno()],
            start_new_session=True,
            env=os.environ | ENVIRONMENT,
        )
        inside.close()

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
        """End the process, and with it ranks that still run."""
        self._socket.close()
        self._process.wait()


@functools.cache
def forker(number: int) -> Forker:
    """Return the forker with a number; all tests of this process share it, for it takes seconds to start."""
    made = Forker()
    atexit.register(made.stop)
    return made


# ---------------------------------------------------------------------------------- inside the process


def serve(descriptor: int) -> str:
    """Fork ranks, and tell how they have ended, until pytest closes the connection or ends.

    Only a fork that is to run a script returns: its text.
    """
    gc.disable()  # imports free next to nothing, and would take a third longer
    for name in PRELOADED:
        with suppress(ImportError):  # transformers may not be installed
            import_module(name)
    run: Callable[[int], NoReturn] = import_module("tests.worker").serve
    gc.collect()
    gc.freeze()
    gc.enable()
    connection = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 64, 2)
        if not message:
            os._exit(0)
        if message.startswith(b"poll"):
            connection.sendall(_status(int(message.split()[1])))
            continue
        pid = os.fork()
        if not pid:
            connection.close()
            _become_rank(descriptors[1])
            if message == b"script":
                return _read_script(descriptors[0])
            run(descriptors[0])
        with suppress(OSError):  # the rank does so itself, too
            os.setpgid(pid, pid)
        for each in descriptors:
            os.close(each)
        connection.sendall(str(pid).encode())


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
