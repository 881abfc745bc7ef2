"""The experiments of benchmarks/asynchronous.py train as a single process that keeps a history of weights."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parallel.pipeline.asynchronous.test_reference import (
    MAKERS,
    METHODS,
    MICRO_BATCHES,
    batch_of,
    expected,
    model_of,
)
from zeroshard.parallel.pipeline.asynchronous.steady import steady
from zeroshard.parallel.pipeline.asynchronous.uses import WEIGHTS

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))  # its modules have bare names

from asynchronous_executor import Delays, Executor, Rule


def executed(num_stages, method, k, maker, numbers):
    model = model_of(num_stages)
    modules = [model[2 * rank : 2 * rank + 2] for rank in range(num_stages)]
    rule = Rule(
        weights=method["weights"],
        correction=method.get("correction", "none"),
        decay=method.get("d", 0.135),
        anneal_steps=method.get("anneal"),
    )
    executor = Executor(modules, MAKERS[maker], rule, nn.functional.mse_loss)
    losses = []
    for number in numbers:
        inputs, targets = (value.chunk(MICRO_BATCHES) for value in batch_of(number))
        batch = list(zip(inputs, targets, strict=True))
        log = executor.run(Delays(steady(num_stages, MICRO_BATCHES, k), rule.weights), batch.__getitem__)
        losses.append(sum(log.losses) / MICRO_BATCHES)
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_the_experiments_train_as_the_history_of_weights_says(name, num_stages):
    _, method, k, maker = METHODS[name]
    k = k or num_stages
    want_losses, want, _ = expected(num_stages, method, k, maker, numbers=(0, 1))
    losses, parameters = executed(num_stages, method, k, maker, numbers=(0, 1))
    assert losses == pytest.approx(want_losses, rel=1e-12)
    for key, value in parameters.items():
        torch.testing.assert_close(value, want[key], rtol=0, atol=1e-12, msg=key)


def test_all_weights_are_tried():
    assert {method["weights"] for _, method, _, _ in METHODS.values()} == WEIGHTS.keys()
