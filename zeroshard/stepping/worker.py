"""One thread that takes the steps of units beside the backward, in the order in which they are handed over.

    backward   |-- unit 3 --|-- unit 2 --|-- unit 1 --|-- unit 0 --| finish
    worker                  |-- step 3 --|-- step 2 --|-- step 1 --|-- step 0 --|

The thread begins with the first unit. It ends with its owner, or at the end of the interpreter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event

MOST_UNDER_WAY = 2
"""Units that may be handed over and not stepped yet: one is stepped, one waits. So few gradients exist."""


class Worker:
    """Does work in a thread of its own, piece by piece. Nothing is begun after a piece has failed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-step")
        self._under_way: deque[Future[None]] = deque()
        self._failure = Event()
        """Set when a piece has failed; each run of pieces has its own, until `finish` or `abandon`."""

    def give(self, work: Callable[[], None]) -> Callable[[], None]:
        """Hand work over; wait for older work while too much of it is under way.

        Returns:
            A call that waits until the work is over, and raises nothing.

        Raises:
            BaseException: the error of earlier work, with its traceback.
        """
        while self._under_way and (len(self._under_way) >= MOST_UNDER_WAY or self._under_way[0].done()):
            self._await(self._under_way[0])
            self._under_way.popleft().result()
        future = self._thread.submit(_do, work, self._failure)
        self._under_way.append(future)
        return lambda: self._await(future)

    def finish(self) -> None:
        """Wait until all work is over.

        Raises:
            BaseException: the first error of the work, with its traceback.
        """
        try:
            for future in self._under_way:
                self._await(future)
        except BaseException:  # Ctrl-C: nobody may go on beside the thread
            self.abandon()
            raise
        done, self._under_way, self._failure = self._under_way, deque(), Event()
        for future in done:
            future.result()

    def abandon(self) -> None:
        """Leave out the work that has not begun, wait for the rest, and forget its errors."""
        self._failure.set()
        left, self._under_way, self._failure = self._under_way, deque(), Event()  # Ctrl-C may end the wait
        for future in left:
            self._await(future)

    def _await(self, future: Future[None]) -> None:
        wait((future,))


def _do(work: Callable[[], None], failure: Event) -> None:
    if failure.is_set():
        return
    try:
        work()
    except BaseException:
        failure.set()
        raise
