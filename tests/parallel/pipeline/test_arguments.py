"""Arguments beside the tokens reach every chunk: masks, places of tokens, labels that do not count."""

import pytest
import torch

import zeroshard
from tests.parallel.pipeline.runs import LENGTH, build, mixtral, sgd, start, tokens_of, train_plainly
from zeroshard.parallel.pipeline.chunked import outline_of

NUM_MICROBATCHES, STEPS = 4, 4


def batch(number, rows=8):
    """Rows of several lengths, padded on the left; and their labels."""
    tokens = tokens_of(number, rows)
    mask = torch.ones_like(tokens)
    lengths = torch.randint(2, LENGTH + 1, (rows,), generator=torch.Generator().manual_seed(number))
    for row, length in enumerate(lengths.tolist()):
        mask[row, : LENGTH - length] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": places}
    return inputs, tokens.masked_fill(mask == 0, -100)


def run(name, schedule, stage):
    pipeline = {"schedule": schedule, "num_microbatches": NUM_MICROBATCHES}
    engine, losses = start(name, {"stage": stage, "mesh": {"pp": 2}, "pipeline": pipeline}), []
    for number in range(STEPS):
        inputs, labels = batch(number)
        losses.append(engine.train_batch(inputs, labels).item())
    engine.close(restore=False)
    return losses


@pytest.mark.long_where(name=["tied gpt"])
@pytest.mark.parametrize(("name", "schedule", "stage"), [("llama", "zbv", 0), ("tied gpt", "1f1b", 3)])
def test_masks_and_places_reach_every_chunk(ranks, name, schedule, stage):
    batches = map(batch, range(STEPS))  # micro-batches count other numbers of tokens
    want, _ = train_plainly(build(name), batches, num=NUM_MICROBATCHES, max_norm=0.5)
    for losses in ranks(2, run, name, schedule, stage):
        assert losses == pytest.approx(want, rel=1e-6)


def refused():
    engine = start("mixtral", {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}})
    with pytest.raises(ValueError, match="output_router_logits") as of_call:
        engine.train_batch({"input_ids": tokens_of(0), "output_router_logits": True}, tokens_of(0))
    engine.close(restore=False)
    with pytest.raises(ValueError, match="output_router_logits") as of_config:
        outline_of(mixtral(output_router_logits=True))
    return str(of_call.value), str(of_config.value)


def test_losses_of_routers_are_refused(ranks):
    """Each rank would count the routers of its own layers alone."""
    for messages in ranks(2, refused):
        for message in messages:
            assert message.startswith("mesh.pp: expected output_router_logits=False, got True")


def collated(samples):
    """A batch with an argument that is no tensor, and that all micro-batches get."""
    return torch.utils.data.default_collate(samples) | {"use_cache": False}


def loaded(num_microbatches, rows):
    """The losses of batches that the DataLoader of `initialize` makes by a collator of the user's."""
    pipeline = {"num_microbatches": num_microbatches, "balance": "memory"}
    config = {"mesh": {"pp": 2}, "pipeline": pipeline, "micro_batch_size": rows}
    model = build("llama")
    data = [{"input_ids": row, "labels": row} for row in tokens_of(0, rows=16)]
    engine, _, loader, _ = zeroshard.initialize(model, sgd, config, training_data=data, collate_fn=collated)
    batches = list(loader)
    losses = [engine.eval_batch(batch).item() for batch in batches]
    engine.close(restore=False)
    return [batch["input_ids"] for batch in batches], losses


def test_the_loader_makes_whole_batches_for_a_pipeline(ranks):
    model = build("llama")
    first, *others = ranks(2, loaded, 4, 2)
    for tokens, losses in (first, *others):
        assert [len(rows) for rows in tokens] == [8, 8]  # 4 micro-batches of 2 rows
        assert all(torch.equal(rows, same) for rows, same in zip(tokens, first[0], strict=True))
        want = [model(input_ids=rows, labels=rows).loss.item() for rows in tokens]
        assert losses == pytest.approx(want, rel=1e-6)
