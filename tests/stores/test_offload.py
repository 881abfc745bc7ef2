"""A run whose main parameters and states lie in files has the bits of the run on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from tests.checkpoint import runs
from tests.distributed.training import SOME_STAGES
from tests.ranks import on_ranks
from tests.stores.tiers import BF16_MAIN, OPTIMIZERS, WAYS, WAYS_AT_3, compare, offload

FIRST_OPTIMIZERS = {"fused", "8-bit", "LAMB", "replacing"}
"""The optimizers of make test; make test-all has the others too."""


@on_ranks(2, timeout=300)
@runs.without_numba
def test_each_optimizer_steps_in_files_as_on_the_device(tmp_path):
    found = []
    for stage in SOME_STAGES:
        for name, make in OPTIMIZERS.items():
            if len(SOME_STAGES) > 1 or name in FIRST_OPTIMIZERS:
                config = {"stage": stage} | (BF16_MAIN if name == "8-bit" else {})
                found += compare(f"{name}, stage {stage}", config, tmp_path, make, in_files=True)
    return found


@pytest.mark.long_where(num_ranks=[1])
@on_ranks(1, 2, timeout=300)
def test_each_way_of_training_gives_the_same_bits(tmp_path):
    found = []
    for stage in SOME_STAGES:
        for name, (config, options) in (WAYS | (WAYS_AT_3 if stage == 3 else {})).items():
            found += compare(f"{name}, stage {stage}", {"stage": stage, **config}, tmp_path, **options)
    return found


class Unknown(torch.optim.AdamW):
    """A class that nobody knows: it may keep tensors of its own."""


@pytest.mark.filterwarnings("ignore:Unknown is not known to zeroshard")
@pytest.mark.parametrize("tier", [{}, {"parameters": "nvme"}])
def test_an_optimizer_that_nobody_knows_is_refused_where_values_lie_in_files(tmp_path, tier):
    model = runs.build()
    with pytest.raises(ValueError, match=r"expected an optimizer of torch.*got Unknown of .*optimizer='cpu'"):
        zeroshard.initialize(model, Unknown(model.parameters()), offload(tmp_path, **tier))


@runs.without_numba
def test_states_that_went_into_files_keep_no_memory_as_the_base_of_a_view(tmp_path):
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8))
    optimizer = zeroshard.optim.AdamW8bit(model.parameters(), lr=1e-3)
    engine = zeroshard.initialize(model, optimizer, offload(tmp_path)).engine
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    codes = [value for value in states if value.dtype == torch.uint8]
    memory = engine._runtime.context.memory
    assert len(codes) == 2
    assert all(map(memory.is_in_files, states))
    assert all(value._base is None or memory.is_in_files(value._base) for value in states)
    engine.close()
