"""Training over pipeline ranks: messages in both directions beside gathers, reductions and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.pretend.scenario import Bench, add
from tests.pretend.scenarios.plain import BF16, READS_NORM
from tests.stepping.late import stepped_late

WIDTH, BATCH = 12, 8
COMPARES = ("pipeline/training.py", "parallel/random.py")
"""Pipeline ranks compare their batches at steps 1, 2, 4 and so on: their hosts wait for these. The number
that they draw before a batch is one of the CPU's generator."""


def _model(*, is_tied: bool) -> nn.Sequential:
    ends = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    if is_tied:
        ends[1].weight = ends[0].weight
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))
    return nn.Sequential(ends[0], *blocks, ends[1])


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).float().square().mean()


def _add(
    name: str,
    schedule: str = "1f1b",
    *,
    num_ranks: int = 2,
    pp: int = 2,
    is_tied: bool = False,
    lengths: tuple[int, ...] = (5, 3, 5),
    is_late: bool = False,
    **config: Any,
) -> None:
    """A scenario that trains on batches, some of other shapes, and evaluates.

    Args:
        is_late: True if units are stepped in the batch after a step.
    """

    def run(bench: Bench) -> None:
        pipeline = {"schedule": schedule, "num_microbatches": 4, "balance": "memory"}
        with bench.trace.syncs_allowed():
            model = _model(is_tied=is_tied)
        bench.start(model, given={"loss_fn": _loss}, mesh={"pp": pp}, pipeline=pipeline, **config)
        with stepped_late() as names:
            for number, length in enumerate(lengths):
                generator = torch.Generator().manual_seed(100 * number + bench.engine.dp_rank)
                batch = torch.randn(BATCH, length, WIDTH, generator=generator)
                bench.engine.train_batch(batch, batch)
            bench.engine.eval_batch(batch, batch)
        assert bool(names) is is_late

    # Gradients of tied parameters on the host are added up on the device.
    add(name, run, num_ranks=num_ranks, may_sync=(*COMPARES, *READS_NORM, "pipeline/shared.py"))


for _stage in (0, 3):
    _add(f"pipeline_stage{_stage}", stage=_stage, num_ranks=4, precision=BF16, clip_grad_norm=1.0)
for _schedule in ("interleaved", "zb-h1", "zbv", "varuna"):
    _add(f"pipeline_{_schedule.replace('-', '_')}", _schedule, stage=3, num_ranks=4, is_tied=True)
_add("pipeline_of_4", "1f1b", pp=4, num_ranks=4, stage=0, is_tied=True)
_add("pipeline_recompute", stage=3, num_ranks=4, recompute="unit", precision=BF16)
for _name, _schedule, _stage, _tiers in (
    ("host", "1f1b", 2, {}),
    ("late", "interleaved", 3, {}),
    ("chunks_late", "zbv", 3, {"parameters": "cpu"}),
):
    _add(
        f"pipeline_{_name}",
        _schedule,
        stage=_stage,
        num_ranks=4,
        offload={"optimizer": "cpu"} | _tiers,
        precision=BF16,
        is_tied=True,
        is_late=_stage == 3,
    )
for _schedule, _stage in (
    ("pipedream", 3),
    ("pipemare", 2),
    ("spectrain", 0),
    ("2bw", 3),
):
    _add(f"asynchronous_{_schedule}", _schedule, stage=_stage, num_ranks=4, precision=BF16)
_add("asynchronous_of_4", "pipedream", pp=4, num_ranks=4, stage=1)
# Without data-parallel ranks forwards are bare, and full parameters follow steps.
_add("asynchronous_alone", "pb", stage=1, precision=BF16)
_add("asynchronous_alone_moved", "spectrain", stage=3, precision=BF16)
_add("asynchronous_newest_host", "pb", num_ranks=4, stage=2, offload={"optimizer": "cpu"}, precision=BF16)
