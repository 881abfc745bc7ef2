"""The engine's face: names, steps, batches, full parameters, reports, and what it refuses as a module."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard
from tests.distributed.models import Tiny, tiny
from tests.distributed.training import STAGES, numbers, square_loss, start
from tests.ranks import on_ranks


class Net(nn.Module):
    """Children, parameters and buffers named as what an engine has itself; [n, 7] -> [n, 3]."""

    def __init__(self):
        super().__init__()
        self.loss_fn, self.module = nn.Linear(7, 10), nn.Linear(10, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 10)) for _ in range(2))
        self.config, self.optimizer = nn.BatchNorm1d(10), nn.Linear(10, 3)
        self.lr_scheduler = nn.Parameter(torch.ones(()))
        self.second = nn.Linear(10, 10, bias=False)
        self.second.weight = self.module.weight
        self.register_buffer("global_step", torch.tensor([3, 4]))
        self.register_buffer("units", torch.full((10,), 1.5, dtype=torch.float64))
        self.register_buffer("mesh", torch.ones(10).bfloat16(), persistent=False)
        self.register_buffer("grad_norm", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.module(self.loss_fn(x) * self.units.to(x.dtype) * self.mesh.to(x.dtype)))
        for block in self.blocks:
            x = x + block(x)
        return self.optimizer(self.config(x)) * self.lr_scheduler


def net():
    torch.manual_seed(0)
    return Net()


def caught(function, *args, **kwargs):
    """The type's name and the message of what a call raises; None if nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def full(engine):
    """The whole model's parameters in the main dtype, on every rank."""
    with engine.unsharded():
        return {name: p.detach().clone() for name, p in engine.named_parameters()}


def unequal(got, want):
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return [name for name in want if not torch.equal(got[name], want[name])]


# ------------------------------------------------------------------------------------------- as a module


