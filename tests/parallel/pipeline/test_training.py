"""Models over pipeline ranks train as in one process."""

import pytest
import torch
import transformers
from torch import nn

import zeroshard

VOCABULARY, LENGTH, BATCH, STEPS = 40, 6, 8, 4
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}


def build(seed=0):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def tokens_of(number):
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))


def plain():
    model, losses, norms = build(), [], []
    optimizer = sgd(model.parameters())
    for number in range(STEPS):
        tokens = tokens_of(number)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def trained(stage, mesh, pipeline):
    config = {"stage": stage, "mesh": mesh, "pipeline": pipeline, "clip_grad_norm": 1e9}
    engine = zeroshard.initialize(build(), sgd, config).engine
    losses, norms = [], []
    for number in range(STEPS):
        tokens = tokens_of(number).chunk(engine.dp_world_size)[engine.dp_rank]
        loss = engine.train_batch({"input_ids": tokens}, tokens)
        losses.append(loss.item())
        norms.append(engine.grad_norm.item())
    with engine.unsharded():
        state = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    engine.close(restore=False)
    return losses, norms, state


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("num_ranks", "mesh", "pipeline"),
    [
        (2, {"pp": 2}, {"schedule": "1f1b", "num_microbatches": 4}),
        (2, {"pp": 2}, {"schedule": "interleaved", "num_microbatches": 4}),
        (4, {"pp": 2}, {"schedule": "gpipe", "num_microbatches": 2}),
        (4, {"pp": 2, "tp": 2}, {"schedule": "1f1b", "num_microbatches": 4}),
    ],
)
def test_a_model_trains_as_in_one_process(ranks, num_ranks, mesh, pipeline, stage):
    want_losses, want_norms, want = plain()
    found = ranks(num_ranks, trained, stage, mesh, pipeline)
    names = set()
    for losses, norms, state in found:
        assert losses == pytest.approx(want_losses, rel=1e-6)
        assert norms == pytest.approx(want_norms, rel=1e-5)
        names |= state.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-7, msg=name)
    assert names == {name for name, _ in build().named_parameters()}
