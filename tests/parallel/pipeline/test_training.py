"""Models over pipeline ranks train as in one process.

Losses and parameters are compared within 1e-6, norms within 1e-6 relative, after ten steps in float64; torch
computes norms of layers and rotary angles of these models in float32, whose rounding is 6e-8.
"""

import pytest
import torch

import zeroshard
from tests.parallel.pipeline.runs import (
    BATCH,
    RECOMPUTED,
    agree,
    build,
    compare_bits,
    parameters_of,
    plain,
    run,
    start,
    tokens_of,
    train,
    train_plainly,
)

STEPS = range(10)


ONE_F = {"schedule": "1f1b", "num_microbatches": 4}
LAYOUTS = {
    "pp 2": (2, {"pp": 2}, ONE_F),
    "pp 2 x dp 2, gpipe": (4, {"pp": 2}, {"schedule": "gpipe", "num_microbatches": 2}),
    "pp 4": (4, {"pp": 4}, {"schedule": "zb-h1", "num_microbatches": 4}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2}, {"schedule": "zbv", "num_microbatches": 4}),
    "2 x 2 x 2": (8, {"pp": 2, "tp": 2}, ONE_F | {"num_microbatches": 2}),
}
CASES = [
    *(("llama", "pp 2", 3), ("llama", "pp 2 x dp 2, gpipe", 3), ("llama", "pp 2 x tp 2", 1)),
    ("mixtral", "pp 4", 0),
    ("tied gpt", "2 x 2 x 2", 3),
]


@pytest.mark.parametrize(
    ("name", "layout", "stage"),
    [pytest.param(*c, marks=[pytest.mark.long] * (c != CASES[1])) for c in CASES],
)
def test_a_model_trains_as_in_one_process(ranks, name, layout, stage):
    num_ranks, mesh, pipeline = LAYOUTS[layout]
    config = {"stage": stage, "mesh": mesh, "pipeline": pipeline}
    agree(ranks(num_ranks, run, name, config, STEPS), plain(name, STEPS))


def test_a_list_that_recomputes_the_last_chunk_too_counts_each_loss_once(ranks):
    pipeline = {"schedule": RECOMPUTED, "num_microbatches": 2}
    found = ranks(2, run, "tied llama", {"stage": 3, "mesh": {"pp": 2}, "pipeline": pipeline})
    agree(found, plain("tied llama", range(3)))


def test_all_synchronous_schedules_give_the_same_bits(ranks):
    schedules = ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "varuna"]
    compare_bits(ranks, 2, "tied gpt", schedules, {"stage": 3})


@pytest.mark.long_where(num_ranks=[6])
@pytest.mark.parametrize(
    ("num_ranks", "precision"), [(2, {"main_dtype": "bf16"}), (6, {"reduce_dtype": "bf16"})]
)
def test_gradients_of_tied_parameters_are_rounded_alike_on_one_rank_and_on_two(ranks, num_ranks, precision):
    """ZBV has both on one rank. A third of a sum is scaled before it is rounded."""
    options = {"stage": 1, "precision": {"param_dtype": "bf16", **precision}}
    compare_bits(ranks, num_ranks, "tied llama", ["1f1b", "zbv"], options)


# ----------------------------------------------------------------------------------------- evaluation


def evaluated():
    pipeline = {"schedule": "interleaved", "num_microbatches": 4}
    engine = start("tied gpt", {"mesh": {"pp": 2}, "pipeline": pipeline})
    engine.module.transformer.drop = torch.nn.Dropout(0.5) if engine.module.transformer.drop else None
    losses = []
    for number in range(2):
        tokens = tokens_of(number).chunk(engine.dp_world_size)[engine.dp_rank]
        losses.append(engine.eval_batch({"input_ids": tokens}, tokens).item())
    assert all(module.training for module in engine.module.modules())
    assert all(parameter.grad is None for parameter in engine.parameters())
    return losses


def test_evaluation_gives_the_loss_of_one_process_without_dropout(ranks):
    model, want = build("tied gpt"), []
    for number in range(2):
        tokens = tokens_of(number)
        want.append(model(input_ids=tokens, labels=tokens).loss.item())
    for losses in ranks(4, evaluated):
        assert losses == pytest.approx(want, rel=1e-6)


# --------------------------------------------------------------------------------------- number of batches


def shorter():
    engine = start("llama", {"mesh": {"pp": 2}, "pipeline": ONE_F})
    train(engine, [0])
    message = ""
    tokens = tokens_of(1, rows=BATCH - 2)
    try:
        engine.train_batch({"input_ids": tokens}, tokens)
    except ValueError as error:
        message = str(error)
    engine.set_gradient_accumulation_steps(1)  # one micro-batch, fewer than ranks
    return message, engine.train_batch({"input_ids": tokens}, tokens).item()


def test_a_short_last_batch_is_refused_with_its_numbers_or_takes_fewer_micro_batches(ranks):
    model, last = build("llama"), tokens_of(1, rows=BATCH - 2)
    train_plainly(model, [({"input_ids": tokens_of(0)}, tokens_of(0))], max_norm=0.5)
    want = model(input_ids=last, labels=last).loss.item()
    for message, loss in ranks(2, shorter):
        assert message == (
            "expected a batch whose dim 0 is a multiple of pipeline.num_microbatches=4, got shape (6, 6)"
        )
        assert loss == pytest.approx(want, rel=1e-6)


def of_each_rank():
    engine = start("llama", {"stage": 3, "mesh": {"pp": 2}, "pipeline": ONE_F})
    rank = torch.distributed.get_rank()
    tokens = tokens_of(rank, rows=BATCH)
    with pytest.raises(RuntimeError) as caught:
        engine.train_batch({"input_ids": tokens}, tokens)
    return str(caught.value), (*train(engine, range(3)), parameters_of(engine))


def test_different_batches_are_refused_on_all_ranks_and_training_goes_on(ranks):
    messages, found = zip(*ranks(2, of_each_rank), strict=True)
    assert all("pipeline ranks [0, 1] have different batches" in message for message in messages)
    agree(found, plain("llama", range(3)))


# ------------------------------------------------------------------------------------- frozen parameters


def frozen(trained):
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))

    def make(parameters):
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05)

    pipeline = {"num_microbatches": 2, "balance": "memory"}
    config = {"stage": 3, "mesh": {"pp": 2}, "pipeline": pipeline, "clip_grad_norm": 0.5}
    given = zeroshard.initialize(model, make, config, lr_scheduler=halving)
    found = (*train(given.engine, range(3)), parameters_of(given.engine))
    assert given.engine.global_step == 3
    given.engine.close(restore=False)
    return found


def halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_a_rank_without_trained_parameters_takes_part(ranks):
    trained = "model.layers.3"
    model, losses, norms = build("llama"), [], []
    own = [p for name, p in model.named_parameters() if name.startswith(trained)]
    optimizer = torch.optim.SGD(own, lr=0.05)
    scheduler = halving(optimizer)
    for number in range(3):
        tokens = tokens_of(number)
        loss = model(input_ids=tokens, labels=tokens).loss
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(own, 0.5).item())
        optimizer.step()
        scheduler.step()
    agree(ranks(2, frozen, trained), (losses, norms, dict(model.named_parameters())))
