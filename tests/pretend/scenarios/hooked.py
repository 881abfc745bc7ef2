"""Gradient hooks in the place of reductions, and the optimizer that exchanges signs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.pretend.scenario import Bench, add
from zeroshard.comm import collectives
from zeroshard.optim import OneBitAdam


def _mean(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """A hook that averages on the stream on which it is called, as an all-reduce of NCCL does."""
    flat = bucket.buffer().div_(2)
    collectives.dist.all_reduce(flat)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future


def _add(name: str, **config: Any) -> None:
    def run(bench: Bench) -> None:
        bench.start(bench.gpt(), given={"gradient_hook": (None, _mean)}, **config)
        bench.train(steps=4)

    add(name, run)


for _stage in (0, 1):
    _add(f"hook_stage{_stage}", stage=_stage)
_add("hook_accumulate", stage=1, gradient_accumulation_steps=2, precision={"param_dtype": "bfloat16"})
_add("hook_on_host", stage=1, offload={"optimizer": "cpu"})


def _one_bit(bench: Bench) -> None:
    bench.start(bench.gpt(), lambda ps: OneBitAdam(ps, freeze_step=2), stage=0)
    bench.train(steps=4)


# At the end of the warm-up it counts elements without a gradient.
add("one_bit_adam", _one_bit, may_sync=("optim/onebit.py",))
