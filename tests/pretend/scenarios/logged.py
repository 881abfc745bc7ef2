"""Metrics of steps: the host waits for the device at a report, and at no other time."""

from __future__ import annotations

from collections.abc import Mapping

import zeroshard
from tests.pretend.scenario import Bench, add
from tests.pretend.scenarios.plain import BF16


class Kept(list[int]):
    """A target that keeps the steps."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.append(step)

    def close(self) -> None:
        pass


def _run(bench: Bench) -> None:
    engine, kept = bench.start(bench.gpt(), stage=3, precision=BF16, clip_grad_norm=1.0), Kept()
    with bench.trace.syncs_allowed():
        log = zeroshard.StepLog(engine, kept, every=2)
    for number in range(4):
        loss = bench.loss(number)
        engine.backward(loss)
        engine.step()
        if number % 2:
            with bench.trace.syncs_allowed():
                log.step(loss, num_tokens=10)
        else:
            log.step(loss, num_tokens=10)
    assert kept == ([2, 4] if engine.dp_rank == 0 else [])


add("log_stage3", _run)
