"""`config="auto"`: the ranks that are there are measured, and the model trains with what is found."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zeroshard
from tests.planning.models import llama
from tests.ranks import on_ranks
from zeroshard.planning import machine


@on_ranks(2)
def test_a_model_trains_with_the_config_that_is_found(num_ranks: int) -> None:
    machine._BYTES = 1 << 22  # copies that are quick
    model = llama(blocks=2, width=64, vocabulary=128)
    engine = zeroshard.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "auto").engine
    config = engine.config
    num_data = num_ranks // (config.mesh.tp * config.mesh.pp)
    assert config.mesh.tp == config.mesh.pp == 1  # nobody says that ranks get the same samples
    assert num_data * config.micro_batch_size * config.gradient_accumulation_steps == 8 * num_ranks
    tokens = torch.randint(128, (8, 16))
    losses = [engine.train_batch({"input_ids": tokens}, tokens).item() for _ in range(3)]
    assert losses[2] < losses[0]
    assert all(state["exp_avg"].dtype == torch.float32 for state in engine.optimizer.state.values())


@on_ranks(2)
def test_any_model_is_measured_with_its_samples(num_ranks: int) -> None:
    machine._BYTES = 1 << 22
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), *(nn.Linear(32, 32) for _ in range(4)))
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 32))
    engine, _, loader, _ = zeroshard.initialize(
        model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), "auto", training_data=data
    )
    assert loader is not None
    inputs, targets = next(iter(loader))
    loss = nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    assert engine.config.mesh.pp == 1


@on_ranks(1)
def test_what_cannot_be_measured_is_refused(num_ranks: int) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="config='auto': expected training_data, whose samples are measured"):
        zeroshard.initialize(model, None, "auto")
