"""The chunks of a model, one after another, compute the model."""

import re

import pytest
import torch
import transformers
from torch import nn

from tests.parallel.pipeline.runs import KINDS, LENGTH, VOCABULARY
from tests.parallel.pipeline.runs import of_kind as build
from zeroshard.parallel.pipeline.chunked import Chunked, outline_of


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


RUNS = {
    "a chunk": [range(4)],
    "two chunks": [range(3), range(3, 4)],
    "four chunks": [range(1), range(1, 2), range(2, 3), range(3, 4)],
}


def kept(model, runs, own):
    chunked = Chunked(model)
    chunked.keep(runs, own)
    return chunked


def chunks_of(model, runs, ranks):
    """The chunks, by number; `ranks` are those of each rank, which has a model of its own."""
    found = {}
    for own in ranks:
        mine = type(model)(model.config).eval()
        mine.load_state_dict(model.state_dict())
        chunked = kept(mine, runs, own)
        found |= dict.fromkeys(own, chunked)
    return found


@pytest.mark.long_where(runs=["a chunk", "two chunks"])
@pytest.mark.long_where(kind=["Mixtral", "GPTNeoX", "Phi", "Gemma", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_a_model_of_transformers_compute_it(kind, runs):
    model, given = build(kind), batch()
    want = model(**given)
    num = len(RUNS[runs])
    layouts = [[[number] for number in range(num)]]
    if num == 4:
        layouts.append([[0, 2], [1, 3]])
    for ranks in layouts:
        chunks, value = chunks_of(model, RUNS[runs], ranks), ()
        for number in range(num):
            value = chunks[number](number, value, given)
        assert torch.equal(value.loss, want.loss)
        assert torch.equal(value.logits, want.logits)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: nn.Linear(2, 2), "got a Linear: it is no such model"),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
            ),
            "got a T5ForConditionalGeneration: it",
        ),
    ],
)
def test_a_model_without_such_an_order_is_refused(model, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        outline_of(model())
