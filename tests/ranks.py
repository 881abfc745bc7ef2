"""Run a function on several ranks, each a process of its own, and get back what they return.

    def mean(value): ...                        # module-level: a rank imports it by its name

    def test_mean(ranks):
        assert ranks(2, mean, 3.0) == [3.0, 3.0]

A rank's process is started once, as a fork of one that has imported torch, and serves all tests. What it does
for a test is cut in three steps, and none begins before all ranks have ended the one before:

    load    set the environment that torchrun would set, import the function
    call    open a process group, call the function
    close   collect garbage, destroy the process group

So no rank takes its process group away from another that still uses it. A rank that raises is
reported with its traceback. One that dies or hangs is too, with the stacks of those that still run;
then all processes are killed, and the next test gets new ones.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch.distributed as dist

from tests.forks import NUM_FORKERS, forker
from tests.worker import Failure, Reply, Worker, print_stacks

LOAD_TIMEOUT = 300.0  # seconds, a process's start included
GRACE = 5.0  # seconds for the other ranks, once one has failed
KEPT = 4  # processes that stay for the next test
VALUE_CHARACTERS = 500  # of each local variable of a body that fails
SHARES_GPU = os.environ.get("ZEROSHARD_SHARED_GPU") == "1"  # all ranks use the one GPU that there is
if SHARES_GPU:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")


class RankError(AssertionError):
    """Some rank raised, died or hung.

    `errors[rank]` is None or (type name, message): of the exception that the function raised,
    ChildProcessError for a process that ended, or TimeoutError for one that was still running.
    """

    def __init__(self, message: str, errors: list[tuple[str, str] | None]) -> None:
        super().__init__(message)
        self.errors = errors


class Ranks:
    """The processes, started as they are needed. What the fixture `ranks` gives to a test."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def __call__(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        /,
        *args: Any,
        process_group: bool = True,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(*args, **kwargs)` on all ranks; return what it returns, by rank.

        Args:
            num_ranks: the world size.
            function: a module-level function. It and its arguments and result are pickled.
            args: its arguments.
            process_group: whether a Gloo group is open when it is called. Otherwise only the
                environment is there with which `init_process_group()` or `initialize` opens one.
            timeout: seconds that it may take.
            kwargs: its keyword arguments.

        Raises:
            RankError: when it raised, died or took longer on any rank.
        """
        __tracebackhide__ = True
        job = pickle.dumps((function, args, kwargs))
        self._start(num_ranks)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environments = [_torchrun_environment(rank, num_ranks, store.port) for rank in range(num_ranks)]
        try:
            self._all("load", [(environment, job) for environment in environments], LOAD_TIMEOUT)
            return self._all("call", [(process_group,)] * num_ranks, timeout)
        finally:
            if self._workers:
                self._all("close", [()] * num_ranks, timeout)
                self._stop(self._workers[KEPT:])

    def stop(self) -> None:
        """Kill all ranks."""
        self._stop(self._workers)

    def _start(self, num_ranks: int) -> None:
        for number in range(min(num_ranks, NUM_FORKERS)):  # they import at the same time
            forker(number)
        for rank in range(len(self._workers), num_ranks):
            self._workers.append(Worker(forker(rank % NUM_FORKERS)))

    def _stop(self, workers: Sequence[Worker]) -> None:
        for worker in list(workers):
            worker.stop()
            self._workers.remove(worker)

    def _all(self, step: str, arguments: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        """Have each rank take a step, and return what it answers. Nothing survives a rank that doesn't."""
        __tracebackhide__ = True
        try:
            replies = self._exchange(step, arguments, timeout)
        except BaseException:
            self.stop()
            raise
        failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure}
        if any(failure.lost for failure in failures.values()):
            self.stop()
        if failures:
            raise _rank_error(step, failures, len(arguments))
        return [replies[rank].value for rank in range(len(arguments))]

    def _exchange(self, step: str, arguments: Sequence[tuple[Any, ...]], timeout: float) -> dict[int, Reply]:
        """The ranks' replies, in the order in which they came."""
        start = time.monotonic()
        deadline = start + timeout
        replies: dict[int, Reply] = {}
        waiting: dict[Any, int] = {}
        for rank, values in enumerate(arguments):
            self._workers[rank].ask(step, values)
            waiting[self._workers[rank].connection] = rank
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)
                replies[rank] = self._workers[rank].reply()
                if replies[rank].failure:
                    deadline = min(deadline, time.monotonic() + GRACE)
        hung = {rank: self._workers[rank] for rank in waiting.values()}
        print_stacks(list(hung.values()))
        seconds = time.monotonic() - start
        return replies | {rank: worker.hung(seconds) for rank, worker in hung.items()}


def _torchrun_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is pytest's: no port has to be guessed
        "TORCHELASTIC_RESTART_COUNT": "0",
        **(_shared_gpu(rank) if SHARES_GPU else {}),
    }


def _shared_gpu(rank: int) -> dict[str, str]:
    """Ranks of one GPU: NCCL refuses two of them on one node, so each is on a node of its own.

    CUDA_VISIBLE_DEVICES tells each rank that the GPU which it sees is its own.
    """
    return {"NCCL_HOSTID": f"node-of-{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def _rank_error(step: str, failures: dict[int, Failure], num_ranks: int) -> RankError:
    parts = [f"{len(failures)} of {num_ranks} ranks failed in the step '{step}'"]
    for rank, failure in failures.items():
        parts.append(f"---- rank {rank}: {failure.kind}: {failure.message}\n{failure.details}")
    named = {rank: (failure.kind, failure.message) for rank, failure in failures.items()}
    return RankError("\n".join(parts), [named.get(rank) for rank in range(num_ranks)])


# ------------------------------------------------------------------------------- tests that are run by ranks


def on_ranks(*numbers: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test whose body all ranks run, at each of these numbers of ranks.

        @on_ranks(1, 2)
        def test_mean(value):
            assert mean(value) == value

    The body returns nothing, or what is wrong. Parameters and fixtures are as in any test, and are pickled;
    `num_ranks` is one of them, by itself in a table of cases if there are no `numbers`.

    Args:
        numbers: of ranks, or `pytest.param`s of them.
        options: of `Ranks`, `timeout` or `process_group`.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        names = list(inspect.signature(body).parameters)

        @functools.wraps(body)
        def test(ranks: Ranks, num_ranks: int = numbers[0] if numbers else 0, **arguments: Any) -> None:
            if "num_ranks" in names:
                arguments["num_ranks"] = num_ranks
            wrong = ranks(num_ranks, _run_body, body.__module__, body.__name__, arguments, **options)
            assert not any(wrong), wrong

        own = ["num_ranks"] * (len(numbers) != 1) + [name for name in names if name != "num_ranks"]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # which pytest reads
            [inspect.Parameter(name, kind) for name in ("ranks", *own)]
        )
        return test if len(numbers) < 2 else pytest.mark.parametrize("num_ranks", numbers)(test)

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> Any:
    """On a rank; an assertion that fails shows the local variables around it."""
    try:
        return getattr(importlib.import_module(module), name).__wrapped__(**arguments)
    except (AssertionError, pytest.fail.Exception) as error:
        frames = traceback.TracebackException.from_exception(error, capture_locals=True).stack
        shown = [f"{key} = {value[:VALUE_CHARACTERS]}" for key, value in (frames[-1].locals or {}).items()]
        raise AssertionError("\n".join((str(error), *shown))) from error