def names():
    model = net()
    want = {
        "parameters": [name for name, _ in model.named_parameters()],
        "tied": [name for name, _ in model.named_parameters(remove_duplicate=False)],
        "buffers": [(name, id(value)) for name, value in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
        "state": list(model.state_dict()),
    }
    engine, optimizer = start(model, "SGD")
    square_loss(engine, 0).backward()
    optimizer.step()
    got = {
        "parameters": [name for name, _ in engine.named_parameters()],
        "tied": [name for name, _ in engine.named_parameters(remove_duplicate=False)],
        "buffers": [(name, id(value)) for name, value in engine.named_buffers()],
        "modules": [name for name, _ in engine.named_modules()],
        "state": list(engine.state_dict()),
    }
    return want, got, isinstance(engine, nn.Module)


def test_parameters_buffers_and_modules_keep_their_names_without_a_prefix(ranks):
    ((want, got, is_module),) = ranks(1, names)
    assert is_module
    assert got == want
    for want, got, _ in ranks(2, names):
        assert [name for name, _ in got.pop("buffers")] == [name for name, _ in want.pop("buffers")]
        assert got == want


def states_and_moves(stage):
    """Slices of state_dict() by name, whether they are the parameters', and the refusals to move."""
    model = net()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    engine, _ = start(model, "SGD", stage=stage)
    state = engine.state_dict()
    slices = {name: (value.ndim, value.numel()) for name, value in state.items() if "running" not in name}
    own = dict(engine.named_parameters(remove_duplicate=False))
    same = all(state[name].data_ptr() == own[name].data_ptr() for name in own)
    moves = [
        caught(engine.to, torch.bfloat16),
        caught(engine.half),
        caught(engine.cpu),
        caught(engine.to, "cpu"),
        caught(engine.double),
        caught(engine.load_state_dict, whole, assign=True),
        caught(engine.module.half),
    ]
    square_loss(engine, 0).backward()  # still usable
    return slices, {name: value.numel() for name, value in whole.items()}, same, moves


@pytest.mark.parametrize("stage", STAGES)
def test_state_dict_has_this_ranks_slices_and_moves_and_casts_are_refused(ranks, stage):
    results = ranks(2, states_and_moves, stage)
    numels = results[0][1]
    buffers = {"global_step", "units", "config.num_batches_tracked"}
    for name in results[0][0]:
        if name not in buffers:
            dims, counts = zip(*(slices[name] for slices, *_ in results), strict=True)
            assert dims == (1, 1)
            assert (list(counts) == [numels[name]] * 2) if stage == 0 else (sum(counts) == numels[name])
    for _, _, same, moves in results:
        assert same
        for kind, message in moves[:5]:
            assert kind == "RuntimeError"
            assert message.startswith("a sharded model cannot be moved or cast: set Config(precision=...)")
        assert moves[5] == ("ValueError", "load_state_dict(assign=True) would replace the sharded parameters")
        assert moves[6][0] == "RuntimeError"


@on_ranks(2)
def test_a_full_state_dict_can_be_loaded_at_every_stage():
    """Where an engine differs from a full state dict that it has loaded, and what it says to a bad one."""
    failures, said = [], []
    for stage in STAGES:
        torch.manual_seed(5)
        other = Net()
        other.config.running_mean.normal_()
        state = {name: value.clone() for name, value in other.state_dict().items()}
        engine, optimizer = start(net(), "SGD", stage=stage)
        square_loss(engine, 0).backward()
        optimizer.step()
        result = engine.load_state_dict(state)
        failures += [*result.missing_keys, *result.unexpected_keys]
        failures += [
            f"stage {stage}: {name}" for name in unequal(full(engine), dict(other.named_parameters()))
        ]
        failures += [
            f"stage {stage}: {n}" for n in unequal(dict(engine.named_buffers()), dict(other.named_buffers()))
        ]
        engine.eval()
        other.eval()
        with torch.no_grad():
            x = numbers(0, 4, 7)
            failures += [] if torch.equal(engine(x), other(x)) else [f"stage {stage}: forward"]
        incomplete = OrderedDict((name, torch.zeros_like(value)) for name, value in state.items())
        del incomplete["loss_fn.weight"]
        said.append(caught(engine.load_state_dict, incomplete))
        failures += [f"after an error: {n}" for n in unequal(full(engine), dict(other.named_parameters()))]
        engine.load_state_dict(incomplete, strict=False)
        after = full(engine)
        failures += [name for name, value in after.items() if value.any() and name != "loss_fn.weight"]
        failures += [] if torch.equal(after["loss_fn.weight"], other.loss_fn.weight) else ["not strict"]
    assert failures == []
    for kind, message in said:
        assert kind == "RuntimeError"
        assert 'Missing key(s) in state_dict: "loss_fn.weight"' in message


# -------------------------------------------------------------------------------------------------- steps


@on_ranks(2)
def test_step_acts_at_the_boundary_alone_and_says_whether_parameters_changed():
    """(what step() returned, global_step, learning rate) after each of seven micro-batches of three."""
    inside, boundary = (False, False, True), (True, True, False)
    want = [
        *((*inside, 0, 8.0), (*inside, 0, 8.0), (*boundary, 1, 4.0)),
        *((*inside, 1, 4.0), (*inside, 1, 4.0), (*boundary, 2, 2.0)),
        (*inside, 2, 2.0),
    ]
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    engine, optimizer, _, _ = zeroshard.initialize(
        model,
        optimizer,
        {"gradient_accumulation_steps": 3},
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    )
    found, before = [], full(engine)
    for number in range(7):
        engine.backward(1e-6 * square_loss(engine, number))
        returned = engine.step()
        after = full(engine)
        has_changed, before = bool(unequal(after, before)), after
        has_gradients = any(p.grad is not None for p in engine.parameters())
        rate = optimizer.param_groups[0]["lr"]
        found.append((returned, has_changed, has_gradients, engine.global_step, rate))
    assert (found, engine.skipped_steps, engine.grad_norm) == (want, 0, None)


@on_ranks(2)
def test_without_an_optimizer_step_is_an_error_and_gradients_can_be_had():
    engine = zeroshard.initialize(tiny(), config={"gradient_accumulation_steps": 2}).engine
    engine.backward(square_loss(engine, 0))
    with_gradients = sum(p.grad is not None for p in engine.parameters())
    said, count = caught(engine.step), engine.global_step
    assert said == ("RuntimeError", "step() needs an optimizer: give one to zeroshard.initialize")
    assert (with_gradients, count) == (13, 0)


# -------------------------------------------------------------------------------------------- train_batch


@on_ranks(2)
def test_several_batches_are_one_step_each():
    found = []
    for together in (True, False):
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        config = {"stage": 3, "gradient_accumulation_steps": 2}
        engine = zeroshard.initialize(model, optimizer, config, loss_fn=F.mse_loss).engine
        batches = [(numbers(number, 6, 7), numbers(50 + number, 6, 3)) for number in range(3)]
        if together:
            losses = engine.train_batches(iter(batches), 3)
        else:
            losses = torch.stack([engine.train_batch(*batch) for batch in batches])
        found.append((losses, full(engine), engine.global_step))
    (losses, state, steps), (others, expected, other_steps) = found
    assert losses.shape == (3,)
    assert torch.equal(losses, others)
    assert steps == other_steps == 3
    assert unequal(state, expected) == []


@dataclass
class Output:
    """As models of other libraries return it."""

    logits: Tensor
    loss: Tensor | None = None


class WithLoss(Tiny):
    """Takes keywords and targets as `labels`; what it returns is to be chosen."""

    kind = "dict"

    def forward(self, x: Tensor, scale: float = 1.0, labels: Tensor | None = None, *, shift: object = None):
        out = super().forward(x) * scale + (0.0 if shift is None else shift)
        loss = None if labels is None else F.mse_loss(out, labels)
        if self.kind == "dict":
            return {"logits": out, "loss": loss}
        return Output(out, loss) if self.kind == "object" else out


class Arguments(NamedTuple):
    """Inputs with names, which are still positional."""

    x: Tensor
    scale: float


class Targets(NamedTuple):
    """Targets with names."""

    of: list[Tensor]
    kind: str


@on_ranks(1)
def test_what_is_no_loss_and_no_norm_is_refused_with_what_came():
    """What backward and clip_grad_norm_ say to arguments that are none."""
    engine, *_ = zeroshard.initialize(nn.Linear(2, 2), torch.optim.SGD)
    said = []
    for loss in (1.0, torch.ones(2, requires_grad=True), torch.ones(())):
        with pytest.raises(ValueError, match=r"\w") as caught:
            engine.backward(loss)
        said.append(str(caught.value).removeprefix("backward: expected a loss of one element that requires "))
    for max_norm, norm_type in ((-1, 2.0), (float("nan"), 2.0), (1.0, 0.0), (1.0, "nan")):
        with pytest.raises(ValueError, match="clip_grad_norm_: expected max_norm >= 0 and norm_type above 0"):
            engine.clip_grad_norm_(max_norm, norm_type)
    for max_norm in ("a", None):
        with pytest.raises(TypeError, match="not supported between instances"):
            engine.clip_grad_norm_(max_norm)
    assert said == [
        "a gradient, got 1.0",
        "a gradient, got a tensor of shape [2] with requires_grad=True",
        "a gradient, got a tensor of shape [] with requires_grad=False",
    ]


@on_ranks(2)
def test_train_batch_takes_a_tensor_a_tuple_or_a_mapping_and_models_that_return_their_loss():
    """Parameters after a step, for each way in which a batch may come; all should be the same."""
    x, y, shift = numbers(0, 4, 7), numbers(1, 4, 3), numbers(2, 4, 3)
    halves = [(x[:2], y[:2], shift[:2]), (x[2:], y[2:], shift[2:])]

    def engine_of(kind="dict", loss_fn=None):
        torch.manual_seed(0)
        model = WithLoss()
        model.kind = kind
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"gradient_accumulation_steps": 2}
        return zeroshard.initialize(model, optimizer, config, loss_fn=loss_fn).engine

    def of_dict(output, targets):
        return F.mse_loss(output["logits"], targets)

    def of_nested(output, targets):
        return F.mse_loss(output["logits"], targets["of"][0])

    def of_named(output, targets):
        assert targets.kind == "mean"
        return F.mse_loss(output["logits"], targets.of[0])

    by_hand = engine_of("tensor")
    for a, b, c in halves:
        by_hand.backward(F.mse_loss(by_hand(a, 0.5, shift=c), b))
        by_hand.step()
    want, found = full(by_hand), {}
    for name, engine, inputs, targets in (
        ("dict", engine_of(), {"x": x, "scale": 0.5, "shift": shift}, y),
        ("labels among the inputs", engine_of(), {"x": x, "scale": 0.5, "shift": shift, "labels": y}, None),
        ("object", engine_of("object"), {"x": x, "scale": 0.5, "shift": shift}, y),
        ("ordered", engine_of(), OrderedDict(x=x, scale=0.5, shift=shift), y),
        ("loss_fn", engine_of(loss_fn=of_dict), {"x": x, "scale": 0.5, "shift": shift}, y),
        (
            "targets in a dict",
            engine_of(loss_fn=of_nested),
            {"x": x, "scale": 0.5, "shift": shift},
            {"of": [y]},
        ),
    ):
        engine.train_batch(inputs, targets)
        found[name] = unequal(full(engine), want)
    positional, named = engine_of(loss_fn=of_dict), engine_of(loss_fn=of_named)
    positional.train_batch((x, 0.5), y)
    named.train_batch(Arguments(x, 0.5), Targets([y], "mean"))
    without_shift = engine_of("tensor")
    for a, b, _ in halves:
        without_shift.backward(F.mse_loss(without_shift(a, 0.5), b))
        without_shift.step()
    found["tuple"] = unequal(full(positional), full(without_shift))
    found["named tuples"] = unequal(full(named), full(without_shift))
    alone = engine_of("object")
    alone.train_batch((x, 0.5, y))
    found["tuple with labels"] = unequal(full(alone), full(without_shift))
    assert {name: differing for name, differing in found.items() if differing} == {}
    assert len(found) == 9


