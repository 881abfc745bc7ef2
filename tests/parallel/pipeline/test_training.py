"""Models over pipeline ranks train as in one process.

Losses and parameters are compared within 1e-6, norms within 1e-6 relative, after four steps in float64; torch
computes norms of layers and rotary angles of these models in float32, whose rounding is 6e-8.
"""

import re

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.parallel.pipeline.runs import (
    BATCH,
    RECOMPUTED,
    adamw,
    agree,
    build,
    parameters_of,
    plain,
    run,
    start,
    tokens_of,
    train,
    train_plainly,
)
from tests.ranks import on_ranks

STEPS = range(4)


ONE_F = {"schedule": "1f1b", "num_microbatches": 4}
LAYOUTS = {
    "mixtral": (4, {"pp": 4}, {"schedule": "zb-h1", "num_microbatches": 4}, 0),
    "llama": (8, {"pp": 2, "tp": 2}, ONE_F | {"num_microbatches": 2}, 3),
}
"""Ranks, mesh, pipeline and stage, by model."""


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_trains_as_in_one_process(ranks, name):
    num_ranks, mesh, pipeline, stage = LAYOUTS[name]
    config = {"stage": stage, "mesh": mesh, "pipeline": pipeline}
    agree(ranks(num_ranks, run, name, config, STEPS), plain(name, STEPS))


def test_a_list_that_recomputes_the_last_chunk_too_counts_each_loss_once(ranks):
    pipeline = {"schedule": RECOMPUTED, "num_microbatches": 2}
    found = ranks(2, run, "tied llama", {"stage": 3, "mesh": {"pp": 2}, "pipeline": pipeline})
    agree(found, plain("tied llama", range(3)))


SCHEDULES = {"tied gpt": ["1f1b", "interleaved", "zb-h1", "varuna"], "llama": ["1f1b", "zbv"]}
"""ZBV adds up the gradients of tied parameters in another order."""


@pytest.mark.long_where(name=["llama"])
@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(2)
def test_all_synchronous_schedules_give_the_same_bits(name):
    found, everyone = [], [None] * dist.get_world_size()
    for schedule in SCHEDULES[name]:
        pipeline = {"schedule": schedule, "num_microbatches": 4}
        engine = start(name, {"mesh": {"pp": 2}, "pipeline": pipeline, "stage": 3}, adamw)
        numbers = train(engine, range(2))
        dist.all_gather_object(everyone, parameters_of(engine))  # ranks have other parts in each schedule
        found.append((numbers, {key: value for state in everyone for key, value in state.items()}))
        engine.close(restore=False)
    for (numbers, state), schedule in zip(found[1:], SCHEDULES[name][1:], strict=True):
        assert numbers == found[0][0], schedule
        assert state.keys() == found[0][1].keys()
        assert [key for key, value in state.items() if not torch.equal(value, found[0][1][key])] == []


# ----------------------------------------------------------------------------------------- evaluation


@on_ranks(2)
def test_evaluation_gives_the_loss_of_one_process_without_dropout():
    pipeline = {"schedule": "interleaved", "num_microbatches": 4}
    engine, model = start("tied gpt", {"mesh": {"pp": 2}, "pipeline": pipeline}), build("tied gpt")
    engine.module.transformer.drop = torch.nn.Dropout(0.5) if engine.module.transformer.drop else None
    for number in range(2):
        tokens = tokens_of(number)
        own = tokens.chunk(engine.dp_world_size)[engine.dp_rank]
        want = model(input_ids=tokens, labels=tokens).loss.item()
        assert engine.eval_batch({"input_ids": own}, own).item() == pytest.approx(want, rel=1e-6)
    assert all(module.training for module in engine.module.modules())
    assert all(parameter.grad is None for parameter in engine.parameters())


# --------------------------------------------------------------------------------------- number of batches


@on_ranks(2)
def test_batches_that_cannot_be_taken_are_refused_on_all_ranks_and_training_goes_on():
    """One that differs between ranks, and a short one, which takes fewer micro-batches."""
    engine, last = start("llama", {"mesh": {"pp": 2}, "pipeline": ONE_F}), tokens_of(3, rows=BATCH - 2)
    other = tokens_of(dist.get_rank(), rows=BATCH)
    with pytest.raises(RuntimeError, match=re.escape("pipeline ranks [0, 1] have different batches")):
        engine.train_batch({"input_ids": other}, other)
    losses, norms = train(engine, range(3))
    text = "expected a batch whose dim 0 is a multiple of pipeline.num_microbatches=4, got shape (6, 6)"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        engine.train_batch({"input_ids": last}, last)
    engine.set_gradient_accumulation_steps(1)  # one micro-batch, fewer than ranks
    losses.append(engine.train_batch({"input_ids": last}, last).item())
    batches = (({"input_ids": tokens}, tokens) for tokens in [*map(tokens_of, range(3)), last])
    model = build("llama")
    want, want_norms = train_plainly(model, batches, max_norm=0.5)
    found = losses, [*norms, engine.grad_norm.item()], parameters_of(engine)
    agree([found], (want, want_norms, dict(model.named_parameters())), whole=False)


# ------------------------------------------------------------------------------------- frozen parameters


def halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@on_ranks(2)
def test_a_rank_without_trained_parameters_takes_part():
    """With a schedule of the learning rate, which that rank has not."""

    def frozen():
        model = build("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("model.layers.3"))
        return model

    def make(parameters):
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05)

    made, model = [], frozen()

    def make_with_schedule(own):
        optimizer = make(own)
        made.append(halving(optimizer))
        return optimizer

    def batches():
        for number in range(3):
            yield {"input_ids": tokens_of(number)}, tokens_of(number)
            made[0].step()

    config = {"stage": 3, "mesh": {"pp": 2}, "pipeline": ONE_F | {"balance": "memory"}, "clip_grad_norm": 0.5}
    engine = zeroshard.initialize(frozen(), make, config, lr_scheduler=halving).engine
    found = (*train(engine, range(3)), parameters_of(engine))
    want = train_plainly(model, batches(), make=make_with_schedule, max_norm=0.5)
    agree([found], (*want, dict(model.named_parameters())), whole=False)
    assert engine.global_step == 3
