"""The experiments of benchmarks/asynchronous.py train as a single process that keeps a history of weights."""

import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.parallel.pipeline.asynchronous.runs import MAKERS, METHODS, batch_of, expected, method_of, model_of
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.asynchronous.ages import WEIGHTS
from zeroshard.parallel.pipeline.schedules import steady
from zeroshard.parallel.pipeline.simulate import ActionCosts, simulate

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))  # its modules have bare names

from asynchronous import Case, scaled, train
from asynchronous_executor import Delays, Executor, Rule
from pipeline_jobs import Sleepers


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
    want_losses, want, _ = expected(4, method, maker, (0, 1), 30)
    losses, parameters = executed(4, method, maker, (0, 1), 30)
    assert losses == pytest.approx(want_losses, rel=1e-12)
    for key, value in parameters.items():
        torch.testing.assert_close(value, want[key], rtol=0, atol=1e-12, msg=key)


def test_all_weights_are_tried():
    assert {method.weights for _, method, _ in METHODS.values()} == WEIGHTS.keys()


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


# ------------------------------------------------------------------------------------------ throughput


@pytest.mark.long
@on_ranks(2)
def test_no_rank_idles_between_steps():
    """The time of a list is that of its actions; with a drain at each step it would be 1.8 times that.

    The blocks sleep, so ranks need no cores of their own.
    """
    num, block_s, times = 8, 0.02, []
    job, pipeline = Sleepers(block_s, 2, num), {"schedule": "pipedream", "num_microbatches": num}
    config = {"stage": 0, "mesh": {"pp": 2}, "pipeline": pipeline | {"balance": "memory"}}
    engine = zeroshard.initialize(job.model(), torch.optim.AdamW, config, loss_fn=job.loss).engine
    for number in range(3):
        start = time.monotonic()
        engine.train_batch(*job.batch(number))
        times.append(time.monotonic() - start)
    engine.close(restore=False)
    want = block_s * simulate(steady(2, num), ActionCosts()).makespan  # a backward has two halves
    assert min(times[1:]) < 1.4 * want  # the messages of the first list say their shapes
