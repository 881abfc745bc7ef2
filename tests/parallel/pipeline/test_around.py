"""Code of a user around chunks: hooks on modules that are cut, buffers of two chunks, edits in place.

Losses are compared within 1e-6, because an engine adds them up in float32.
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import build as language_model
from tests.parallel.pipeline.runs import sgd, train_plainly
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.chunked import Chunked, outline_of
from zeroshard.parallel.pipeline.cut import require_handed_on

WIDTH, ROWS, STEPS, NUM = 6, 8, 2, 4
CPU = torch.device("cpu")


def layers(num=4):
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num)]


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def made(make):
    torch.manual_seed(0)
    return make().double()


def start(make, schedule="1f1b", *, split=None):
    pipeline = {"schedule": schedule, "num_microbatches": NUM}
    pipeline |= {"balance": "memory"} if split is None else {"split": split}
    config = {"stage": 1, "mesh": {"pp": 2}, "pipeline": pipeline, "micro_batch_size": ROWS // NUM}
    return zeroshard.initialize(made(make), sgd, config, loss_fn=F.mse_loss).engine


def trained(engine):
    """Losses of steps and of an evaluation."""
    losses = [engine.train_batch(*batch(number)).item() for number in range(STEPS)]
    losses.append(engine.eval_batch(*batch(STEPS)).item())
    engine.close(restore=False)
    return losses


def plain(make):
    """The same in one process."""
    model = made(make)

    def loss_of(model, x, y):
        return F.mse_loss(model(x), y)

    losses, _ = train_plainly(model, map(batch, range(STEPS)), loss_of, num=NUM)
    x, y = batch(STEPS)
    return [*losses, loss_of(model.eval(), x, y).item()]


# ----------------------------------------------------------------------------------------------- hooks


@on_ranks(2)
def test_a_weight_of_another_rank_that_a_reference_was_kept_to_is_an_error():
    """A module of this rank may refer to it, such as a tied head by hand."""
    known = layers()
    engine = start(lambda: nn.Sequential(*known))
    name = "0" if torch.distributed.get_rank() else "3"
    text = f"got an original parameter, '{name}.0.weight', from a reference that was kept"
    with pytest.raises(RuntimeError, match=text):
        known[int(name)](torch.ones(1, WIDTH).double())
    engine.close(restore=False)


# ------------------------------------------------------------------------------- a forward of its own


class Residual(nn.Sequential):
    def forward(self, input):
        return input + 2.0 * super().forward(input)


class Backwards(nn.Sequential):
    def __iter__(self):
        return reversed(self._modules.values())


def test_a_sequence_with_a_forward_of_its_own_is_refused():
    for kind in (Residual, Backwards):
        with pytest.raises(ValueError, match=f"got a {kind.__name__}: it is a Sequential with a forward of"):
            outline_of(kind(*layers()))
    named = type("Named", (nn.Sequential,), {})(*layers())  # it computes as any Sequential
    assert outline_of(named).blocks == ("0", "1", "2", "3")


# -------------------------------------------------------------------------- attributes of other chunks


class Reads(transformers.LlamaForCausalLM):
    """A model whose forward looks at modules, as that of Mamba does."""

    look = staticmethod(lambda model: None)

    def forward(self, **kwargs):
        self.look(self)
        return super().forward(**kwargs)


LOOKS = {
    "lm_head.weight": lambda model: model.lm_head.weight.dtype,
    "model.norm.variance_epsilon": lambda model: getattr(model.model.norm, "variance_epsilon", 0.0),
    "model.layers.1.mlp": lambda model: hasattr(model.model.layers[1], "mlp"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_forward_that_reads_an_attribute_of_another_chunk_is_refused_by_name(name, monkeypatch):
    monkeypatch.setattr(Reads, "look", staticmethod(LOOKS[name]))
    model = Reads(language_model("llama").config)
    with pytest.raises(ValueError, match=rf"got a Reads: .*it reads '{name}'.*as a Sequential of its blocks"):
        require_handed_on(Chunked(model), CPU)
    assert model.lm_head.weight.shape == model.model.embed_tokens.weight.shape  # it is as it was


def test_a_parameter_outside_of_the_modules_that_chunks_have_is_refused_by_name():
    model = language_model("llama")
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="its parameter 'scale' is in none of these"):
        require_handed_on(Chunked(model), CPU)


# ------------------------------------------------------------------------------ buffers of two chunks


class Scaled(nn.Module):
    """A layer that reads a table."""

    def __init__(self, table):
        super().__init__()
        self.dense, self.table = nn.Linear(WIDTH, WIDTH), table

    def forward(self, x):
        return torch.tanh(self.dense(x)) * self.table.values


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.linspace(0.5, 1.0, WIDTH), persistent=False)


def with_table():
    table = Table()
    return nn.Sequential(*(Scaled(table) for _ in range(4)))


def with_norms(copies=False):
    norm = nn.BatchNorm1d(WIDTH)
    other = copy.deepcopy(norm) if copies else norm
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), other)


# ------------------------------------------------------------------------------------ edits in place


class Shifts(nn.Linear):
    """A layer that edits its input, which may be one that a chunk has received."""

    def forward(self, x):
        with torch.no_grad():
            x.add_(0.125)
        return super().forward(x)


ACT = nn.Tanh()


def one_block():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(block, block, block, block)


def norms():
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*blocks)


MODELS = {
    "relu": (lambda: nn.Sequential(nn.ReLU(inplace=True), *layers()), "zb-h1"),
    "shifts": (lambda: nn.Sequential(*(Shifts(WIDTH, WIDTH) for _ in range(4))), "varuna"),
    "an activation in several places": (
        lambda: nn.Sequential(*(module for layer in layers() for module in (layer[0], ACT))),
        "interleaved",
    ),
    "one block for all chunks": (one_block, "interleaved"),
    "running statistics": (norms, "varuna"),
    "a table in several chunks": (with_table, "1f1b"),
    "copies of a buffer": (lambda: with_norms(copies=True), "1f1b"),
}


@on_ranks(2)
def test_sequences_train_as_in_one_process():
    """Layers that edit their input, modules in several places, and buffers, which one chunk may write."""
    text = "mesh.pp: expected a buffer of one chunk, got '1.running_mean', which chunks [0, 1]"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        start(with_norms, split=["2"])
    for case, (make, schedule) in MODELS.items():
        found = trained(start(make, schedule, split=["2"] if "copies" in case else None))
        assert found == pytest.approx(plain(make), rel=1e-6), case
