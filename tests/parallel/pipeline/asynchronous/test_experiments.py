"""The experiments of benchmarks/asynchronous.py train as a single process that keeps a history of weights."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parallel.pipeline.asynchronous.runs import MAKERS, METHODS, batch_of, expected, method_of, model_of
from zeroshard.parallel.pipeline.schedules import steady

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))  # its modules have bare names

from asynchronous import Case, scaled, train
from asynchronous_executor import Delays, Executor, Rule


def executed(num_stages, method, maker, numbers, num):
    model = model_of(num_stages)
    modules = [model[2 * rank : 2 * rank + 2] for rank in range(num_stages)]
    keys = ("weights", "correction", "decay", "anneal_steps")
    rule = Rule(**{key: getattr(method, key) for key in keys})
    executor = Executor(modules, MAKERS[maker], rule, nn.functional.mse_loss)
    losses = []
    for number in numbers:
        batch = list(zip(*(value.chunk(num) for value in batch_of(number, num)), strict=True))
        log = executor.run(Delays(steady(num_stages, num, method.per_step), rule.weights), batch.__getitem__)
        losses.append(sum(log.losses) / num)
    return losses, dict(model.named_parameters())


@pytest.mark.long_where(name=[name for name in METHODS if name != "2bw"])
@pytest.mark.parametrize("name", METHODS)
def test_the_experiments_train_as_the_history_of_weights_says(name):
    _, method, maker = method_of(name, 4)
    want_losses, want, _ = expected(4, method, maker, (0, 1), 15)
    losses, parameters = executed(4, method, maker, (0, 1), 15)
    assert losses == pytest.approx(want_losses, rel=1e-12)
    for key, value in parameters.items():
        torch.testing.assert_close(value, want[key], rtol=0, atol=1e-12, msg=key)


def test_a_run_that_diverges_ends_and_tells_when():
    numbers = {"ranks": 2, "seed": 0, "lr": 1e4, "momentum": 0.9, "microbatches": 40}
    row = train(Case(task="text", method="pb", setting="large", **numbers))
    assert row["diverged_at"] is not None
    assert row["diverged_at"] < 40
    assert row["train_loss"] is None


def test_scaled_hyperparameters_change_as_much_in_as_many_samples():
    lr, momentum = scaled(0.1, 0.9, 8)
    assert momentum**8 == pytest.approx(0.9)
    assert 8 * lr / (1 - momentum) == pytest.approx(0.1 / (1 - 0.9))
