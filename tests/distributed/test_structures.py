"""Models of many structures train as in DDP to the bit on two ranks, at every stage."""

import copy
import dataclasses
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import zeroshard
from tests.distributed.models import VOCABULARY
from tests.distributed.training import (
    OPTIMIZERS,
    STAGES,
    differences,
    distance_of_all,
    numbers,
    same_as_replicated,
    square_loss,
    start,
    tokens,
    train,
    train_replicated,
    train_sharded,
    unequal,
)

WIDTH = 12


# -------------------------------------------------------------------------------------- of transformers


def t5():
    """One weight is the embedding of the encoder, that of the decoder, and the head."""
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=24,
            d_kv=8,
            d_ff=37,
            num_layers=3,
            num_heads=3,
            relative_attention_num_buckets=8,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            tie_word_embeddings=True,
        )
    )
    embeddings = model.encoder.embed_tokens.weight, model.decoder.embed_tokens.weight, model.lm_head.weight
    assert all(weight is model.shared.weight for weight in embeddings)
    return model.train()


def t5_loss(model, number):
    batch = tokens(number)
    return model(input_ids=batch[:, :9], labels=batch[:, 9:].contiguous()).loss


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 37}
    model = ViTForImageClassification(ViTConfig(image_size=12, patch_size=4, num_labels=5, **sizes))
    return model.train()


def vit_loss(model, number):
    return model(pixel_values=numbers(number, 2, 3, 12, 12)).logits.square().mean()


TRANSFORMERS = {"T5": (t5, t5_loss), "vision transformer": (vit, vit_loss)}


def of_transformers(name):
    torch.manual_seed(0)
    make, loss = TRANSFORMERS[name]
    model = make()
    found = same_as_replicated(model, num_steps=3, loss=loss)
    whole = start(model)[0].full_state_dict()
    return found, set(whole)


@pytest.mark.long_where(name=["vision transformer"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_encoder_decoders_and_vision_transformers_train_as_in_ddp_to_the_bit(ranks, name):
    pytest.importorskip("transformers")
    (found_0, keys), (found_1, _) = ranks(2, of_transformers, name, timeout=120)
    assert (found_0, found_1) == ([], [])
    if name == "T5":
        tied = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
        assert tied | {"lm_head.weight"} <= keys


def of_transformers_on_many_ranks(name):
    torch.manual_seed(0)
    make, loss = TRANSFORMERS[name]
    model = make()
    want = train_replicated(model, "SGD", 4, loss)
    got = train_sharded(model, "SGD", 4, loss, stage=3)
    losses = max(abs(a - b) / abs(b) for a, b in zip(got.losses, want.losses, strict=True))
    return losses, distance_of_all(got.parameters, want.parameters) if got.parameters else 0


@pytest.mark.long
def test_a_t5_on_four_ranks_stays_close_to_ddp(ranks):
    pytest.importorskip("transformers")
    for losses, parameters in ranks(4, of_transformers_on_many_ranks, "T5", timeout=120):
        assert losses <= 1e-6
        assert parameters <= 5e-6


# -------------------------------------------------------------------------------------- what blocks return


@dataclasses.dataclass
class State:
    hidden: Tensor
    extra: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class FrozenState:
    hidden: Tensor
    inner: dict[str, list[Tensor]]


class Named(NamedTuple):
    hidden: Tensor
    extra: Tensor


RETURNS = {
    "tuple": (lambda x, y: (x, y), lambda out: out[0] + out[1]),
    "list": (lambda x, y: [[x], [y, None]], lambda out: out[0][0] + out[1][0]),
    "dict": (lambda x, y: {"x": x, "more": {"y": y}}, lambda out: out["x"] + out["more"]["y"]),
    "named tuple": (Named, lambda out: out.hidden + out.extra),
    "dataclass": (State, lambda out: out.hidden + out.extra),
    "dataclass without some": (lambda x, y: State(x + y), lambda out: out.hidden),
    "frozen dataclass": (
        lambda x, y: FrozenState(x, {"y": [y]}),
        lambda out: out.hidden + out.inner["y"][0],
    ),
}


class Returning(nn.Module):
    """Linear layers whose results are wrapped."""

    def __init__(self, kind):
        super().__init__()
        self.left, self.right, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), kind

    def forward(self, *, state):
        wrap, unwrap = RETURNS[self.kind]
        x = unwrap(state)
        return wrap(torch.tanh(self.left(x)), self.right(x))


class Returns(nn.Module):
    """Takes keywords alone; so do its blocks, which take what the one before returns."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first = kind, nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Returning(kind) for _ in range(3))

    def forward(self, *, x):
        wrap, _ = RETURNS[self.kind]
        x = self.first(x)
        state = wrap(x, x)
        for block in self.blocks:
            state = block(state=state)
        return state


def returns():
    torch.manual_seed(0)

    def loss(model, number, kind):
        return RETURNS[kind][1](model(x=numbers(number, 5, 7))).square().mean()

    return [
        f"{kind}: {line}"
        for kind in RETURNS
        for line in same_as_replicated(Returns(kind), num_steps=2, loss=partial(loss, kind=kind))
    ]


def test_blocks_and_models_may_take_keywords_and_return_containers_and_dataclasses(ranks):
    assert ranks(2, returns) == [[], []]


# ------------------------------------------------------------------------------------------- odd structures


class Nested(nn.Module):
    """Lists of lists of blocks; parameters of the root itself, one without dims; names with tricks."""

    def __init__(self):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(WIDTH, 7)), nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_parameter("absent", None)
        self.stages = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(2)
            )
            for _ in range(2)
        )
        self.by_name = nn.ModuleDict({"a-b": nn.Linear(WIDTH, WIDTH), "weight": nn.LayerNorm(WIDTH)})

    def forward(self, x):
        x = F.linear(x, self.weight) * self.gain
        for stage in self.stages:
            for block in stage:
                x = x + block(x)
        return self.by_name["weight"](self.by_name["a-b"](x)) + self.nothing.sum()


class Collections(nn.Module):
    """Parameters in lists and dicts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ListAndDict() for _ in range(2))
        self.scales = nn.ParameterList([torch.randn(7), torch.randn(7)])

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        for block in self.blocks:
            x = x + block(x)
        return x


class ListAndDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(7, 5), torch.randn(5, 7)])
        self.named = nn.ParameterDict({"scale": torch.randn(7), "popped": torch.randn(7)})
        self.inner = nn.Identity()

    def forward(self, x):
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return self.inner(x * self.named["scale"] + self.named["popped"])


class MixedDtypes(nn.Module):
    """float64 and float32 in one module, and frozen bfloat16."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), WideNorm()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class WideNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.shift = nn.Parameter(torch.randn(7))
        self.table = nn.Parameter(torch.randn(7).bfloat16(), requires_grad=False)

    def forward(self, x):
        return (F.layer_norm(x.double(), (7,)) * self.scale).float() + self.shift * self.table


class Shared(nn.Module):
    """One module in two blocks, one block in two places, and one layer under two names in a block."""

    def __init__(self):
        super().__init__()
        common = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh(), common) for _ in range(3))
        self.blocks.append(self.blocks[0])
        self.again = self.blocks[1]
        self.last = nn.Linear(7, 7)
        self.blocks[2].append(self.last)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.again(x))


class Normed(nn.Module):
    """Layers whose weights are made of other parameters in forward."""

    def __init__(self, norm):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(nn.Linear(7, 9)), nn.Tanh(), norm(nn.Linear(9, 7))) for _ in range(2)
        )
        self.last = norm(nn.Linear(7, 3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Recurrent(nn.Module):
    """torch's recurrent layers and its attention."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(RecurrentBlock() for _ in range(2))

    def forward(self, x):
        x = x[None]
        for block in self.blocks:
            x = x + block(x)
        return x


class RecurrentBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(7, 8, num_layers=2, proj_size=5, bidirectional=True)
        self.gru, self.attention = nn.GRU(10, 8), nn.MultiheadAttention(8, 2, kdim=10, vdim=10)
        self.last = nn.Linear(8, 7)

    def forward(self, x):
        y, _ = self.lstm(x)
        query, _ = self.gru(y)
        return self.last(self.attention(query, y, y)[0])


STRUCTURES = {
    "nested lists": Nested,
    "lists and dicts of parameters": Collections,
    "mixed dtypes": MixedDtypes,
    "shared modules": Shared,
    "weight norm": lambda: Normed(parametrizations.weight_norm),
    "spectral norm": lambda: Normed(parametrizations.spectral_norm),
    "orthogonal": lambda: Normed(parametrizations.orthogonal),
    "recurrent": Recurrent,
}


def is_linear(module):
    return isinstance(module, nn.Linear)


def train_structure(name, config):
    torch.manual_seed(0)
    return same_as_replicated(STRUCTURES[name](), num_steps=2, loss=square_loss, **config)


