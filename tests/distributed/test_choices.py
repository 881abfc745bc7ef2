"""Models whose forward runs a part of a list, another one on each rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import numbers, same_as_replicated, start
from tests.ranks import on_ranks

WIDTH = 7


class Softmax(nn.Module):
    """torch's adaptive softmax: ranks have targets in other clusters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)) for _ in "ab")
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 60, cutoffs=[10, 20, 40], div_value=2.0)

    def forward(self, x, targets):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.softmax(x, targets).loss


def softmax_loss(model, number):
    rank = dist.get_rank()
    return model(numbers(number, 5, WIDTH), torch.randint(20, (5,)) + 20 * rank)


class Heads(nn.Module):
    """A head for each task."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "abc")

    def forward(self, x, task):
        return self.heads[task](x)


class Tasks(nn.Module):
    """Blocks that all ranks call, and heads among which each rank chooses."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in "ab")
        self.heads = Heads()

    def forward(self, x, task):
        for block in self.blocks:
            x = torch.tanh(block(x, x))
        return self.heads(x, task)


def task_loss(model, number):
    return model(numbers(number, 5, WIDTH), (dist.get_rank() + number) % 3).square().mean()


SIZES = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_layerdrop": 0.5,
    "decoder_layerdrop": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}


def bart(**sizes):
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(BartConfig(**SIZES | sizes, max_position_embeddings=16)).train()


def words(number, low=3):
    return torch.randint(
        low, 40, (2, 6), generator=torch.Generator().manual_seed(10 * number + dist.get_rank())
    )


def bart_loss(model, number):
    return other_layers_on_each_rank(number, lambda: model(words(number), labels=words(50 + number)).loss)


def other_layers_on_each_rank(number, loss):
    torch.manual_seed(10 * number + dist.get_rank())
    return loss()


MODELS = {
    "adaptive softmax": (Softmax, softmax_loss, {}),
    "a head for each task": (Tasks, task_loss, {"units": ["Bilinear", "Heads"]}),
    "Bart that drops layers": (bart, bart_loss, {}),
}


def seeded(loss):
    def again(model, number):
        torch.manual_seed(number)
        return loss(model, number)

    return again


@pytest.mark.long_where(name=list(MODELS)[1:])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_ranks_that_run_other_parts_of_a_list_train_as_in_ddp_to_the_bit(name):
    torch.manual_seed(0)
    make, loss, config = MODELS[name]
    return same_as_replicated(make(), num_steps=3, loss=seeded(loss), find_unused=True, **config)


@on_ranks(2, process_group=False)
def test_a_choice_that_units_cut_is_an_error_that_says_what_to_list():
    torch.manual_seed(0)
    engine, _ = start(Tasks(), stage=3, watchdog_s=30.0)
    with pytest.raises(RuntimeError) as error:
        task_loss(engine, 0)
    message = str(error.value)
    assert "all-gather of unit 'heads.heads.0'" in message
    assert "list in units= the class of the module that holds them" in message


def units_with(layerdrop):
    engine, _ = start(bart(encoder_layerdrop=layerdrop, decoder_layerdrop=layerdrop), stage=3)
    return {unit.name: unit.reason for unit in engine.units}


def test_layers_that_transformers_names_are_units_unless_some_are_dropped_at_random(ranks):
    (whole,) = ranks(1, units_with, 0.5)
    assert list(whole) == ["", "model.encoder", "model.decoder"]
    assert "which may run some modules of 'layers' alone" in whole["model.encoder"]
    (cut,) = ranks(1, units_with, 0.0)
    assert list(cut)[1:] == [f"model.{part}.layers.{n}" for part in ("encoder", "decoder") for n in range(3)]
    assert all("named in the model's _no_split_modules" in reason for reason in list(cut.values())[1:])