@on_ranks(2)
def test_batches_that_do_not_divide_are_refused_with_the_numbers_and_change_nothing():
    """What train_batch says to batches it cannot take, and that they change nothing."""
    multiple = "expected a batch whose dim 0 is a multiple of gradient_accumulation_steps=3, got shape "
    model = tiny()
    config = {"gradient_accumulation_steps": 3}
    engine, _, _, _ = zeroshard.initialize(model, torch.optim.SGD, config, loss_fn=F.mse_loss)
    silent = zeroshard.initialize(tiny(), torch.optim.SGD).engine
    before = full(engine)
    x, y = numbers(0, 7, 7), numbers(1, 7, 3)
    said = [
        caught(engine.train_batch, x, y),
        caught(engine.train_batch, x[:6], y),
        caught(engine.train_batch, {"x": x}, y),
        caught(engine.train_batch, (x,), y),
        caught(engine.train_batch, SimpleNamespace(x=x[:6]), y[:6]),
        caught(silent.train_batch, x),
    ]
    unchanged = not unequal(full(engine), before) and engine.global_step == silent.global_step == 0
    unchanged &= all(p.grad is None for p in engine.parameters())
    engine.backward(square_loss(engine, 0))
    engine.step()
    said.append(caught(engine.train_batch, x[:6], y[:6]))
    engine.zero_grad()
    value = engine.train_batch(x[:6], y[:6])
    is_finite, count = bool(torch.isfinite(value)), engine.global_step
    shapes = [(7, 7), (7, 3), (7, 7), (7, 7)]
    assert said[:4] == [("ValueError", f"{multiple}{shape}") for shape in shapes]
    assert said[4][0] == "ValueError"
    assert said[4][1].endswith("to cut into micro-batches, got SimpleNamespace")
    assert said[5][0] == "ValueError"
    assert said[5][1].startswith("train_batch() needs loss_fn= at initialize, or a model whose output has")
    assert said[5][1].endswith("the model returned Tensor")
    assert said[6][0] == "RuntimeError"
    assert said[6][1].startswith("train_batch() after 1 micro-batches of an unfinished step: ")
    assert (unchanged, is_finite, count) == (True, True, 1)