@pytest.mark.long_where(name=["weight norm", "orthogonal", "spectral norm", "nested lists"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_odd_structures_train_as_in_ddp_to_the_bit(ranks, name):
    assert ranks(2, train_structure, name, {}) == [[], []]


@pytest.mark.long_where(name=["weight norm", "shared modules"])
@pytest.mark.parametrize("name", ["nested lists", "weight norm", "shared modules"])
def test_odd_structures_with_each_layer_a_unit_train_as_in_ddp_to_the_bit(ranks, name):
    assert ranks(2, train_structure, name, {"units": is_linear}) == [[], []]


def with_old_norm(norm):
    """torch.nn.utils' older ones cannot be copied: the same seed makes the same model."""

    def make():
        torch.manual_seed(0)
        return Normed(norm)

    replica, found = DistributedDataParallel(make()), []
    want = train(replica, OPTIMIZERS["AdamW"](replica.parameters()), 2, square_loss)
    for stage in STAGES:
        got = train(*start(make(), stage=stage), 2, square_loss)
        found += differences(f"stage {stage}", got, want)
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_norms_that_are_computed_by_forward_hooks_train_as_in_ddp_to_the_bit(ranks, norm):
    assert ranks(2, with_old_norm, norm) == [[], []]


# ------------------------------------------------------------------------------------------------ buffers


class Convolutions(nn.Module):
    """Residual blocks with batch norm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)) for _ in range(3)
        )
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def image_loss(model, number):
    return model(numbers(number, 4, 3, 8, 8)).square().mean()


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def running_statistics():
    """Each rank's own, as in DDP with broadcast_buffers=False; evaluation reads them."""
    torch.manual_seed(0)
    model, found = Convolutions(), []
    replica = DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
    want = train(replica, OPTIMIZERS["SGD"](replica.parameters()), 3, image_loss)
    replica.eval()
    wanted_loss = image_loss(replica, 9).item()
    for stage in STAGES:
        engine, optimizer = start(copy.deepcopy(model), "SGD", stage=stage)
        got = train(engine, optimizer, 3, image_loss)
        engine.eval()
        found += differences(f"stage {stage}", got, want)
        found += unequal(f"stage {stage}", buffers_of(engine), buffers_of(replica.module))
        found += [] if image_loss(engine, 9).item() == wanted_loss else [f"stage {stage}: evaluation"]
    means = [None] * dist.get_world_size()
    dist.all_gather_object(means, buffers_of(engine)["blocks.0.0.running_mean"].tolist())
    assert means[0] != means[1]
    return found


def test_running_statistics_of_a_cnn_are_each_ranks_own_as_in_ddp_without_broadcasts(ranks):
    assert ranks(2, running_statistics) == [[], []]


class Buffered(nn.Module):
    """Buffers of all kinds; a counter that forward sets and a mean that it changes in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(BufferedBlock() for _ in range(2))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.empty(0, 3))
        self.blocks[1].mean = self.blocks[0].mean  # changed by both

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class BufferedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("rotary", torch.polar(torch.ones(4), torch.rand(4)), persistent=False)
        self.register_buffer("mask", torch.rand(8) < 0.7)
        self.register_buffer("table", torch.randn(8).bfloat16().expand(2, 8).t(), persistent=False)
        self.register_buffer("wide", torch.randn((), dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8, 2)[:, 0])

    def forward(self, x):
        self.steps = self.steps + 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        rotated = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.rotary)
        y = self.linear(rotated.flatten(-2)) * self.mask + self.table[:, 0].float()
        return y * self.wide.float() - self.mean / self.steps


def with_buffers():
    def loss(model, number):
        return model(numbers(number, 5, 8)).square().mean()

    torch.manual_seed(0)
    model, found = Buffered(), []
    replica = DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
    want = train(replica, OPTIMIZERS["AdamW"](replica.parameters()), 3, loss)
    for stage in STAGES:
        engine, optimizer = start(copy.deepcopy(model), stage=stage)
        got = train(engine, optimizer, 3, loss)
        found += differences(f"stage {stage}", got, want)
        found += unequal(f"stage {stage}", buffers_of(engine), buffers_of(replica.module))
        same = {name: b.dtype for name, b in engine.named_buffers()}
        assert same == {name: b.dtype for name, b in model.named_buffers()}
    return found


def test_buffers_of_every_dtype_persistent_or_not_are_as_in_ddp(ranks):
    assert ranks(2, with_buffers) == [[], []]


# ------------------------------------------------------------------------------------------------ refusals


def refused(dtype):
    model = nn.Sequential(nn.Linear(3, 3), nn.Module())
    model[1].codes = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match="parameter") as caught:
        zeroshard.initialize(model)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.uint8])
def test_complex_and_integer_parameters_are_refused_by_name_with_what_to_do(ranks, dtype):
    for message in ranks(2, refused, dtype):
        assert f"'1.codes' has dtype {dtype}" in message
        assert "register_buffer" in message
