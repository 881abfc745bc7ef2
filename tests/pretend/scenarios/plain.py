"""Ordinary training: stages, dtypes, schedules, sharding in two dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from tests.pretend.scenario import Bench, add

BF16 = {"param_dtype": "bfloat16"}
BF16_MAIN = BF16 | {"main_dtype": "bfloat16"}
TWICE: Any = {"gradient_accumulation_steps": 2, "steps": 4}
READS_NORM = ("stepping/guard.py",)


def _gpt(bench: Bench) -> nn.Module:
    return bench.gpt()


def _add(
    name: str,
    model: Callable[[Bench], nn.Module] = _gpt,
    *,
    steps: int = 3,
    num_ranks: int = 2,
    may_sync: Iterable[str] = (),
    **config: Any,
) -> None:
    """A scenario that trains a language model."""

    def run(bench: Bench) -> None:
        bench.start(model(bench), **config)
        bench.train(steps)

    add(name, run, num_ranks=num_ranks, may_sync=may_sync)


for _stage in range(4):
    _add(f"stage{_stage}", stage=_stage)
    _add(f"stage{_stage}_bf16_clip", stage=_stage, precision=BF16, clip_grad_norm=1.0, **TWICE)
_add("stage3_recompute", stage=3, recompute="unit", precision=BF16)
_add("stage1_bf16_main", stage=1, precision=BF16_MAIN)
_add("stage3_bf16_main_accumulate", stage=3, precision=BF16_MAIN, **TWICE)
_add("stage3_fp16", stage=3, precision={"param_dtype": "float16"}, may_sync=READS_NORM)
_add("stage2_bf16_wire", stage=2, precision=BF16 | {"reduce_dtype": "bfloat16"})
_add("stage3_nonfinite", stage=3, nonfinite="skip", clip_grad_norm=1.0, may_sync=READS_NORM)


def _tower(bench: Bench) -> nn.Module:
    """Some blocks are frozen as a whole, and a part of another one."""
    model = bench.gpt(5)
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    model.blocks[3].mlp.requires_grad_(False)
    return model


NORMS = {"overrides": {"*norm*": "fp32"}}
_add("stage3_frozen", _tower, stage=3, frozen=["blocks.1", "mlp"], precision=BF16 | NORMS)
_add("stage3_tied", lambda bench: bench.gpt(tied=True), stage=3)
_add("stage3_prefetch0", lambda bench: bench.gpt(5), stage=3, num_prefetch=0)
_add("stage3_prefetch3", lambda bench: bench.gpt(5), stage=3, num_prefetch=3)
_add("stage3_keep", stage=3, reshard_after_forward=False)
_add("hybrid", num_ranks=4, stage=3, shard_group_size=2, precision=BF16, clip_grad_norm=1.0)
_add("hybrid_accumulate", num_ranks=4, stage=3, shard_group_size=2, precision=BF16, **TWICE)
_add("second_copy", num_ranks=4, stage=3, reshard_after_forward=2, precision=BF16)
_add("second_copy_recompute", num_ranks=4, stage=3, reshard_after_forward=2, recompute="unit", precision=BF16)
_add("one_rank", num_ranks=1, stage=3, precision=BF16, clip_grad_norm=1.0)
