"""Habits of users, and models other than language models, over pipeline ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import build, sgd, start, tokens_of

WIDTH, BATCH, STEPS = 6, 8, 3


def one_block():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(block, block, block, block)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


# ------------------------------------------------------------------------------------------ refusals


def message_of(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def refusals():
    engine = start("llama", {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}})
    tokens, loss = tokens_of(0), torch.ones((), requires_grad=True)
    found = {
        "backward": message_of(RuntimeError, lambda: engine.backward(loss)),
        "step": message_of(RuntimeError, engine.step),
        "name": message_of(ValueError, lambda: engine.train_batch((tokens,) * 40, tokens)),
        "output": message_of(
            ValueError, lambda: engine.train_batch({"input_ids": tokens, "output_attentions": True}, tokens)
        ),
    }
    found["loss"] = engine.train_batch({"input_ids": tokens, "return_dict": True}, tokens).item()
    engine.close(restore=False)
    evaluating = zeroshard.initialize(build("llama"), None, engine.config).engine
    call = lambda: evaluating.train_batch({"input_ids": tokens}, tokens)  # noqa: E731
    found["optimizer"] = [message_of(RuntimeError, call) for _ in range(2)]
    part, config = evaluating.module, {"mesh": {"pp": 2}, "pipeline": {"balance": "memory"}}
    evaluating.close()
    found["part"] = message_of(ValueError, lambda: zeroshard.initialize(part, sgd, config))
    config["ignored"] = ["*.0.weight"]
    shared = one_block().double()
    found["shared"] = message_of(ValueError, lambda: zeroshard.initialize(shared, sgd, config))
    return found


def test_calls_that_a_part_cannot_serve_are_refused_on_all_ranks_and_training_goes_on(ranks):
    model, tokens = build("llama"), tokens_of(0)
    want = model(input_ids=tokens, labels=tokens).loss.item()
    for found in ranks(2, refusals):
        for call in ("backward", "step"):
            assert found[call].startswith(f"{call}() with mesh.pp=2: each rank has a part of the model")
        assert found["name"].startswith("expected inputs as the forward of the model has them: too many")
        assert found["output"].startswith("mesh.pp: expected output_attentions=False, got True")
        assert found["loss"] == pytest.approx(want, rel=1e-6)
        assert all(message.startswith("train_batch() needs an optimizer") for message in found["optimizer"])
        assert found["part"].startswith("mesh.pp=2: expected a whole model, got a part of one")
        assert "a parameter of one chunk, got '0.0.weight', which chunks 0, 1 share" in found["shared"]


def last_tokens():
    def loss_fn(output, targets):
        return F.cross_entropy(output.logits.flatten(0, 1), targets[:, -2:].flatten())

    pipeline = {"num_microbatches": 2, "balance": "memory"}
    config = {"mesh": {"pp": 2}, "pipeline": pipeline}
    engine = zeroshard.initialize(build("llama"), sgd, config, loss_fn=loss_fn).engine
    return engine.train_batch({"input_ids": tokens_of(0), "logits_to_keep": 2}, tokens_of(0)).item()


def test_arguments_of_the_head_reach_the_last_chunk_alone(ranks):
    model, tokens = build("llama"), tokens_of(0)
    logits = model(input_ids=tokens, logits_to_keep=2).logits
    want = F.cross_entropy(logits.flatten(0, 1), tokens[:, -2:].flatten()).item()
    assert ranks(2, last_tokens) == pytest.approx([want] * 2, rel=1e-6)


def of_one_part():
    options = {"ignored": ["*.norm.weight"], "units": ["LlamaDecoderLayer", "Embedding"]}
    pipeline = {"num_microbatches": 2}
    engine = start("llama", {"mesh": {"pp": 2}, "pipeline": pipeline, **options})
    tokens = tokens_of(0)
    loss = engine.train_batch({"input_ids": tokens}, tokens).item()
    return loss, [unit.name for unit in engine.units], engine.config.ignored


def test_names_that_one_part_alone_has_are_no_error(ranks):
    model, tokens = build("llama"), tokens_of(0)
    want = model(input_ids=tokens, labels=tokens).loss.item()
    first, last = ranks(2, of_one_part)
    assert first[0] == last[0] == pytest.approx(want, rel=1e-6)
    assert "model.embed_tokens" in first[1]
    assert first[2] == last[2] == ("*.norm.weight",)


# ------------------------------------------------------------------------------------ frozen in turns


def in_turns():
    engine = start("llama", {"stage": 3, "mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}})
    losses = []
    for number in range(4):
        for name, parameter in engine.named_parameters():
            parameter.requires_grad_(number % 2 == 0 or "layers.3" in name)
        losses.append(engine.train_batch({"input_ids": tokens_of(number)}, tokens_of(number)).item())
    return losses


def test_parameters_that_are_frozen_in_turns_train_as_in_one_process(ranks):
    model, want = build("llama"), []
    optimizer = sgd(model.parameters())
    for number in range(4):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(number % 2 == 0 or "layers.3" in name)
        loss = model(input_ids=tokens_of(number), labels=tokens_of(number)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    for losses in ranks(2, in_turns):
        assert losses == pytest.approx(want, rel=1e-6)


class Pair(nn.Linear):
    def forward(self, value):
        return super().forward(value), value


def pairs():
    return nn.Sequential(Pair(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()


def detached_loss(output, target):
    return F.mse_loss(output, target).detach()


WRONG = {
    "a loss without a graph": (one_block, detached_loss, 1, "loss of one element that requires a gradient"),
    "a tuple": (pairs, F.mse_loss, 0, "chunk 0: expected a tensor as output, got tuple"),
}


def computed_wrongly(case):
    make, loss_fn, _, _ = WRONG[case]
    config = {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2, "balance": "memory"}, "watchdog_s": 10.0}
    engine = zeroshard.initialize(make().double(), sgd, config, loss_fn=loss_fn).engine
    return message_of((ValueError, RuntimeError), lambda: engine.train_batch(*batch(0)))


@pytest.mark.long
@pytest.mark.parametrize("case", WRONG)
def test_what_a_chunk_cannot_hand_on_is_an_error_where_it_is_computed(ranks, case):
    *_, where, text = WRONG[case]
    found = ranks(2, computed_wrongly, case)
    assert text in found[where]
    assert text not in found[1 - where]


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


def left_out(schedule):
    pipeline = {"schedule": schedule, "num_microbatches": 2, "balance": "memory"}
    config = {"stage": 1, "mesh": {"pp": 2}, "pipeline": pipeline}
    model = with_ends()
    last = model[3]
    engine = zeroshard.initialize(model, sgd, config, loss_fn=F.mse_loss).engine
    last.is_used = engine.dp_rank == 0
    losses = []
    for number in range(STEPS):
        x, y = (value.chunk(2)[engine.dp_rank] for value in batch(number))
        losses.append(engine.train_batch(x, y).item())
    engine.close(restore=False)
    return losses


def test_a_shared_parameter_may_be_left_out_by_a_data_parallel_rank(ranks):
    model, want = with_ends(), []
    optimizer = sgd(model.parameters())
    for number in range(STEPS):
        total = 0.0
        for rank, (x, y) in enumerate(zip(*(value.chunk(2) for value in batch(number)), strict=True)):
            model[3].is_used = rank == 0
            for x_part, y_part in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = F.mse_loss(model(x_part), y_part) / 4
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        want.append(total)
    for losses in ranks(4, left_out, "zbv"):
        assert losses == pytest.approx(want, rel=1e-6)
