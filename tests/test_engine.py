"""The engine's face: names, steps, batches, full parameters, reports, and what it refuses as a module."""

import copy
import re
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard
from tests.distributed.models import Tiny, tiny
from tests.distributed.training import SOME_STAGES, different, numbers, seeded, square_loss, start, take_steps
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


net = partial(seeded, Net)


def full(engine):
    """The whole model's parameters in the main dtype, on every rank."""
    with engine.unsharded():
        return {name: p.detach().clone() for name, p in engine.named_parameters()}


# ------------------------------------------------------------------------------------------- as a module


def listing(module):
    """The names of all that a module has."""
    tied = module.named_parameters(remove_duplicate=False)
    pairs = (module.named_parameters(), tied, module.named_buffers(), module.named_modules())
    return [list(dict(names)) for names in pairs] + [list(module.state_dict())]


@on_ranks(1, 2)
def test_parameters_buffers_and_modules_keep_their_names_without_a_prefix(num_ranks):
    model = net()
    want, buffers = listing(model), list(map(id, model.buffers()))
    engine, optimizer = start(model, "SGD")
    square_loss(engine, 0).backward()
    optimizer.step()
    assert isinstance(engine, nn.Module)
    assert listing(engine) == want
    assert num_ranks > 1 or list(map(id, engine.buffers())) == buffers  # else they become those of rank 0


@pytest.mark.parametrize("stage", SOME_STAGES)
@on_ranks(2)
def test_state_dict_has_this_ranks_slices_and_moves_and_casts_are_refused(stage):
    whole, (engine, _) = copy.deepcopy(net().state_dict()), start(net(), "SGD", stage=stage)
    state, own = engine.state_dict(), dict(engine.named_parameters(remove_duplicate=False))
    for name, parameter in own.items():
        assert state[name].data_ptr() == parameter.data_ptr()
        total = torch.tensor(state[name].numel())
        dist.all_reduce(total)
        assert state[name].ndim == 1
        assert total.item() == whole[name].numel() * (1 if stage else 2)
    text = r"^a sharded model cannot be moved or cast: set Config\(precision"
    for move in (lambda: engine.to(torch.bfloat16), engine.half, engine.cpu, lambda: engine.to("cpu")):
        with pytest.raises(RuntimeError, match=text):
            move()
    text = r"^load_state_dict\(assign=True\) would replace the sharded parameters"
    with pytest.raises(ValueError, match=text):
        engine.load_state_dict(whole, assign=True)
    with pytest.raises(RuntimeError):
        engine.module.half()
    square_loss(engine, 0).backward()  # still usable


@on_ranks(2)
def test_a_full_state_dict_can_be_loaded_at_every_stage():
    for stage in SOME_STAGES:
        other = seeded(Net, seed=5)
        other.config.running_mean.normal_()
        state = copy.deepcopy(other.state_dict())
        engine, optimizer = start(net(), "SGD", stage=stage)
        square_loss(engine, 0).backward()
        optimizer.step()
        result = engine.load_state_dict(state)
        assert [*result.missing_keys, *result.unexpected_keys] == []
        assert different(full(engine), dict(other.named_parameters())) == []
        assert different(dict(engine.named_buffers()), dict(other.named_buffers())) == []
        engine.eval()
        other.eval()
        with torch.no_grad():
            x = numbers(0, 4, 7)
            assert torch.equal(engine(x), other(x))
        incomplete = OrderedDict((name, torch.zeros_like(value)) for name, value in state.items())
        del incomplete["loss_fn.weight"]
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "loss_fn.weight"'):
            engine.load_state_dict(incomplete)
        assert different(full(engine), dict(other.named_parameters())) == []
        engine.load_state_dict(incomplete, strict=False)
        after = full(engine)
        assert torch.equal(after.pop("loss_fn.weight"), other.loss_fn.weight)
        assert not any(value.any() for value in after.values())


# -------------------------------------------------------------------------------------------------- steps


