"""Steps that exchange whole matrices, beside gathers and reductions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tests.parallel import runs
from tests.pretend.scenario import Bench, add
from tests.pretend.scenarios.divided import COMPARES
from tests.pretend.scenarios.plain import BF16, READS_NORM
from zeroshard.optim import Muon, muon_groups


def _add(name: str, *, num_ranks: int = 2, may_sync: Iterable[str] = (), **config: Any) -> None:
    """A scenario that trains a GPT with Muon."""

    def run(bench: Bench) -> None:
        model = bench.gpt()

        def muon(_: Iterable[nn.Parameter]) -> Optimizer:
            return Muon(muon_groups(model))

        if "nvme" in config.get("offload", {}).values():
            config["offload"]["nvme_path"] = str(bench.folder)
        bench.start(model, muon, **config)
        bench.train(steps=3)

    add(name, run, num_ranks=num_ranks, may_sync=may_sync)


def _divided(bench: Bench) -> None:
    model = runs.small_gpt(0).float()
    bench.start(model, Muon(muon_groups(model)), {"tp_plan": runs.PLAN}, mesh={"tp": 2}, stage=3)
    for number in range(3):
        bench.engine.backward(runs.loss_of(bench.engine, number).float())
        bench.engine.step()


for _stage in (0, 1, 3):
    _add(f"muon_stage{_stage}", stage=_stage)
_add("muon_hybrid", num_ranks=4, stage=3, shard_group_size=2, precision=BF16)
_add("muon_clipped", stage=2, clip_grad_norm=1.0, may_sync=READS_NORM)
_add("muon_on_host", stage=3, offload={"optimizer": "cpu"})
_add("muon_parameters_on_host", stage=3, offload={"optimizer": "cpu", "parameters": "cpu"}, precision=BF16)
_add("muon_in_files", stage=3, offload={"optimizer": "nvme"}, precision=BF16)
_add("muon_bf16_main", stage=3, precision={"main_dtype": "bf16", "param_dtype": "bf16"})
add("muon_tensor", _divided, may_sync=COMPARES)
