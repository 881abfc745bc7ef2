"""A model built without memory has the values of an ordinary one, to the bit, and trains as one."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard
from tests.distributed.training import differences, start, train
from tests.ranks import on_ranks
from zeroshard.lazy.deferred import values_of
from zeroshard.lazy.recording import check_values


class Layers(nn.Module):
    """Much of what torch initializes, each in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, padding_idx=1)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(6, 2)
        self.rnn = nn.LSTM(6, 6)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm1d(6)
        self.copies = nn.ModuleList(copy.deepcopy(nn.Linear(6, 6)) for _ in range(2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.bf16 = nn.Linear(3, 3).bfloat16()


class Inits(nn.Module):
    """Values that are computed: in place, from others, of views, until a condition holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(7, 3) * 0.02)
        self.listed = nn.Parameter(torch.ones(3) * torch.tensor([1.0, 2.0, 3.0]))
        self.a, self.b, self.c, self.d = (nn.Linear(20, 20) for _ in range(4))
        nn.init.trunc_normal_(self.a.weight, std=0.02, a=-0.02, b=0.02)
        nn.init.orthogonal_(self.b.weight)
        self.c.weight.data.normal_(0, 0.1)
        with torch.no_grad():
            self.d.weight.copy_(self.c.weight)  # before c is changed once more
            self.c.weight.mul_(2)
            self.d.weight[3:5].zero_()
        nn.init.normal_(self.d.bias, generator=torch.Generator().manual_seed(3))


class Buffers(nn.Module):
    """Buffers, plain tensors and numbers that __init__ computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        angles = torch.zeros(8, 4)
        angles[:, 0::2] = torch.sin(torch.arange(8.0)[:, None] * self.frequencies[:2])
        self.register_buffer("angles", angles)
        self.mask = torch.tril(torch.ones(4, 4))
        self.same = self.frequencies
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.listed = torch.linspace(0, 1, 3).tolist()


class MetaParts(nn.Module):
    """Layers that begin on the meta device on purpose, where an ordinary init draws nothing for them."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = nn.utils.skip_init(nn.Linear, 3, 4)
        nn.init.zeros_(self.skipped.weight)
        nn.init.normal_(self.skipped.bias)
        with torch.device("meta"):
            self.emptied = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
            self.replaced, self.assigned = nn.Linear(3, 4), nn.Linear(3, 4)
        assert self.emptied[0].weight.is_meta
        assert torch.empty(2, device="meta").is_meta
        self.emptied.to_empty(device="cpu")
        for layer in self.emptied:
            layer.reset_parameters()
        self.replaced = nn.Linear(3, 4)
        like = torch.empty_like(self.assigned.weight, device="cpu").uniform_()
        self.assigned.load_state_dict({"weight": like, "bias": torch.ones(4)}, assign=True)
        self.transposed = nn.Parameter(torch.empty_like(torch.empty(3, 4, device="meta").t(), device="cpu"))
        nn.init.normal_(self.transposed)
        self.last = nn.Linear(4, 2)


class Placed(nn.Module):
    """Tensors that are made where others are, or moved there."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Linear(4, 4).weight
        self.asked = str(weight.device), weight.is_cpu, weight.is_meta, weight.get_device()
        self.beside = nn.Linear(4, 4, device=weight.device)
        self.moved = nn.Linear(4, 4).to(weight.device, torch.bfloat16)
        self.copied = nn.Parameter(weight.detach().to(device="cpu", copy=True).double())
        self.register_buffer("counts", torch.arange(4, device=weight.device))
        self.register_buffer("number", torch.tensor(2.5).to(weight.device))
        self.sum = weight.detach().cpu().numpy().sum()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: values_of(tensor).detach().clone() for name, tensor in named}


def both(make: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    drawn = torch.rand(1)
    torch.manual_seed(0)
    with zeroshard.deferred_init():
        deferred = make()
    assert torch.equal(torch.rand(1), drawn)  # the generator went on as far
    return plain, deferred


@pytest.mark.parametrize("make", [Layers, Inits, Buffers, MetaParts, Placed])
def test_deferred_values_are_those_of_an_ordinary_init_to_the_bit_also_in_a_copy(make):
    plain, deferred = both(make)
    assert make is MetaParts or all(parameter.is_meta for parameter in deferred.parameters())
    expected, got = tensors(plain), tensors(deferred)
    with zeroshard.deferred_init(), torch.no_grad():
        twin = copy.deepcopy(deferred)
        for parameter in deferred.parameters():
            parameter.zero_()
    for found in (got, tensors(twin)):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    check_values(twin)
    parameters = dict(deferred.named_parameters())
    for name, parameter in twin.named_parameters():
        assert parameter is not parameters[name]
        assert type(parameter) is type(parameters[name])
        assert parameter.requires_grad == parameters[name].requires_grad


@pytest.mark.parametrize("lose", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_outside_of_a_block_and_a_pickle_are_refused_by_name(lose):
    _, deferred = both(Inits)
    with pytest.raises(ValueError, match=r"is on the meta device; .* and copies of it under zeroshard\."):
        check_values(lose(deferred))
    check_values(deferred)
    nn.init.zeros_(deferred.a.bias)
    with zeroshard.deferred_init(), pytest.raises(RuntimeError, match="a parameter was changed after"):
        copy.deepcopy(deferred)


def after_the_block(model):
    nn.init.zeros_(model.a.bias)


def between_two_blocks(model):
    nn.init.zeros_(model.a.bias)
    with zeroshard.deferred_init():
        nn.init.ones_(model.a.bias)


def of_a_copy(model):
    with zeroshard.deferred_init():
        twin = copy.deepcopy(model)
    model.a = twin.a
    nn.init.zeros_(model.a.bias)


def to_another_dtype(model):
    model.a.bfloat16()


def with_a_layer_on_the_meta_device(model):
    model.more = nn.Linear(2, 2, device="meta")


CHANGED = r"^parameter 'a.bias' was changed after zeroshard.deferred_init\(\)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (after_the_block, CHANGED),
        (between_two_blocks, CHANGED),
        (of_a_copy, CHANGED),
        (to_another_dtype, "^parameter 'a.weight' is on the meta device; expected values"),
        (with_a_layer_on_the_meta_device, "^parameter 'more.weight' is on the meta device"),
    ],
)
def test_a_change_outside_of_a_block_is_refused_by_name(change, message):
    _, deferred = both(Inits)
    change(deferred)
    with pytest.raises(ValueError, match=message):
        check_values(deferred)


def test_a_model_may_be_changed_in_a_block_of_its_own():
    plain, deferred = both(Inits)
    for model, block in ((plain, torch.no_grad()), (deferred, zeroshard.deferred_init())):
        with block, torch.no_grad():
            nn.init.ones_(model.a.weight)
            model.a.weight.data.mul_(2)
            model.b.weight[2:4].zero_()
            model.c.weight.mul_(3).add_(model.d.weight)
    check_values(deferred)
    expected = tensors(plain)
    for name, value in tensors(deferred).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    with zeroshard.deferred_init():
        twin = copy.deepcopy(deferred)
        nn.init.zeros_(twin.a.weight)
    check_values(twin)
    assert not values_of(twin.a.weight).any()
    assert torch.equal(values_of(deferred.a.weight), plain.a.weight)


def test_tokens_are_added_to_a_model_without_memory(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**shape, num_attention_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    plain = LlamaForCausalLM.from_pretrained(tmp_path)
    deferred = zeroshard.from_pretrained(LlamaForCausalLM, str(tmp_path))
    for model, block in ((plain, torch.no_grad()), (deferred, zeroshard.deferred_init())):
        torch.manual_seed(1)
        with block:
            model.resize_token_embeddings(37, pad_to_multiple_of=8)
    check_values(deferred)
    assert deferred.lm_head.weight is deferred.model.embed_tokens.weight
    expected = dict(plain.named_parameters())
    for name, parameter in deferred.named_parameters():
        assert parameter.device.type == "meta"
        torch.testing.assert_close(values_of(parameter), expected[name], rtol=0, atol=0)


def make():
    return nn.Sequential(
        nn.Embedding(50, 16),
        nn.LayerNorm(16),
        *(nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 16)) for _ in range(2)),
        nn.Linear(16, 50),
    )