@on_ranks(2)
def test_step_acts_at_the_boundary_alone_and_says_whether_parameters_changed():
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    config = {"gradient_accumulation_steps": 3}
    engine, optimizer, _, _ = zeroshard.initialize(model, optimizer, config, lr_scheduler=schedule)
    before = full(engine)
    for number in range(7):
        engine.backward(1e-6 * square_loss(engine, number))
        is_boundary = number % 3 == 2
        assert engine.step() == is_boundary
        before, last = full(engine), before
        assert bool(different(before, last)) == is_boundary
        assert any(p.grad is not None for p in engine.parameters()) == (not is_boundary)
        assert engine.global_step == (number + 1) // 3
        assert optimizer.param_groups[0]["lr"] == 8.0 * 0.5**engine.global_step
    assert (engine.skipped_steps, engine.grad_norm) == (0, None)


@on_ranks(2)
def test_without_an_optimizer_step_is_an_error_and_gradients_can_be_had():
    engine = zeroshard.initialize(tiny(), config={"gradient_accumulation_steps": 2}).engine
    engine.backward(square_loss(engine, 0))
    assert sum(p.grad is not None for p in engine.parameters()) == 13
    with pytest.raises(RuntimeError, match=r"step\(\) needs an optimizer: give one to zeroshard.initialize"):
        engine.step()
    assert engine.global_step == 0


# -------------------------------------------------------------------------------------------- train_batch


@on_ranks(2)
def test_several_batches_are_one_step_each():
    batches = [(numbers(number, 6, 7), numbers(50 + number, 6, 3)) for number in range(3)]
    config = {"stage": 3, "gradient_accumulation_steps": 2}
    together, alone = (
        zeroshard.initialize(tiny(), torch.optim.AdamW, config, loss_fn=F.mse_loss).engine for _ in range(2)
    )
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        together.train_batches(iter(batches))
    losses = together.train_batches(iter(batches), 3)
    assert losses.shape == (3,)
    assert losses.tolist() == [alone.train_batch(*batch).item() for batch in batches]
    assert together.global_step == alone.global_step == 3
    assert different(full(together), full(alone)) == []


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
    x: Tensor
    scale: float


class Targets(NamedTuple):
    of: list[Tensor]
    kind: str


@on_ranks(1)
def test_what_is_no_loss_and_no_norm_is_refused_with_what_came():
    engine, *_ = zeroshard.initialize(nn.Linear(2, 2), torch.optim.SGD)
    for loss, came in (
        (1.0, "1.0"),
        (torch.ones(2, requires_grad=True), "a tensor of shape [2] with requires_grad=True"),
        (torch.ones(()), "a tensor of shape [] with requires_grad=False"),
    ):
        text = f"backward: expected a loss of one element that requires a gradient, got {came}"
        with pytest.raises(ValueError, match=re.escape(text)):
            engine.backward(loss)
    for max_norm, norm_type in ((-1, 2.0), (float("nan"), 2.0), (1.0, 0.0), (1.0, "nan")):
        with pytest.raises(ValueError, match="clip_grad_norm_: expected max_norm >= 0 and norm_type above 0"):
            engine.clip_grad_norm_(max_norm, norm_type)
    with pytest.raises(TypeError, match="not supported between instances"):
        engine.clip_grad_norm_("a")


