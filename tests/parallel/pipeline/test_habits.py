"""Habits of users, and models other than language models, over pipeline ranks.

Sums over micro-batches are taken in another order than in one process, which is 1e-15 of a value in float64.
Under autocast a product is rounded to bfloat16, 2^-8 of it, and float32 sums in another order may round to
the other side.
"""

import copy
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.distributed.training import refused
from tests.parallel.pipeline.runs import (
    LENGTH,
    agree,
    build,
    language_loss,
    mixtral,
    pair_of,
    parameters_of,
    sgd,
    start,
    tokens_of,
    train_plainly,
)
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.chunked import Chunked, outline_of

WIDTH, BATCH, STEPS = 6, 8, 2
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2, "balance": "memory"}}


def one_block():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(block, block, block, block).double()


batch = partial(pair_of, BATCH, WIDTH)


# ------------------------------------------------------------------------------------------ refusals


@on_ranks(2)
def test_calls_that_a_part_cannot_serve_are_refused_on_all_ranks_and_training_goes_on():
    engine, tokens = start("llama", PIPELINE), tokens_of(0)
    part = "() with mesh.pp above 1: each rank has a part of the model"
    given, loss = {"input_ids": tokens, "output_attentions": True}, torch.ones((), requires_grad=True)
    for call, args, text in (
        (engine.backward, [loss], f"backward{part}"),
        (engine.step, [], f"step{part}"),
        (
            engine.train_batch,
            [(tokens,) * 40, tokens],
            "expected inputs as the forward of the model has them: ",
        ),
        (engine.train_batch, [given, tokens], "mesh.pp: expected output_attentions=False, got True"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"^{re.escape(text)}"):
            call(*args)
    loss = engine.train_batch({"input_ids": tokens, "return_dict": True}, tokens).item()
    assert loss == pytest.approx(build("llama")(input_ids=tokens, labels=tokens).loss.item(), rel=1e-6)
    engine.close(restore=False)
    evaluating = zeroshard.initialize(build("llama"), None, engine.config).engine
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^train_batch\(\) needs an optimizer"):
            evaluating.train_batch({"input_ids": tokens}, tokens)
    part = evaluating.module
    evaluating.close()
    with pytest.raises(ValueError, match=r"^mesh\.pp=2: expected a whole model, got a part of one"):
        zeroshard.initialize(part, sgd, PIPELINE)
    with pytest.raises(ValueError, match=r"of one chunk, got '0\.0\.weight', which chunks 0, 1 share"):
        zeroshard.initialize(one_block(), sgd, PIPELINE | {"ignored": ["*.0.weight"]})


class Pair(nn.Linear):
    def forward(self, value):
        return super().forward(value), value


class Detached(nn.Linear):
    def forward(self, value):
        return super().forward(value.detach())


def loss_with_shape(output, targets):
    return F.mse_loss(output, targets).view(1)


UNFIT = {
    "chunk 0: expected a tensor as output, got tuple": (Pair, nn.Linear, F.mse_loss, 0),
    "chunk 1: expected a gradient of its input, got none": (nn.Linear, Detached, F.mse_loss, 1),
    "expected a loss of shape [], got [1]": (nn.Linear, nn.Linear, loss_with_shape, 1),
}
"""By error: the layers of both ranks, the loss, and the rank."""


@pytest.mark.long_where(text=[next(iter(UNFIT))])
@pytest.mark.parametrize("text", UNFIT)
@on_ranks(2)
def test_what_a_chunk_cannot_give_is_an_error_where_it_is_computed(text):
    first, last, loss_fn, rank = UNFIT[text]
    model = nn.Sequential(first(WIDTH, WIDTH), last(WIDTH, WIDTH)).double()
    engine = zeroshard.initialize(model, sgd, PIPELINE | {"watchdog_s": 0.5}, loss_fn=loss_fn).engine
    message = refused(engine.train_batch, *batch(0))
    assert (text in message) == (torch.distributed.get_rank() == rank)


def decaying(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.1, weight_decay=0.5)


def loss_of_some(output, targets):
    return F.mse_loss(output, targets) if targets[0, 0] < 0 else torch.zeros((), requires_grad=True)


@pytest.mark.parametrize(
    ("schedule", "last", "loss_fn"),
    [("1f1b", Detached, F.mse_loss), ("varuna", Detached, F.mse_loss), ("1f1b", nn.Linear, loss_of_some)],
)
@on_ranks(2)
def test_frozen_modules_and_micro_batches_without_a_loss_need_no_gradient_of_an_input(
    schedule, last, loss_fn
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), last(WIDTH, WIDTH)).double()
    model[0].requires_grad_(last is not Detached)
    part, (x, y) = copy.deepcopy(model), batch(0)
    y[0, 0], y[BATCH // 2, 0] = 1.0, -1.0
    config = PIPELINE | {"pipeline": PIPELINE["pipeline"] | {"schedule": schedule}}
    engine = zeroshard.initialize(part, decaying, config, loss_fn=loss_fn).engine
    losses = [engine.train_batch(x, y).item() for _ in range(STEPS)]
    batches = [(x, y)] * STEPS
    want, _ = train_plainly(model, batches, lambda model, x, y: loss_fn(model(x), y), decaying, num=2)
    parameters = dict(model.named_parameters())
    agree([(losses, [], parameters_of(engine))], (want, [], parameters), whole=False)


# ------------------------------------------------------------------------------------ as in one process


def freeze_in_turns(model, number):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(number % 2 == 0 or "layers.3" in name)


def turn_on_checkpoints(model, number):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()


def leave(model, number):
    pass


HABITS = {
    "frozen in turns": (freeze_in_turns, {"clip_grad_norm": 0.5}),
    "checkpoints": (turn_on_checkpoints, {}),
    "ignored": (leave, {"ignored": ["*input_layernorm*"]}),
    "autocast": (leave, {}),
}
"""What is done before each batch, and the config."""


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.long_where(habit=["checkpoints", "ignored"])
@pytest.mark.parametrize("habit", HABITS)
@on_ranks(2)
def test_habits_give_what_they_give_in_one_process(habit):
    change, config = HABITS[habit]
    model, part = build("llama"), build("llama")
    if is_rounded := habit == "autocast":
        model, part = model.float(), part.float()
    engine = start(part, {"clip_grad_norm": None, **PIPELINE, **config})

    def inside():
        return torch.autocast("cpu", torch.bfloat16) if is_rounded else nullcontext()

    def loss_of(model, inputs, labels):
        with inside():
            return language_loss(model, inputs, labels)

    def batches():
        for number in range(STEPS):
            change(model, number)
            yield {"input_ids": tokens_of(number)}, tokens_of(number)

    losses = []
    for number in range(STEPS):
        change(engine.module, number)
        with inside():
            losses.append(engine.train_batch({"input_ids": tokens_of(number)}, tokens_of(number)).item())
    want, _ = train_plainly(model, batches(), loss_of, num=2, max_norm=config.get("clip_grad_norm"))
    apart = {"rel": 2e-3, "absolute": 2e-3} if is_rounded else {}
    parameters = dict(model.named_parameters())
    agree([(losses, [], parameters_of(engine))], (want, [], parameters), **apart, whole=False)
    engine.close(restore=False)


@on_ranks(2)
def test_arguments_of_the_head_reach_the_last_chunk_alone_and_names_of_one_part_are_no_error():
    def loss_fn(output, targets):
        return F.cross_entropy(output.logits.flatten(0, 1), targets[:, -2:].flatten())

    options = {"ignored": ["*.norm.weight"], "units": ["LlamaDecoderLayer", "Embedding"]}
    tokens, given = tokens_of(0), {"input_ids": tokens_of(0), "logits_to_keep": 2}
    engine = zeroshard.initialize(build("llama"), sgd, PIPELINE | options, loss_fn=loss_fn).engine
    loss = engine.train_batch(given, tokens).item()
    assert loss == pytest.approx(loss_fn(build("llama")(**given), tokens).item(), rel=1e-6)
    names = [unit.name for unit in engine.units]
    assert ("model.embed_tokens" in names) == (torch.distributed.get_rank() == 0)
    assert engine.config.ignored == ("*.norm.weight",)


# ------------------------------------------------------------------------------- arguments and loaders


def padded(number, rows=8):
    """Rows of several lengths, padded on the left; and their labels."""
    tokens = tokens_of(number, rows)
    mask = torch.ones_like(tokens)
    lengths = torch.randint(2, LENGTH + 1, (rows,), generator=torch.Generator().manual_seed(number))
    for row, length in enumerate(lengths.tolist()):
        mask[row, : LENGTH - length] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": places}
    return inputs, tokens.masked_fill(mask == 0, -100)


@pytest.mark.long_where(name=["tied gpt"])
@pytest.mark.parametrize(("name", "schedule", "stage"), [("llama", "zbv", 0), ("tied gpt", "1f1b", 3)])
@on_ranks(2)
def test_masks_and_places_reach_every_chunk(name, schedule, stage):
    """Micro-batches count other numbers of tokens."""
    want, _ = train_plainly(build(name), map(padded, range(STEPS)), num=4, max_norm=0.5)
    pipeline = {"schedule": schedule, "num_microbatches": 4}
    engine = start(name, {"stage": stage, "mesh": {"pp": 2}, "pipeline": pipeline})
    losses = [engine.train_batch(*padded(number)).item() for number in range(STEPS)]
    assert losses == pytest.approx(want, rel=1e-6)


def test_losses_of_routers_are_refused():
    """Each rank would count the routers of its own layers alone."""
    text = "^mesh.pp: expected output_router_logits=False, got True"
    with pytest.raises(ValueError, match=text):
        outline_of(mixtral(output_router_logits=True))
    with pytest.raises(ValueError, match=text):
        Chunked.check({"output_router_logits": True})


def collated(samples):
    """A batch with an argument that is no tensor, and that all micro-batches get."""
    return torch.utils.data.default_collate(samples) | {"use_cache": False}


@on_ranks(2)
def test_the_loader_makes_whole_batches_for_a_pipeline():
    """By a collator of the user's."""
    config, model = PIPELINE | {"micro_batch_size": 4}, build("llama")
    data = [{"input_ids": row, "labels": row} for row in tokens_of(0, rows=16)]
    given = zeroshard.initialize(build("llama"), sgd, config, training_data=data, collate_fn=collated)
    batches = list(given.dataloader)
    assert len(batches) == 2
    for made in batches:
        rows = made["input_ids"]
        assert len(rows) == 8  # 2 micro-batches of 4 rows
        want = model(input_ids=rows, labels=rows).loss.item()
        assert given.engine.eval_batch(made).item() == pytest.approx(want, rel=1e-6)
    given.engine.close(restore=False)


# ----------------------------------------------------------------------- shared, and unused on some ranks


class Sometimes(nn.Linear):
    """A layer that a rank may leave out."""

    is_used = True

    def forward(self, value):
        return super().forward(value) if self.is_used else value


def with_ends():
    torch.manual_seed(3)
    ends = [Sometimes(WIDTH, WIDTH, bias=False) for _ in range(2)]
    ends[1].weight = ends[0].weight
    inner = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
    return nn.Sequential(ends[0], *inner, ends[1]).double()


@on_ranks(4)
def test_a_shared_parameter_may_be_left_out_by_a_data_parallel_rank():
    model, part, losses = with_ends(), with_ends(), []
    last, config = part[3], PIPELINE | {"stage": 1, "pipeline": PIPELINE["pipeline"] | {"schedule": "zbv"}}
    engine = zeroshard.initialize(part, sgd, config, loss_fn=F.mse_loss).engine
    last.is_used = engine.dp_rank == 0

    def loss_of(model, x, y):
        found = []
        for rank, place in ((0, slice(4)), (1, slice(4, 8))):
            model[3].is_used = rank == 0
            found.append(F.mse_loss(model(x[place]), y[place]))
        return sum(found) / 2

    for number in range(STEPS):
        x, y = (value.chunk(2)[engine.dp_rank] for value in batch(number))
        losses.append(engine.train_batch(x, y).item())
    want, _ = train_plainly(model, map(batch, range(STEPS)), loss_of)
    assert losses == pytest.approx(want, rel=1e-6)
