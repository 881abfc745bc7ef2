"""Counts of elements are the model's wherever that can be told, at any stage."""

import warnings

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard
from tests.distributed.training import ALL_STAGES


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31,
            hidden_size=20,
            intermediate_size=36,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def adapted():
    return peft.get_peft_model(llama(), peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))


def start(model, stage):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return zeroshard.initialize(model, torch.optim.AdamW(trained), {"stage": stage}).engine


def counted(model):
    """What transformers counts."""
    return [
        model.num_parameters(),
        model.num_parameters(only_trainable=True),
        model.num_parameters(exclude_embeddings=True),
    ]


def counts_of_libraries():
    """Where a count of a sharded model differs from that of the plain one; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return differing_counts()


def differing_counts():
    found = []
    for stage in ALL_STAGES:
        plain, engine = llama(), start(llama(), stage)
        found += [stage] * (counted(engine.module) != counted(plain))
        found += [stage] * (engine.num_parameters() != plain.num_parameters())
        plain, engine = adapted(), start(adapted(), stage)
        found += [stage] * (
            engine.module.get_nb_trainable_parameters() != plain.get_nb_trainable_parameters()
        )
        found += [stage] * (counted(engine.module.base_model.model) != counted(plain.base_model.model))
        trained, everything = plain.get_nb_trainable_parameters()
        found += [stage] * (engine.num_parameters(only_trainable=True) != trained)
        with engine.unsharded():
            found += [stage] * (engine.num_parameters() != everything)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_engine_transformers_and_peft_count_whole_parameters(ranks, num_ranks):
    assert ranks(num_ranks, counts_of_libraries) == [[]] * num_ranks


class Packing(torch.optim.SGD):
    """Asks for sizes and norms of what it was given, as optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.allocate()

    def allocate(self):
        self.size = sum(p.numel() for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure=None):
        self.allocate()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.norm(), parameter.grad.norm(), parameter.detach().norm()
        return super().step(closure)


def warnings_about_slices(stage):
    """The messages of a run whose optimizer asks for sizes, and of a user who does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))
    runtime = zeroshard.shard(model, {"stage": stage})
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = Packing(model.parameters(), lr=0.1)
        runtime.attach(optimizer)
        model(torch.randn(3, 7)).sum().backward()
        optimizer.step()
        texts.append([str(warning.message) for warning in caught])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sum(p.numel() for p in model.parameters() if p.requires_grad)
            model[0].weight.norm()
        texts.append([str(warning.message) for warning in caught])
        texts.append({warning.filename for warning in caught})
    return texts


@pytest.mark.parametrize("stage", ALL_STAGES)
def test_a_sum_of_slices_and_a_norm_of_one_warn_once_and_never_in_an_optimizer(ranks, stage):
    for in_optimizer, of_the_user, files in ranks(2, warnings_about_slices, stage):
        assert in_optimizer == []
        if stage == 0:
            assert of_the_user == []
        else:
            assert files == {__file__}
            count, norm = of_the_user
            assert "engine.num_parameters() counts the model" in count
            assert "'0.weight'" in norm
            assert "engine.unsharded" in norm
    assert ranks(1, warnings_about_slices, stage)[0][1] == []


def norms_of_gradients(model):
    return sum(p.grad.norm() ** 2 for p in model.parameters())


def norm_of_one_gradient(model):
    return torch.norm(model[0].weight.grad)


def norm_of_values(model):
    return model[0].weight.detach().norm()


def norm_of_data(model):
    return model[0].weight.data.norm(2)


def count_in_a_loop(model):
    count = 0
    for parameter in model.parameters():
        count += parameter.numel()
    return count


def count_in_a_longer_loop(model):
    count = 0
    for parameter in model.parameters():
        count = count + parameter.nelement()
    return count


def nothing_of_slices(model):
    norm = torch.ones(3).norm()
    for p in model.parameters():
        size = p.numel()
        norm = norm + p.grad.sum() / size + p.detach().sum()
    return norm


def said_of(lines, stage):
    """The texts and files of the warnings about lines of the user's that ran twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))
    zeroshard.shard(model, {"stage": stage})
    model(torch.randn(3, 7)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines(model), lines(model)
    return [(str(warning.message), warning.filename) for warning in caught]


def all_said_of(lines):
    return [said_of(lines, stage) for stage in ALL_STAGES]


ASKED_OF_SLICES = {
    norms_of_gradients: "'0.weight', or of its gradient, is the norm of this rank's slice",
    norm_of_one_gradient: "engine.clip_grad_norm_() returns the norm of all gradients",
    norm_of_values: "under engine.unsharded(module)",
    norm_of_data: "under engine.unsharded(module)",
    count_in_a_loop: "engine.num_parameters() counts the model",
    count_in_a_longer_loop: "engine.num_parameters() counts the model",
}


@pytest.mark.parametrize("lines", ASKED_OF_SLICES)
def test_norms_of_gradients_and_values_and_counts_in_loops_warn_once(ranks, lines):
    for whole, *sliced in ranks(2, all_said_of, lines):
        assert whole == []
        for ((text, file),) in sliced:
            assert ASKED_OF_SLICES[lines] in text
            assert file == __file__
    assert ranks(1, all_said_of, lines) == [[[]] * len(ALL_STAGES)]


def test_other_lines_about_gradients_and_values_say_nothing(ranks):
    assert ranks(2, all_said_of, nothing_of_slices) == [[[]] * len(ALL_STAGES)] * 2