@on_ranks(2)
def test_train_batch_takes_a_tensor_a_tuple_or_a_mapping_and_models_that_return_their_loss():
    """Parameters after a step are the same in whichever way a batch comes."""
    x, y, shift = numbers(0, 4, 7), numbers(1, 4, 3), numbers(2, 4, 3)

    def engine_of(kind="dict", loss_fn=None):
        model = seeded(WithLoss)
        model.kind = kind
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"gradient_accumulation_steps": 2}
        return zeroshard.initialize(model, optimizer, config, loss_fn=loss_fn).engine

    def by_hand(**more):
        engine = engine_of("tensor")
        for rows in (slice(2), slice(2, 4)):
            halves = {name: value[rows] for name, value in more.items()}
            engine.backward(F.mse_loss(engine(x[rows], 0.5, **halves), y[rows]))
            engine.step()
        return full(engine)

    def of_dict(output, targets):
        return F.mse_loss(output["logits"], targets)

    def of_nested(output, targets):
        return F.mse_loss(output["logits"], targets["of"][0])

    def of_named(output, targets):
        assert targets.kind == "mean"
        return F.mse_loss(output["logits"], targets.of[0])

    named, shifted, plain = {"x": x, "scale": 0.5, "shift": shift}, by_hand(shift=shift), by_hand()
    for engine, inputs, targets, want in (
        (engine_of(), named, y, shifted),
        (engine_of(), named | {"labels": y}, None, shifted),
        (engine_of("object"), named, y, shifted),
        (engine_of(), OrderedDict(named), y, shifted),
        (engine_of(loss_fn=of_dict), named, y, shifted),
        (engine_of(loss_fn=of_nested), named, {"of": [y]}, shifted),
        (engine_of(loss_fn=of_dict), (x, 0.5), y, plain),
        (engine_of(loss_fn=of_named), Arguments(x, 0.5), Targets([y], "mean"), plain),
        (engine_of("object"), (x, 0.5, y), None, plain),
    ):
        engine.train_batch(inputs, targets)
        assert different(full(engine), want) == []


