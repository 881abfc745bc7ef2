"""Code of a user around chunks: hooks on modules that are cut, buffers of two chunks, edits in place.

Losses are compared within 1e-6, because an engine adds them up in float32.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import zeroshard
from tests.distributed.training import refused
from tests.parallel.pipeline.runs import build, pair_of, sgd, train_plainly
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.cut import require_handed_on
from zeroshard.parallel.pipeline.profile import SampleBatch
from zeroshard.parallel.pipeline.traced import trace

WIDTH, ROWS, STEPS, NUM = 6, 8, 2, 4
CPU = torch.device("cpu")


def layers(num=4):
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num)]


batch = partial(pair_of, ROWS, WIDTH)


def made(make):
    torch.manual_seed(0)
    return make().double()


def pipelined(make, schedule="1f1b", *, trace=False, split=None):
    pipeline = {"schedule": schedule, "num_microbatches": NUM, "trace": trace}
    pipeline |= {"balance": "memory"} if split is None else {"split": split}
    config = {"stage": 1, "mesh": {"pp": 2}, "pipeline": pipeline, "micro_batch_size": ROWS // NUM}
    data = list(zip(*batch(0), strict=True)) if trace else None
    return zeroshard.initialize(made(make), sgd, config, loss_fn=F.mse_loss, training_data=data).engine


def trained(engine):
    """Losses of steps and of an evaluation."""
    losses = [engine.train_batch(*batch(number)).item() for number in range(STEPS)]
    losses.append(engine.eval_batch(*batch(STEPS)).item())
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


TIED = ("0.weight", "3.weight")


def tied():
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    return nn.Sequential(first, *layers(2), last)


def bound(parameter):
    parameter.grad.clamp_(-1e-3, 1e-3)


@on_ranks(2)
def test_hooks_of_a_tied_parameter_are_refused_where_they_would_see_a_part_of_the_gradient():
    engine = pipelined(tied)
    shared, *_ = (parameter for name, parameter in engine.named_parameters() if name in TIED)
    for register in (shared.register_hook, shared.register_post_accumulate_grad_hook):
        with pytest.raises(RuntimeError, match=r"several pipeline ranks use .*register_step_pre_hook"):
            register(bound)
    engine.close(restore=False)
    (x, y), model = batch(0), made(tied)
    optimizer = sgd(model.parameters())
    F.mse_loss(model(x), y).backward()
    bound(model[0].weight)
    optimizer.step()
    for schedule in ("1f1b", "zbv"):
        engine = pipelined(tied, schedule)
        own = [parameter for name, parameter in engine.named_parameters() if name in TIED]
        if schedule == "zbv":  # one rank has both, and the other none
            for parameter in own:
                parameter.register_post_accumulate_grad_hook(bound)
        else:
            engine.optimizer.register_step_pre_hook(lambda *_, own=own: bound(own[0]))
        engine.train_batch(x, y)
        with engine.unsharded():
            for name, parameter in engine.module.named_parameters():
                if name in TIED:
                    torch.testing.assert_close(parameter.data, model[0].weight.data, rtol=0, atol=1e-12)


class Plain(nn.Module):
    """A model that is no Sequential, with a buffer that its forward uses in a given way."""

    def __init__(self, use=None):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("step", torch.ones(1))
        self.use = use

    def forward(self, x):
        step = 1.0
        if self.use in ("read", "read first"):
            step = self.step * 1.0
        if self.use == "in place":
            step = self.step.add_(1.0)
        if self.use == "copied":
            step = self.step + 1.0
            self.step.copy_(step)
        x = self.b(torch.tanh(self.a(x) / step))
        if self.use == "read first":
            self.step.add_(1.0)

        return self.c(torch.tanh(x)) / (self.step if self.use == "read" else step)


@pytest.mark.parametrize("name", ["", "b"])
def test_hooks_are_refused_in_a_trace(name):
    model = Plain()
    model.get_submodule(name).register_forward_hook(lambda m, args, output: output * 0.5)
    with pytest.raises(ValueError, match=r"with pipeline\.trace, write it into a forward"):
        trace(model, SampleBatch((torch.rand(2, WIDTH),), {}), ["b"])


# ------------------------------------------------------------------------------- a forward of its own


class Residual(nn.Sequential):
    def forward(self, input):
        return input + 2.0 * super().forward(input)


class Named(nn.Sequential):
    """A class that makes its layers, and computes as any Sequential."""

    def __init__(self):
        super().__init__(*layers())


@on_ranks(2)
def test_a_sequence_with_a_forward_of_its_own_is_refused():
    message = refused(pipelined, lambda: Residual(*layers()))
    assert "got a Residual: it is a Sequential with a forward of its own. pipeline.trace=True" in message
    assert trained(pipelined(Named)) == pytest.approx(plain(Named), rel=1e-6)


@pytest.mark.long
@on_ranks(2)
def test_a_trace_cuts_a_sequence_with_a_forward_of_its_own():
    losses = trained(pipelined(lambda: Residual(*layers()), trace=True, split=["2"]))
    assert losses == pytest.approx(plain(lambda: Residual(*layers())), rel=1e-6)


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
    model = Reads(build("llama").config)
    with pytest.raises(ValueError, match=rf"got a Reads: .*it reads '{name}'.*pipeline\.trace=True cuts"):
        require_handed_on(Chunked(model), CPU)
    assert model.lm_head.weight.shape == model.model.embed_tokens.weight.shape  # it is as it was


def test_a_parameter_outside_of_the_modules_that_chunks_have_is_refused_by_name():
    model = build("llama")
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


def with_copies():
    return with_norms(copies=True)


@on_ranks(2)
def test_a_buffer_that_two_chunks_may_write_is_refused_and_a_table_is_not():
    message = refused(pipelined, with_norms, split=["2"])
    text = "mesh.pp: expected a buffer of one chunk, got '1.running_mean', which chunks [0, 1]"
    assert message.startswith(text)
    assert trained(pipelined(with_copies, split=["2"])) == pytest.approx(plain(with_copies), rel=1e-6)
    assert trained(pipelined(with_table)) == pytest.approx(plain(with_table), rel=1e-6)


def test_a_traced_buffer_that_one_chunk_writes_and_another_one_reads_is_refused():
    with pytest.raises(ValueError, match=r"a written buffer in one chunk, got 'step' in \[0, 1\]"):
        trace(Plain("read first"), SampleBatch((torch.rand(2, WIDTH),), {}), ["b"])


@pytest.mark.long_where(use=["read", "copied"])
@pytest.mark.parametrize("use", ["read", "in place", "copied"])
def test_a_traced_chunk_hands_on_the_value_that_a_buffer_has(use):
    """All forwards of the first chunk run before those of the second one, as in GPipe."""
    pieces = batch(0)[0].chunk(NUM)
    want, found = made(lambda: Plain(use)), []
    for own in range(2):
        model = made(lambda: Plain(use))
        found.append(trace(model, SampleBatch((pieces[0],), {}), ["b"]))
        found[own].keep([], [own])
    values = [found[0](0, (), {"x": piece}) for piece in pieces]
    for piece, value in zip(pieces, values, strict=True):
        torch.testing.assert_close(found[1](1, value, {"x": piece}), want(piece))


# ------------------------------------------------------------------------------------ edits in place


def one_activation():
    act = nn.Tanh()
    return nn.Sequential(*(module for layer in layers() for module in (layer[0], act)))


def one_block():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(block, block, block, block)


def norms():
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*blocks)


MODELS = {
    "relu": (lambda: nn.Sequential(nn.ReLU(inplace=True), *layers()), "zb-h1"),
    "an activation in several places": (one_activation, "interleaved"),
    "one block for all chunks": (one_block, "interleaved"),
    "running statistics": (norms, "varuna"),
}


@on_ranks(2)
def test_a_sequence_trains_as_in_one_process():
    """Layers that edit their input, and modules in several places."""
    for case, (make, schedule) in MODELS.items():
        assert trained(pipelined(make, schedule)) == pytest.approx(plain(make), rel=1e-6), case