def grouped(parameters):
    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        ],
        lr=1e-2,
    )


@on_ranks(1)
def test_an_optimizer_whose_state_has_no_values_is_refused():
    with zeroshard.deferred_init():
        model = make()
    with pytest.raises(ValueError, match=r"^Adagrad has made its state for '0.weight' on the meta device"):
        zeroshard.initialize(model, torch.optim.Adagrad)


def loss_of(model, number):
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(number))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("config", [{"stage": 0}, {"stage": 3, "precision": {"param_dtype": "bf16"}}])
@on_ranks(2)
def test_a_model_without_memory_trains_as_an_ordinary_one(config):
    runs = []
    for context in (zeroshard.deferred_init(), nullcontext()):
        torch.manual_seed(dist.get_rank())  # rank 0's values count
        with context:
            model = make()
        runs.append(train(*start(model, grouped, **config), 3, loss_of))
    return differences("deferred", *runs)


@on_ranks(2)
def test_what_needs_memory_is_refused_while_a_model_is_recorded_and_works_afterwards():
    engine, optimizer = start(make(), grouped)
    with zeroshard.deferred_init():
        model = make()
        for call, name in ((zeroshard.initialize, "initialize"), (zeroshard.shard, "shard")):
            with pytest.raises(RuntimeError, match=rf"^{name} inside zeroshard\.deferred_init\(\)"):
                call(model)
        refused = r"^a sharded model cannot be called inside .* zeroshard\.deferred_init\(\)"
        with pytest.raises(RuntimeError, match=refused):
            engine(torch.arange(9)[None])
    for each in ((engine, optimizer), start(model, grouped)):
        train(*each, 1, loss_of)