@on_ranks(2)
def test_batches_that_do_not_divide_are_refused_with_the_numbers_and_change_nothing():
    multiple = "expected a batch whose dim 0 is a multiple of gradient_accumulation_steps=3, got shape "
    config = {"gradient_accumulation_steps": 3}
    engine = zeroshard.initialize(tiny(), torch.optim.SGD, config, loss_fn=F.mse_loss).engine
    silent = zeroshard.initialize(tiny(), torch.optim.SGD).engine
    before = full(engine)
    x, y = numbers(0, 7, 7), numbers(1, 7, 3)
    for one, inputs, targets, text in (
        (engine, x, y, f"{multiple}(7, 7)"),
        (engine, x[:6], y, f"{multiple}(7, 3)"),
        (engine, {"x": x}, y, f"{multiple}(7, 7)"),
        (engine, (x,), y, f"{multiple}(7, 7)"),
        (engine, SimpleNamespace(x=x[:6]), y[:6], "to cut into micro-batches, got SimpleNamespace"),
        (silent, x, None, "train_batch() needs loss_fn= at initialize, or a model whose output has"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            one.train_batch(inputs, targets)
    assert different(full(engine), before) == []
    assert engine.global_step == silent.global_step == 0
    assert all(p.grad is None for p in engine.parameters())
    take_steps(engine, [0])
    with pytest.raises(RuntimeError, match=r"^train_batch\(\) after 1 micro-batches of an unfinished step: "):
        engine.train_batch(x[:6], y[:6])
    engine.zero_grad()
    assert torch.isfinite(engine.train_batch(x[:6], y[:6]))
    assert engine.global_step == 1


# ---------------------------------------------------------------------------------------------- unsharded


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
@on_ranks(2)
def test_unsharded_shows_full_parameters_and_edits_are_dropped(stage):
    model = net()
    plain = copy.deepcopy(model)
    engine, optimizer = start(model, "SGD", stage=stage)
    slices = {name: id(p) for name, p in engine.named_parameters()}
    with engine.unsharded():
        shown = dict(engine.named_parameters())
        assert different(shown, dict(plain.named_parameters())) == []
        assert engine.module.second.weight is engine.module.module.weight
        with torch.no_grad():
            for p in shown.values():
                p.zero_()  # not written back
    assert {name: id(p) for name, p in engine.named_parameters()} == slices
    assert different(full(engine), dict(plain.named_parameters())) == []
    block, other = engine.module.blocks
    with engine.unsharded(block):
        dims = {name: p.ndim for name, p in engine.named_parameters() if name.endswith("weight")}
        assert all((ndim == 2) == name.startswith("blocks.0") for name, ndim in dims.items())
        with engine.unsharded(other), engine.unsharded(block):
            assert block[0].weight.ndim == other[0].weight.ndim == 2
        assert block[0].weight.ndim == 2, "an inner one ended the outer one"
    assert block[0].weight.ndim == 1
    for _ in range(2):
        square_loss(engine, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_place(model):
    for p in model.parameters():
        p.mul_(2.0).add_(1.0)


def through_data(model):
    for p in model.parameters():
        p.data = p.data * 2.0 + 1.0


def loaded(model):
    own = dict(model.named_parameters(remove_duplicate=False))
    model.load_state_dict({n: v * 2.0 + 1.0 if n in own else v for n, v in model.state_dict().items()})


EDITS = {"in place": in_place, "through data": through_data, "loaded": loaded}


@pytest.mark.parametrize("param_dtype", [None, "bf16"])
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
@on_ranks(2)
def test_written_back_edits_reach_the_shards_the_forward_and_the_next_step(stage, name, param_dtype):
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
    assert different(full(engine), dict(plain.named_parameters())) == []
    assert {name: id(p) for name, p in engine.named_parameters()} == slices
    engine.eval()
    plain.eval()
    x = numbers(0, 4, 7, rank=0)
    with torch.no_grad():
        got, want = engine(x), plain(x)
    if param_dtype is not None:
        assert torch.allclose(got.float(), want, rtol=0.1, atol=0.1 * want.abs().max())
        return
    assert torch.equal(got, want)
    assert model.second.weight is model.module.weight
    for net_, made in ((engine, optimizer), (plain, reference)):
        net_(x).square().mean().backward()
        made.step()
    assert different(full(engine), dict(plain.named_parameters())) == []


@on_ranks(2)
def test_edits_that_differ_between_ranks_are_refused_and_none_is_written():
    rank, values = dist.get_rank(), torch.arange(10.0)

    def between_parameters(model):
        first, second = model.inner.bias, model.blocks[0][2].bias
        (first if rank == 0 else second).fill_(9.0)
        (second if rank == 0 else first).fill_(8.0)

    edits = (
        lambda model: model.outer.bias.fill_(float(rank)),
        lambda model: model.inner.bias.copy_(values if rank == 0 else values.flip(0)),
        lambda model: model.inner.bias.fill_(-0.0 if rank else 0.0),
        lambda model: model.blocks[0][2].weight[0, 0].add_(rank),  # on one rank alone
        between_parameters,
    )
    for stage in SOME_STAGES:
        engine, optimizer = start(tiny(), "SGD", stage=stage)
        before = full(engine)
        with torch.no_grad(), engine.unsharded(engine.module.blocks[1], write_back=True):
            engine.module.blocks[1][0].weight[3:5] = 7.0
        after = full(engine)
        assert different(after, before) == ["blocks.1.0.weight"]
        assert (after["blocks.1.0.weight"] == 7.0).all(1).nonzero().flatten().tolist() == [3, 4]
        for edit in edits:
            text = r"^unsharded\(write_back=True\): the ranks made different edits to .*Nothing was written$"
            with pytest.raises(RuntimeError, match=text), torch.no_grad(), engine.unsharded(write_back=True):
                edit(engine.module)
            assert different(full(engine), after) == []
        square_loss(engine, 0).backward()
        optimizer.step()


@on_ranks(2)
def test_a_replaced_parameter_and_one_of_another_shape_are_refused_by_name():
    for change in (
        lambda module: setattr(module, "weight", nn.Parameter(torch.ones(3, 10))),
        lambda module: setattr(module, "weight", nn.Parameter(torch.ones(10, 3))),
        lambda module: setattr(module.weight, "data", torch.ones(10, 3)),
    ):
        engine, _ = start(tiny(), "SGD")
        before = full(engine)
        text = "'outer.weight'"
        with pytest.raises((ValueError, RuntimeError), match=text), engine.unsharded(write_back=True):
            change(engine.module.outer)
        assert torch.equal(engine.full_parameter("outer.weight").cpu(), before["outer.weight"])


@on_ranks(2)
def test_an_exception_inside_unsharded_passes_and_everything_is_as_before():
    for stage in SOME_STAGES:
        model = tiny()
        plain = dict(copy.deepcopy(model).named_parameters())
        engine, optimizer = start(model, "SGD", stage=stage)
        slices = {name: id(p) for name, p in engine.named_parameters()}

        def edit_and_fail(write_back, engine=engine):
            with torch.no_grad(), engine.unsharded(write_back=write_back):
                engine.module.inner.weight.zero_()
                engine.module.outer.weight = nn.Parameter(torch.ones(3, 10))
                raise LookupError("not today")

        for write_back in (False, True):
            with pytest.raises(LookupError, match="not today"):
                edit_and_fail(write_back)
            assert {name: id(p) for name, p in engine.named_parameters()} == slices
            assert different(full(engine), plain) == []
        text = r"^unsharded\(write_back=True\) inside unsharded\(\) of the same parameters"
        with engine.unsharded(engine.module.inner), pytest.raises(RuntimeError, match=text):
            engine.unsharded(write_back=True).__enter__()
        assert engine.module.inner.weight.ndim == 1
        assert different(full(engine), plain) == []

        def show_in_forward(module, args, engine=engine):
            with engine.unsharded():
                pass

        hook = engine.module.blocks[0].register_forward_pre_hook(show_in_forward)
        with pytest.raises(RuntimeError, match="full parameters are available between steps"):
            engine(numbers(0, 2, 7))
        hook.remove()
        square_loss(engine, 0).backward()
        optimizer.step()


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


@pytest.mark.parametrize(
    ("stage", "dtype", "param_dtype"),
    [(0, torch.float32, None), (3, torch.float32, "bf16"), (3, torch.bfloat16, None)],
)
@on_ranks(2)
def test_full_state_dict_has_the_models_own_keys_and_values_on_rank_0(stage, dtype, param_dtype):
    model = seeded(Extra).to(dtype)
    plain = copy.deepcopy(model)
    config = {"stage": stage, "precision": {"param_dtype": param_dtype}}
    engine = zeroshard.initialize(model, torch.optim.SGD, config).engine
    state, wanted = engine.full_state_dict(), plain.state_dict()
    if dist.get_rank():
        assert state == {}
        return
    assert list(state) == list(wanted)
    assert state["_extra_state"] == wanted.pop("_extra_state") == {"words": ["a"]}
    state.pop("_extra_state")["words"].append("b")
    assert model.seen == {"words": ["a"]}
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    for name, want in wanted.items():
        kept = want.dtype if name not in parameters else torch.promote_types(want.dtype, torch.float32)
        value = state[name]
        assert (type(value), value.dtype, value.device.type) == (Tensor, kept, "cpu")
        assert not value.requires_grad
        if param_dtype and name.startswith("blocks.1."):
            want = want.bfloat16()  # frozen parameters have no main parameters: they are those that compute
        assert torch.equal(value, want.to(kept)), name
        assert value.untyped_storage().nbytes() == value.nbytes, "it keeps more alive than itself"
    for value in state.values():  # a copy
        value.zero_()
    assert all(torch.equal(buffer, plain.get_buffer(name)) for name, buffer in engine.named_buffers())


def test_a_loss_for_each_sample_is_an_error_at_once():
    def loss_fn(output, target):
        return (output - target).square().mean(1)

    engine = zeroshard.initialize(nn.Linear(4, 2), torch.optim.SGD, loss_fn=loss_fn).engine
    for call in (engine.eval_batch, engine.train_batch):
        with pytest.raises((RuntimeError, ValueError), match=r"shape|scalar|element"):
            call(torch.ones(3, 4), torch.ones(3, 2))