# ---------------------------------------------------------------------------------------------- unsharded


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_unsharded_shows_full_parameters_and_edits_are_dropped(stage):
    """What is wrong with what unsharded() shows."""
    failures = []
    model = net()
    plain = copy.deepcopy(model)
    engine, optimizer = start(model, "SGD", stage=stage)
    slices = {name: id(p) for name, p in engine.named_parameters()}
    with engine.unsharded():
        shown = dict(engine.named_parameters())
        failures += unequal(shown, dict(plain.named_parameters()))
        failures += [name for name, p in shown.items() if p.shape != plain.get_parameter(name).shape]
        if engine.module.second.weight is not engine.module.module.weight:
            failures.append("tied parameters are shown as two")
        with torch.no_grad():
            for p in shown.values():
                p.zero_()  # not written back
    if {name: id(p) for name, p in engine.named_parameters()} != slices:
        failures.append("the sharded parameters are not back")
    failures += unequal(full(engine), dict(plain.named_parameters()))
    block = engine.module.blocks[0]
    with engine.unsharded(block):
        dims = {name: p.ndim for name, p in engine.named_parameters() if name.endswith("weight")}
        failures += [f"{n} shown as {d}-D" for n, d in dims.items() if (d == 2) != n.startswith("blocks.0")]
        with engine.unsharded(engine.module.blocks[1]), engine.unsharded(block):
            failures += (
                [] if block[0].weight.ndim == engine.module.blocks[1][0].weight.ndim == 2 else ["nested"]
            )
        failures += [] if block[0].weight.ndim == 2 else ["an inner one ended the outer one"]
    failures += [] if block[0].weight.ndim == 1 else ["still shown"]
    x = numbers(0, 4, 7, rank=0)
    for _ in range(2):
        engine(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return failures


def in_place(model):
    for p in model.parameters():
        p.mul_(2.0).add_(1.0)


def through_data(model):
    for p in model.parameters():
        p.data = p.data * 2.0 + 1.0


def loaded(model):
    model.load_state_dict(
        {
            n: v * 2.0 + 1.0 if n in dict(model.named_parameters(remove_duplicate=False)) else v
            for n, v in model.state_dict().items()
        }
    )


EDITS = {"in place": in_place, "through data": through_data, "loaded": loaded}


def editing(stage, name, param_dtype):
    """Where an edited engine differs from the edited plain model: parameters, forward, next step."""
    failures = []
    model = net() if param_dtype is None else tiny()  # batch norm does not mix dtypes
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9)
    config = {"stage": stage, "precision": {"param_dtype": param_dtype}}
    engine = zeroshard.initialize(model, optimizer, config).engine
    slices = {name: id(p) for name, p in engine.named_parameters()}
    with torch.no_grad(), engine.unsharded(write_back=True):
        EDITS[name](engine.module)
    with torch.no_grad():
        in_place(plain)
    failures += unequal(full(engine), dict(plain.named_parameters()))
    if {name: id(p) for name, p in engine.named_parameters()} != slices:
        failures.append("the sharded parameters are not back")
    if param_dtype is None and model.second.weight is not model.module.weight:
        failures.append("no longer tied")
    engine.eval()
    plain.eval()
    x = numbers(0, 4, 7, rank=0)
    with torch.no_grad():
        got, want = engine(x), plain(x)
    if param_dtype is None and not torch.equal(got, want):
        failures.append("forward")
    if param_dtype is not None and not torch.allclose(
        got.float(), want, rtol=0.1, atol=0.1 * want.abs().max()
    ):
        failures.append("forward in bf16")
    if param_dtype is None:
        for net_, made in ((engine, optimizer), (plain, reference)):
            net_(x).square().mean().backward()
            made.step()
        failures += [f"after a step: {n}" for n in unequal(full(engine), dict(plain.named_parameters()))]
    return failures


