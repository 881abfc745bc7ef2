"""The engine's threads that issue work: what they run is noted, and ordered with whoever waits for it.

Work begins after all that its giver had waited for. Whoever waits for work comes after all that the work
waited for and did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from torch import Tensor

from tests.pretend.clocks import Clock
from tests.pretend.trace import Trace, TraceMode
from zeroshard.sharding import landing
from zeroshard.stepping import early


def install_threads(patch: pytest.MonkeyPatch, trace: Trace) -> None:
    """Note the work of `stepping/early.py`, and the order that a count of references gives to landings."""
    ends: WeakKeyDictionary[Future[Any], Clock] = WeakKeyDictionary()

    class Noted(ThreadPoolExecutor):
        def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            before, after = Clock(trace.timeline.host), Clock()

            def run() -> Any:
                trace.timeline.host.join(before)
                try:
                    with TraceMode(trace):
                        return work(*args, **kwargs)
                finally:
                    after.join(trace.timeline.host)

            future = super().submit(run)
            ends[future] = after
            return future

    def wait(futures: Iterable[Future[Any]]) -> None:
        for future in futures:
            wait_for((future,))
            trace.timeline.host.join(ends[future])

    count_views = landing.count_views

    def counted(memory: Tensor) -> int:
        num = count_views(memory)
        if num == 1:  # whoever has read it let it go after that
            trace.join_hosts(memory)
        return num

    patch.setattr(early, "ThreadPoolExecutor", Noted)
    patch.setattr(early, "wait", wait)
    patch.setattr(landing, "count_views", counted)
