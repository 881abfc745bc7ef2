"""Models of any structure, cut by a trace: they train over pipeline ranks as in one process.

Parameters are compared within 1e-9 after three steps in float64: the same operations run, and micro-batches
are added up in another order. Losses are compared within 1e-6, because an engine adds them up in float32.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeroshard
from tests.distributed.training import part_of, seeded
from tests.parallel.pipeline.runs import train_plainly
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.profile import SampleBatch
from zeroshard.parallel.pipeline.traced import trace

ROWS, LENGTH, WIDTH, WORDS, STEPS = 8, 5, 8, 11, 3


class Block(nn.Module):
    """A block that also adds the embeddings, so that these go past the chunks between."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, embedded):
        return self.norm(torch.tanh(self.dense(x))) * self.scale + embedded


class Inner(nn.Module):
    """A module that is cut in its middle, and has a parameter and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("factor", torch.full((WIDTH,), 0.5))

    def forward(self, embedded):
        x = embedded * self.factor
        for layer in self.layers:
            x = layer(x, embedded)
        return x * self.gain


class Model(nn.Module):
    """Two tied pairs, an argument that only the end needs, a parameter that nothing uses.

    It has a parameter and buffers of its own, counts its forwards, and makes a tensor of numbers.
    """

    def __init__(self, dropout=0.0):
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, WIDTH), Inner()
        self.tanh = nn.Tanh()  # it runs twice
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.inner.layers[3].scale = self.inner.layers[0].scale  # on the last rank it comes before the head
        self.unused = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("places", torch.linspace(0, 1, LENGTH)[:, None])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens, mask):
        self.calls.add_(1)
        x = self.dropout(self.inner(self.tanh(self.words(tokens) * self.gain + self.places)))
        x = x * torch.tensor([0.5, 1.0], dtype=x.dtype).sum()
        return self.head(self.tanh(x) * self.gain * mask[..., None])


def loss_of(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def batch_of(number, rows=ROWS):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (rows, LENGTH), generator=generator)
    mask = torch.rand(rows, LENGTH, generator=generator, dtype=torch.float64)
    return {"tokens": tokens, "mask": mask}, tokens.roll(1, 1)


def samples(rows=ROWS):
    named, targets = batch_of(0, rows)
    return [({key: value[row] for key, value in named.items()}, targets[row]) for row in range(rows)]


def plain():
    model = seeded(Model).double()

    def computed(model, named, targets):
        return loss_of(model(**named), targets)

    losses, _ = train_plainly(model, map(batch_of, range(STEPS)), computed, sgd)
    losses.append(computed(model, *batch_of(STEPS)).item())
    return losses, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def traced(split, *, pp=2, num=4, dropout=0.0, **others):
    micro = ROWS // num // others.pop("copies", 1)
    pipeline = {"num_microbatches": num, "split": split, "trace": True} | others.pop("pipeline", {})
    config = {"mesh": {"pp": pp}, "pipeline": pipeline, "micro_batch_size": micro, **others}
    model = seeded(Model, dropout).double()
    return zeroshard.initialize(model, sgd, config, loss_fn=loss_of, training_data=samples()).engine


def trained(split, options):
    engine = traced(split, **options)
    losses = []
    for number in range(STEPS):
        named, targets = batch_of(number)
        named = {key: part_of(engine, value) for key, value in named.items()}
        losses.append(engine.train_batch(named, part_of(engine, targets)).item())
    named, targets = batch_of(STEPS)
    named = {key: part_of(engine, value) for key, value in named.items()}
    losses.append(engine.eval_batch(named, part_of(engine, targets)).item())
    with pytest.raises(ValueError, match="expected arguments as those that were traced"):
        engine.train_batch(*batch_of(0, 4 * ROWS))
    with engine.unsharded():
        state = {n: p.detach().clone() for n, p in engine.module.named_parameters(remove_duplicate=False)}
    whole = engine.full_state_dict()
    return losses, state, whole


FOUR = ["inner.layers.0", "inner.layers.2", "head"]
CASES = {
    "in a block": (2, ["inner.layers.1.norm"], {}),
    "two copies": (4, ["inner.layers.2"], {"copies": 2}),
    "four chunks": (2, FOUR, {"pipeline": {"schedule": "interleaved"}}),
    "halves": (2, ["inner.layers.2"], {"pipeline": {"schedule": "zb-h1"}}),
    "recomputed": (2, ["inner.layers.2"], {"pipeline": {"schedule": "varuna"}}),
}


@pytest.mark.long_where(case=["in a block", "halves", "two copies", "recomputed"])
@pytest.mark.parametrize("case", CASES)
def test_a_traced_model_trains_as_in_one_process(ranks, case):
    num_ranks, split, options = CASES[case]
    want_losses, want = plain()
    names, found = set(), ranks(num_ranks, trained, split, {"stage": 3, **options})
    for losses, state, _ in found:
        assert losses == pytest.approx(want_losses, rel=1e-6)
        names |= state.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-9, msg=name)
    assert names == want.keys()
    whole = found[0][2]
    assert want.keys() | {"places", "calls", "inner.factor"} == whole.keys()
    assert whole["calls"] == 4 * (STEPS + 1)  # micro-batches, whether they are recomputed or not
    for name, value in want.items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-9, msg=name)


def test_chunks_compute_the_model_and_its_gradients_with_its_own_parameters():
    model, want = seeded(Model).double().eval(), seeded(Model).double()
    named, _ = batch_of(0)
    before = [dict(vars(module)) for module in model.modules()]
    found = trace(model, SampleBatch((), named), ["inner.layers.1", "inner.layers.3"])
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert module.training is attributes["training"]
    values = ()
    for chunk in range(3):
        values = found(chunk, values, named)
    output = want(**named)
    assert torch.equal(values, output)
    values.square().mean().backward()
    output.square().mean().backward()
    for (name, one), (_, other) in zip(model.named_parameters(), want.named_parameters(), strict=True):
        assert dict(found.model.named_parameters())[name] is one
        assert (one.grad is None) == (other.grad is None) == name.startswith("unused")
        assert one.grad is None or torch.equal(one.grad, other.grad)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.one(self.other(self.one(x)))


def test_a_module_that_runs_twice_is_refused():
    with pytest.raises(ValueError, match="to run once in a forward, but 'one' runs"):
        trace(Twice(), SampleBatch((torch.rand(2, 4),), {}), ["other"])


class TwoOutputs(nn.Sequential):
    def forward(self, x):
        return self[0](x), self[1](x)


def test_a_pattern_begins_a_chunk_at_the_one_module_that_it_fits():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    sample = SampleBatch((torch.rand(2, 4),), {})
    for pattern in ("1.0", "1.[0]"):
        assert trace(model, sample, [pattern]).outline.blocks == ("beginning", "1.0")
    with pytest.raises(
        ValueError, match=r"split: '\?\.0' fits '0\.0', '1\.0' of '0', '0\.0', .*; expected one"
    ):
        trace(model, sample, ["?.0"])


def test_a_name_that_the_model_lacks_and_two_outputs_are_refused():
    model, sample = TwoOutputs(nn.Linear(4, 4), nn.Linear(4, 4)), SampleBatch((torch.rand(2, 4),), {})
    with pytest.raises(ValueError, match="'2' fits none of '0', '1'; expected one"):
        trace(model, sample, ["2"])
    with pytest.raises(ValueError, match="expected a model that returns one tensor"):
        trace(model, sample, ["1"])


@pytest.mark.long
@on_ranks(2)
def test_a_unit_that_is_cut_is_refused():
    with pytest.raises(ValueError, match="whose forward is never called"):
        traced(["inner.layers.2"], units=["Inner"])


@pytest.mark.long
@on_ranks(2)
def test_a_model_that_evaluates_in_another_way_is_refused():
    engine = traced(["inner.layers.2"], dropout=0.5)
    with pytest.raises((ValueError, RuntimeError), match="this model computes otherwise in eval mode"):
        engine.eval_batch(*batch_of(0))
