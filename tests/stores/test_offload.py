"""A run whose main parameters and states lie in files has the bits of the run on the device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.checkpoint import runs
from tests.stores.tiers import (
    BF16_MAIN,
    CHOSEN_STAGES,
    FILES,
    OPTIMIZERS,
    SOME,
    WAYS,
    Mixed,
    compare,
    edited,
    mixed,
    offload,
)

# ------------------------------------------------------------------------------------------------- the runs


FIRST_OPTIMIZERS = {"fused", "8-bit", "LAMB", "replacing"}
"""Those of make test; make test-all has the others too."""


@runs.without_numba
def optimizers(folder, stages):
    found = []
    for stage in stages:
        is_short = len(stages) == 1
        for name, make in OPTIMIZERS.items():
            if is_short and name not in FIRST_OPTIMIZERS:
                continue
            found += compare(f"{name}, stage {stage}", {"stage": stage}, folder, make, in_files=True)
        for name in ("8-bit",) if is_short else ("fused", "SGD", "8-bit", "replacing", "LAMB"):
            config = {"stage": stage, **BF16_MAIN}
            found += compare(f"{name}, bf16, stage {stage}", config, folder, OPTIMIZERS[name], in_files=True)
    return found


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_optimizer_steps_in_files_as_on_the_device(ranks, tmp_path, num_ranks):
    for found in ranks(num_ranks, optimizers, tmp_path, CHOSEN_STAGES, timeout=300):
        assert not found


class Unknown(torch.optim.AdamW):
    """A class that nobody knows: it may keep tensors of its own."""


@pytest.mark.filterwarnings("ignore:Unknown is not known to zeroshard")
@pytest.mark.parametrize("tier", [{}, {"parameters": "nvme"}])
def test_an_optimizer_that_nobody_knows_is_refused_where_values_lie_in_files(tmp_path, tier):
    model = runs.build()
    with pytest.raises(ValueError, match=r"expected an optimizer of torch.*got Unknown of .*optimizer='cpu'"):
        zeroshard.initialize(model, Unknown(model.parameters()), offload(tmp_path, **tier))


# --------------------------------------------------------------------------------------- ways of training


WAYS_AT_3 = {
    "parameters": ({}, {"tiers": (FILES, FILES | SOME, FILES | {"optimizer": "cpu"})}),
    "bf16 parameters": ({"precision": "bf16"}, {"tiers": (FILES,), "train": edited, "num_steps": 2}),
    "kept": ({"reshard_after_forward": False}, {"tiers": ({}, FILES)}),
    "recomputed": ({"recompute": "unit", "precision": "bf16"}, {"tiers": (FILES,)}),
    "mixed parameters": ({}, {"model": Mixed, "train": mixed, "tiers": (FILES,)}),
    "in backward": ({}, {"tiers": ({"step_in_backward": True}, FILES | {"step_in_backward": True})}),
}
GROUPED = {
    "hybrid": ({"shard_group_size": 2}, {"tiers": ({}, FILES)}),
    "second copy": ({"reshard_after_forward": 2, "precision": "bf16"}, {"tiers": ({}, FILES)}),
}


FIRST_WAYS = {"micro-batches", "bf16 main, edits", "mixed", "parameters", "in backward"}
"""Those of make test; make test-all has the others too."""


def ways(folder, stages):
    found = []
    for stage in stages:
        chosen = WAYS | (WAYS_AT_3 if stage == 3 else {})
        if stage == 3 and dist.get_world_size() == 4:
            chosen = chosen | GROUPED
        for name, (config, options) in chosen.items():
            if name not in FIRST_WAYS and len(stages) == 1:
                continue
            found += compare(f"{name}, stage {stage}", {"stage": stage, **config}, folder, **options)
    return found


@pytest.mark.long_where(num_ranks=[1, 4])
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_each_way_of_training_gives_the_same_bits(ranks, tmp_path, num_ranks):
    for found in ranks(num_ranks, ways, tmp_path, CHOSEN_STAGES, timeout=300):
        assert not found
