"""A store, an exchange and a schedule, written with docs/extending.md alone, of at most 60 lines each."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.ranks import on_ranks
from zeroshard import Config, Mesh, Pipeline
from zeroshard.parallel.pipeline.actions import Action, Schedule, backward, forward, frozen, loop
from zeroshard.parallel.pipeline.simulate import count_activations, simulate
from zeroshard.plan import placement
from zeroshard.plan.exchange import Collective, exchanges

NUM_UNITS, NUM_MICRO_BATCHES = 4, 4


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(NUM_UNITS)))


def loss_of(model: Any) -> Tensor:
    torch.manual_seed(1)
    loss: Tensor = model(torch.randn(8, 64)).square().mean()
    return loss


def engine_of(config: dict[str, Any]) -> Any:
    return zeroshard.initialize(build_model(), torch.optim.AdamW, config).engine


# ---------------------------------------------------------------------------------------------- a store


class InFile:
    """Weights in a file, which are read for each gather."""

    def __init__(self, path: Path, values: Tensor) -> None:
        self.path, self.dtype, self.size = path, values.dtype, values.numel()
        path.write_bytes(values.numpy().tobytes())
        self.num_loads = 0

    @property
    def version(self) -> Any:
        return self.path, self.path.stat().st_mtime_ns

    def load(self, out: Tensor) -> None:
        self.num_loads += 1
        out.copy_(torch.from_file(str(self.path), size=self.size, dtype=self.dtype))


@on_ranks(2)
def test_units_gather_weights_of_another_store(tmp_path: Path) -> None:
    """The losses before a step, with the weights from before it and with those after it."""
    engine, stores = engine_of({"stage": 3}), {}
    for buffer in engine._runtime.buffers:
        name = f"{buffer.unit_name}.{engine.global_rank}"
        stores[buffer] = InFile(tmp_path / name, buffer.main.detach())
    losses = [loss_of(engine)]
    engine.backward(losses[0])
    engine.step()
    for is_old in (True, False):
        for buffer, store in stores.items():
            buffer.store.use(store if is_old else None)
        with torch.no_grad():
            losses.append(loss_of(engine))
    engine.close(restore=False)
    before, old, new = (loss.item() for loss in losses)
    assert before == old != new
    assert {store.num_loads for store in stores.values()} == {1}


# ---------------------------------------------------------------------------------------------- an exchange


@on_ranks(2)
def test_exchanges_follow_from_a_row_of_placements() -> None:
    """Parameters are sharded from a backward to the next forward, and gradients once a step."""
    row = replace(placement.STAGES[3], kept={}, gradient=placement.SUMMANDS)
    (reduction,) = exchanges(row.gradient, row.optimizer, {placement.DP_SHARD: 2})
    assert reduction == (Collective.REDUCE_SCATTER, placement.DP_SHARD)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with mock.patch.object(placement, "STAGES", (*placement.STAGES[:3], row)):
        engine = engine_of({"stage": 3, "gradient_accumulation_steps": NUM_MICRO_BATCHES})
    for _ in range(NUM_MICRO_BATCHES):
        engine.backward(loss_of(engine))
        engine.step()
    report = engine.comm_report()
    calls = {one.value: report.calls[one.value] for one in Collective}
    engine.close()
    torch.testing.assert_close(list(engine.module.parameters()), list(model.parameters()))
    assert calls == {"all_gather": NUM_UNITS * NUM_MICRO_BATCHES, "reduce_scatter": NUM_UNITS}


# ---------------------------------------------------------------------------------------------- a schedule


def in_waves(num_ranks: int, num_microbatches: int, size: int) -> Schedule:
    """GPipe over some micro-batches at a time: it holds no more activations than a wave has."""
    lists: list[list[Action]] = [[] for _ in range(num_ranks)]
    for first in range(0, num_microbatches, size):
        wave = range(first, min(first + size, num_microbatches))
        for rank, actions in enumerate(lists):
            actions += [forward(rank, number) for number in wave]
            actions += [backward(rank, number) for number in wave]
    return Schedule(loop(num_ranks, 1), num_microbatches, frozen(lists))


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks(2)
def test_a_schedule_of_waves_trains_as_1f1b_does(size: int) -> None:
    schedule = in_waves(2, NUM_MICRO_BATCHES, size)
    assert count_activations(schedule).per_rank == (size, size)
    assert simulate(schedule).makespan > simulate(in_waves(2, NUM_MICRO_BATCHES, 4)).makespan
    found = []
    for each in (str(schedule), "1f1b"):
        pipeline = Pipeline(schedule=each, num_microbatches=NUM_MICRO_BATCHES, balance="memory")
        config = Config(stage=3, mesh=Mesh(pp=2), pipeline=pipeline)
        made = zeroshard.initialize(build_model(), torch.optim.AdamW, config, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(1)
        batches = [torch.randn(8, 64) for _ in range(3)]
        found.append([made.engine.train_batch(batch, batch).item() for batch in batches])
        made.engine.close(restore=False)
    waves, expected = found
    assert waves == expected


def test_each_of_them_has_at_most_60_lines() -> None:
    _, *parts = re.split(r"^# -{9,}", Path(__file__).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(parts) == 3
    assert max(len(part.splitlines()) for part in parts) <= 60
