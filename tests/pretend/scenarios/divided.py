"""Training with layers that are divided over tensor ranks."""

from __future__ import annotations

from typing import Any

from tests.parallel import runs, sequences
from tests.pretend.scenario import Bench, add
from tests.pretend.scenarios.plain import BF16, READS_NORM

COMPARES = ("tensor/layers.py", "tensor/replicas.py", "tensor/losses.py")
"""Tensor ranks compare values at steps 1, 2, 4 and so on: their hosts wait for these. Tokens on a CPU are
checked, and all tensors of the pretend device are there."""


def _add(name: str, *, num_ranks: int = 2, sequence: bool = False, **config: Any) -> None:
    """A scenario that trains a model on two tensor ranks."""

    def run(bench: Bench) -> None:
        of: Any = sequences if sequence else runs
        model = (sequences.model_of(sequences.Model) if sequence else runs.small_gpt(0)).float()
        bench.start(model, given={"tp_plan": of.PLAN}, mesh={"tp": 2}, **config)
        size = of.BATCH // bench.engine.dp_world_size
        own = slice(bench.engine.dp_rank * size, (bench.engine.dp_rank + 1) * size)
        for number in range(3):
            bench.engine.backward(of.loss_of(bench.engine, number, own).float())
            bench.engine.step()

    add(name, run, num_ranks=num_ranks, may_sync=(*COMPARES, *READS_NORM))


for _stage in (1, 3):
    _add(f"tensor_stage{_stage}", stage=_stage)
for _stage in (0, 3):
    _add(f"tensor_stage{_stage}_bf16", stage=_stage, num_ranks=4, precision=BF16, clip_grad_norm=1.0)
_add("tensor_sequence", stage=3, sequence=True, precision=BF16)
_add("tensor_sequence_recompute", stage=1, sequence=True, recompute="unit")
_add("tensor_host", stage=2, num_ranks=4, offload={"optimizer": "cpu"}, precision=BF16)
