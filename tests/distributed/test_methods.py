"""Methods other than forward, and forwards that take another way than the first one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import (
    SOME_STAGES,
    averaged_step,
    build,
    differences,
    finish,
    numbers,
    start,
    step,
    token_loss,
    train_sharded,
)
from tests.ranks import on_ranks


class TwoTowers(nn.Module):
    """Each tower has its own blocks, and the root parameters of its own."""

    def __init__(self):
        super().__init__()
        self.images = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 7)) for _ in "ab"
        )
        self.texts = nn.ModuleList(nn.Sequential(nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 7)) for _ in "ab")
        self.scale, self.shift = nn.Parameter(torch.ones(7)), nn.Parameter(torch.zeros(7))

    def encode_image(self, x, *, gain=1.0):
        for block in self.images:
            x = block(x)
        return x * self.scale * gain

    def encode_text(self, x):
        for block in self.texts:
            x = block(x)
        return {"text": x + self.shift}

    def forward(self, x):
        return self.encode_image(x) * self.encode_text(x)["text"]

    def through_forward(self, x):
        return self(x) + self.scale


def encoded_loss(net, number):
    x = numbers(number, 5, 7)
    if number == 1:
        return net(x).square().mean()
    images = net.encode_image(x, gain=2.0)
    return (images * net.encode_text(x + 1)["text"]).mean() + net.through_forward(x).mean()


@on_ranks(2)
def test_registered_methods_train_as_in_plain_pytorch_to_the_bit():
    torch.manual_seed(0)
    model, found = TwoTowers(), []
    replica = copy.deepcopy(model)
    made = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    want = finish(replica, [averaged_step(replica, made, encoded_loss, number) for number in range(4)])
    for stage in SOME_STAGES:
        optimizer = torch.optim.AdamW((copied := copy.deepcopy(model)).parameters(), lr=1e-2)
        engine, optimizer = start(copied, optimizer, stage=stage)
        for name in ("encode_image", "encode_text", "through_forward"):
            engine.register_forward_method(name)
        got = finish(engine, [step(engine, optimizer, encoded_loss, number) for number in range(4)])
        found += differences(f"stage {stage}", got, want)
        with torch.no_grad():
            direct = engine.module.encode_image(numbers(0, 5, 7))  # the model's own name works too
            found += [] if torch.equal(direct, engine.encode_image(numbers(0, 5, 7))) else ["direct"]
    assert (found, engine.memory_report().unsharded) == ([], 0)


@on_ranks(1)
def test_methods_that_cannot_be_registered_are_refused_by_name():
    engine, _ = start(TwoTowers(), "SGD")
    for name, text in (
        ("encode_sound", "expected the name of a method of TwoTowers"),
        ("images.0.forward", "A method of a part is called by one of the model"),
        ("step", "^the engine has a method 'step' of its own"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.register_forward_method(name)
    with pytest.raises(AttributeError, match="TwoTowers has no method 'generate'"):
        engine.generate()


# ---------------------------------------------------------------------------------------------- generate


@on_ranks(2, timeout=120)
def test_ranks_generate_different_lengths_as_plain_pytorch_does():
    model = build("tied transformers Llama")
    rank = dist.get_rank()
    prompt = torch.arange(1, 4 + rank).unsqueeze(0)
    options = {"max_new_tokens": 5 + 4 * rank, "do_sample": False, "pad_token_id": 0}
    want = copy.deepcopy(model).generate(prompt, **options).tolist()
    wanted_run = train_sharded(model, "SGD", 2)
    engine, optimizer = start(copy.deepcopy(model), "SGD")
    losses = [step(engine, optimizer, token_loss, 0)]
    engine.generate(prompt, **options)
    losses.append(step(engine, optimizer, token_loss, 1))
    found = differences("trained", finish(engine, losses), wanted_run)
    engine, _ = start(copy.deepcopy(model), "SGD")
    assert engine.generate(prompt, **options).tolist() == want
    assert engine.memory_report().unsharded == 0
    engine.register_forward_method("generate")
    synced = engine.generate(prompt, synced_gpus=True, **options)
    assert synced[:, : len(want[0])].tolist() == want
    return found


def small_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=60, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


@on_ranks(2, timeout=120)
def test_models_that_generate_through_their_parts_generate_as_plain_pytorch_does():
    """The model is not called as a whole: the encoder by itself."""
    model, rank = small_t5().eval(), dist.get_rank()
    ids = torch.arange(3, 7 + rank).unsqueeze(0)
    options = {"input_ids": ids, "max_new_tokens": 4 + 3 * rank, "do_sample": False, "pad_token_id": 0}
    want = copy.deepcopy(model).generate(**options).tolist()
    engine, _ = start(model, "SGD")
    assert engine.generate(**options).tolist() == want
    assert engine.generate(synced_gpus=True, **options)[:, : len(want[0])].tolist() == want
    assert engine.memory_report().unsharded == 0
