"""Moving averages, updated after steps and shown with gathers under way; outer steps of replicas."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import zeroshard
from tests.pretend.scenario import Bench, add, scenario
from tests.pretend.scenarios.plain import BF16


def _train(bench: Bench, stage: int, offload: dict[str, Any]) -> list[Tensor]:
    """Evaluate averages between steps; return them, and the trained values at the end."""
    torch.manual_seed(1)
    tiers = offload | ({"nvme_path": str(bench.folder)} if "nvme" in offload.values() else {})
    engine = bench.start(bench.gpt(), stage=stage, precision=BF16, offload=tiers)
    with bench.trace.syncs_allowed():
        ema = zeroshard.EMA(engine, 0.5)
    for number in range(3):
        bench.train(2, number)
        with ema.applied():
            bench.evaluate()
    with bench.trace.syncs_allowed(), ema.applied():
        shown = list(engine.full_state_dict().values())
    with bench.trace.syncs_allowed():
        return shown + list(engine.full_state_dict().values())


def _add(stage: int, offload: dict[str, Any]) -> None:
    def run(bench: Bench) -> None:
        bench.compare_later(_train(bench, stage, offload), lambda: _train(bench, stage, {}))

    tier = {"cpu": "_on_host", "nvme": "_in_files"}.get(offload.get("optimizer", ""), "")
    add(f"ema_stage{stage}{tier}", run, may_sync=("stores/store.py",) if tier == "_in_files" else ())


_add(1, {})
_add(3, {})
_add(3, {"optimizer": "cpu"})
_add(3, {"optimizer": "nvme"})


@scenario()
def ema_edited_on_host(bench: Bench) -> None:
    """Main parameters on the host are edited right after a step, whose averages still read them."""

    def values(tiers: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(1)
        engine = bench.start(bench.gpt(), stage=3, offload=tiers)
        with bench.trace.syncs_allowed():
            averages = [zeroshard.EMA(engine, 0.5, name="slow"), zeroshard.EMA(engine, 0.25, name="fast")]
        for number in range(3):
            bench.train(1, number)
            with bench.trace.syncs_allowed(), torch.no_grad():
                for parameter in engine.parameters():
                    parameter.mul_(1.01)
        found: list[Tensor] = []
        with bench.trace.syncs_allowed():
            for average in averages:
                with average.applied():
                    found += engine.full_state_dict().values()
        return found

    bench.compare_later(values({"optimizer": "cpu", "parameters": "cpu"}), lambda: values({}))


def _replicas(name: str, num_ranks: int, **config: Any) -> None:
    """Two replicas, whose values travel during the next local step."""

    def values(bench: Bench, *, offload: bool, tiers: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(1)
        policy = zeroshard.OuterStep.diloco(every=4, fragments=2, delay=1, keep_local=0.5, offload=offload)
        engine = bench.start(
            bench.gpt(), given={"outer_step": policy}, precision=BF16, offload=tiers, **config
        )
        bench.train(6)
        with bench.trace.syncs_allowed():
            return list(engine.full_state_dict().values())

    def run(bench: Bench) -> None:
        found = values(bench, offload=True, tiers={"optimizer": "cpu"})
        bench.compare_later(found, lambda: values(bench, offload=False, tiers={}))

    add(name, run, num_ranks=num_ranks, may_sync=())


_replicas("outer_step", 2, stage=3)
_replicas("outer_step_of_groups", 4, stage=2, shard_group_size=2)


def _add_dropped(name: str, end: Callable[[zeroshard.Engine], None]) -> None:
    """An engine ends while the last averages are copied to the host, whose memory goes then."""

    def run(bench: Bench) -> None:
        engine = bench.start(bench.gpt(), stage=3, precision=BF16, offload={"optimizer": "cpu"})
        with bench.trace.syncs_allowed():
            zeroshard.EMA(engine, 0.5)
        bench.train(2, 0)
        with bench.trace.syncs_allowed():
            next(iter(engine.parameters())).norm().item()  # so no step waits
            end(engine)
            bench.engine = None
            del engine
            gc.collect()

    add(name, run)


_add_dropped("ema_dropped", lambda _: None)
_add_dropped("ema_closed", lambda engine: engine.close())