@pytest.mark.long_where(stage=[0], name=["loaded", "through data"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", EDITS)
def test_written_back_edits_reach_the_shards_the_forward_and_the_next_step(ranks, stage, name):
    assert ranks(2, editing, stage, name, None) == [[], []]
    if name == "in place":
        assert ranks(2, editing, stage, name, "bf16") == [[], []]
        assert ranks(1, editing, stage, name, None) == [[]]


def half_edit(engine):
    """Only one block, the rest stays."""
    before = full(engine)
    with torch.no_grad(), engine.unsharded(engine.module.blocks[1], write_back=True):
        engine.module.blocks[1][0].weight[3:5] = 7.0
    after = full(engine)
    changed = unequal(after, before)
    rows = (after["blocks.1.0.weight"] == 7.0).all(1).nonzero().flatten().tolist()
    return changed, rows


@on_ranks(2)
def test_edits_that_differ_between_ranks_are_refused_and_none_is_written():
    """What is said to edits that differ between ranks, and whether the parameters stayed."""
    found = []
    for stage in STAGES:
        engine, optimizer = start(tiny(), "SGD", stage=stage)
        found.append(half_edit(engine))
        rank, before = dist.get_rank(), full(engine)

        def other_values(model, rank=rank):
            model.outer.bias.fill_(float(rank))

        def permuted(model, rank=rank):
            values = torch.arange(10.0)
            model.inner.bias.copy_(values if rank == 0 else values.flip(0))

        def negated_zero(model, rank=rank):
            model.inner.bias.copy_(torch.full((10,), -0.0 if rank else 0.0))

        def only_on_one(model, rank=rank):
            if rank == 1:
                model.blocks[0][2].weight[0, 0] += 1.0

        def between_parameters(model, rank=rank):
            first, second = model.inner.bias, model.blocks[0][2].bias
            (first if rank == 0 else second).fill_(9.0)
            (second if rank == 0 else first).fill_(8.0)

        for edit in (other_values, permuted, negated_zero, only_on_one, between_parameters):

            def attempt(edit=edit, engine=engine):
                with torch.no_grad(), engine.unsharded(write_back=True):
                    edit(engine.module)

            found.append((caught(attempt), unequal(full(engine), before)))
        square_loss(engine, 0).backward()
        optimizer.step()
    for partial, *refused in (found[first : first + 6] for first in range(0, len(found), 6)):
        assert partial == (["blocks.1.0.weight"], [3, 4])
        for said, changed in refused:
            assert changed == []
            assert said[0] == "RuntimeError"
            assert said[1].startswith("unsharded(write_back=True): the ranks made different edits to ")
            assert said[1].endswith("expected the same on every rank. Nothing was written")


@on_ranks(2)
def test_a_replaced_parameter_and_one_of_another_shape_are_refused_by_name():
    """What is said to another parameter object, and to data of another shape."""
    for shape in ((3, 10), (10, 3)):

        def replace(module, shape=shape):
            module.weight = nn.Parameter(torch.ones(shape))

        def change_data(module, shape=shape):
            module.weight.data = torch.ones(shape)

        for change in (replace, change_data):
            engine, _ = start(tiny(), "SGD")
            before = full(engine)

            def edit(change=change, engine=engine):
                with engine.unsharded(write_back=True):
                    change(engine.module.outer)

            if change is change_data and shape == (3, 10):
                continue
            said = caught(edit)
            assert said is not None, f"written: {change}, {shape}"
            assert said[0] in ("ValueError", "RuntimeError")
            assert "'outer.weight'" in said[1]
            assert torch.equal(engine.full_parameter("outer.weight").cpu(), before["outer.weight"])


@on_ranks(2)
def test_an_exception_inside_unsharded_passes_and_everything_is_as_before():
    """Exceptions inside unsharded(), and what is left."""
    inside = ("RuntimeError", "unsharded(write_back=True) inside unsharded() of the same parameters")
    forward = (
        "RuntimeError",
        "full parameters are available between steps, not inside a forward or backward",
    )
    one_stage = [(("LookupError", "not today"), True, [])] * 2 + [(inside, 1, []), (forward, True, [])]
    found = []
    for stage in STAGES:
        model = tiny()
        plain = copy.deepcopy(model)
        engine, optimizer = start(model, "SGD", stage=stage)
        slices = {name: id(p) for name, p in engine.named_parameters()}

        def edit_and_fail(write_back, engine=engine):
            with torch.no_grad(), engine.unsharded(write_back=write_back):
                engine.module.inner.weight.zero_()
                engine.module.outer.weight = nn.Parameter(torch.ones(3, 10))
                raise LookupError("not today")

        for write_back in (False, True):
            said = caught(edit_and_fail, write_back)
            is_back = {name: id(p) for name, p in engine.named_parameters()} == slices
            found.append((said, is_back, unequal(full(engine), dict(plain.named_parameters()))))

        def write_inside(engine=engine):
            with torch.no_grad(), engine.unsharded(engine.module.inner), engine.unsharded(write_back=True):
                engine.module.inner.weight.zero_()

        said = caught(write_inside)
        changed = unequal(full(engine), dict(plain.named_parameters()))
        found.append((said, engine.module.inner.weight.ndim, changed))

        def show_in_forward(module, args, engine=engine):
            with engine.unsharded():
                pass

        hook = engine.module.blocks[0].register_forward_pre_hook(show_in_forward)
        found.append((caught(engine, numbers(0, 2, 7)), True, []))
        hook.remove()
        square_loss(engine, 0).backward()
        optimizer.step()
    assert found == one_stage * len(STAGES)


# -------------------------------------------------------------------------------------- full_state_dict


class Extra(Net):
    """With what get_extra_state() gives, and a frozen part."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.seen = {"words": ["a"]}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def whole_state(stage, dtype, param_dtype):
    """What is wrong with full_state_dict() after a step, against the plain model's state_dict()."""
    torch.manual_seed(0)
    model = Extra().to(dtype)
    plain = copy.deepcopy(model)
    keys = list(plain.state_dict())
    config = {"stage": stage, "precision": {"param_dtype": param_dtype}}
    engine = zeroshard.initialize(model, torch.optim.SGD, config).engine
    state = engine.full_state_dict()
    if dist.get_rank():
        return state
    failures = [] if list(state) == keys else [f"keys {list(state)}"]
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    for name, want in plain.state_dict().items():
        if not isinstance(want, Tensor):
            failures += [] if state[name] == {"words": ["a"]} and state[name] is not model.seen else [name]
            continue
        kept = want.dtype if name not in parameters else torch.promote_types(want.dtype, torch.float32)
        value = state[name]
        if (value.dtype, value.shape, value.device.type) != (kept, want.shape, "cpu"):
            failures.append(f"{name}: {value.dtype} {tuple(value.shape)}")
        elif not torch.equal(value, want.to(kept)):
            failures.append(f"{name} differs")
        if value.requires_grad or type(value) is not Tensor:
            failures.append(f"{name} is not a plain tensor")
        if value.untyped_storage().nbytes() != value.numel() * value.element_size():
            failures.append(f"{name} keeps more alive than itself")
    for value in state.values():  # a copy
        if isinstance(value, Tensor):
            value.zero_()
    state["_extra_state"]["words"].append("b")
    failures += [] if model.seen == {"words": ["a"]} else ["extra state is shared"]
    failures += [name for name, b in engine.named_buffers() if not torch.equal(b, plain.get_buffer(name))]
    return failures


@pytest.mark.parametrize(
    ("stage", "dtype", "param_dtype"),
    [(0, torch.float32, None), (3, torch.float32, "bf16"), (3, torch.bfloat16, None)],
)
def test_full_state_dict_has_the_models_own_keys_and_values_on_rank_0(ranks, stage, dtype, param_dtype):
    failures, other = ranks(2, whole_state, stage, dtype, param_dtype)
    if param_dtype:  # frozen parameters have no main parameters: they are those that compute
        failures = [failure for failure in failures if not failure.startswith("blocks.1.")]
    assert (failures, other) == ([], {})
