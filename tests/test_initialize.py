"""What `initialize` takes, what it gives back, and what it refuses."""

import copy
import functools
import itertools
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import zeroshard
from tests.distributed.models import Tiny
from tests.distributed.training import STAGES, numbers, refused, seeded, square_loss
from tests.ranks import on_ranks
from zeroshard import Config, Engine, Initialized
from zeroshard.agreement import check_agreement
from zeroshard.comm.collectives import Axis
from zeroshard.config.checked import flat
from zeroshard.internals.warn import first_of
from zeroshard.plan.units import find_units


def refusal(*args, **kwargs):
    """The message of the error that initialize ends in, before it opens a process group."""
    message = refused(zeroshard.initialize, *args, **kwargs)
    assert not dist.is_initialized()
    return message


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


# ---------------------------------------------------------------------------------------- what comes back


@on_ranks(2)
def test_it_returns_engine_optimizer_dataloader_and_scheduler_in_the_order_scripts_unpack():
    model, data = Tiny(), TensorDataset(torch.arange(8.0))
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = zeroshard.initialize(model, optimizer, training_data=data, lr_scheduler=scheduler)
    engine, made, loader, schedule = given
    assert type(given) is Initialized
    assert given == (given.engine, given.optimizer, given.dataloader, given.lr_scheduler)
    assert type(engine) is Engine
    assert engine.module is model
    assert made is engine.optimizer is optimizer
    assert isinstance(loader, DataLoader)
    assert loader.dataset is data
    assert schedule is engine.lr_scheduler is scheduler
    engine, *nothing = zeroshard.initialize(Tiny())
    assert nothing == [None, None, None]
    assert engine.config == Config()


@on_ranks(2)
def test_a_scheduler_is_an_object_or_a_callable_that_makes_one_from_the_optimizer():
    """Learning rates over three steps of engines whose scheduler is given in different ways."""

    def halving(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    class OwnSchedule:
        """No more than a step."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            self.optimizer.param_groups[0]["lr"] /= 2

    halved = [8.0, 4.0, 2.0]
    for give, rates in (
        (lambda _: halving, halved),
        (lambda _: OwnSchedule, halved),
        (lambda _: functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5), halved),
        (lambda _: torch.optim.lr_scheduler.ConstantLR, [8.0 / 3] * 3),
        (halving, halved),
        (OwnSchedule, halved),
    ):
        model, found = Tiny(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
        engine, optimizer, _, scheduler = zeroshard.initialize(model, optimizer, lr_scheduler=give(optimizer))
        for number in range(3):
            found.append(optimizer.param_groups[0]["lr"])
            engine.backward(square_loss(engine, number))
            engine.step()
        assert found == pytest.approx(rates)
        assert engine.lr_scheduler is scheduler
        assert hasattr(scheduler, "step")


@on_ranks(2)
def test_training_data_becomes_a_dataloader_with_the_micro_batch_size_and_collate_fn():
    def double(samples):
        return torch.stack([2 * sample for (sample,) in samples])

    data, config = TensorDataset(torch.arange(12.0)), {"micro_batch_size": 3}
    plain, doubled = (
        zeroshard.initialize(Tiny(), None, config, training_data=data, collate_fn=collate_fn).dataloader
        for collate_fn in (None, double)
    )
    plain = [x.tolist() for (x,) in plain]
    assert [len(batch) for batch in plain] == [3, 3]
    assert [x.tolist() for x in doubled] == [[2 * x for x in batch] for batch in plain]
    everywhere = [None, None]
    dist.all_gather_object(everywhere, plain)
    assert sorted(x for batches in everywhere for batch in batches for x in batch) == list(range(12))


# ------------------------------------------------------------------------------------------------- ranks


class WithBuffers(Tiny):
    """Buffers of several dtypes, some of them not saved."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.norm.running_mean.normal_()
        self.register_buffer("scale", torch.randn(()))
        self.register_buffer("order", torch.randperm(9), persistent=False)
        self.register_buffer("mask", torch.rand(3, 4) > 0.5)
        self.register_buffer("turned", torch.randn(4, 3).bfloat16().t())
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_every_rank_gets_the_parameters_and_buffers_of_rank_0(stage):
    """The models differ."""
    first = seeded(WithBuffers)
    model = seeded(WithBuffers, seed=dist.get_rank())
    assert torch.equal(model.inner.weight, first.inner.weight) == (dist.get_rank() == 0)
    config = {"stage": stage, "precision": {"param_dtype": "fp32" if stage % 2 else None}}
    engine = zeroshard.initialize(model, None, config).engine
    with engine.unsharded():
        got = {name: p.detach().clone() for name, p in engine.named_parameters()}
    got |= dict(engine.named_buffers())
    for name, value in (*first.named_parameters(), *first.named_buffers()):
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value), name


# --------------------------------------------------------------------------------------- what is refused


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


def test_what_is_no_model_no_optimizer_and_no_data_is_refused():
    for model in (None, lambda x: x, Tiny):
        assert refusal(model).startswith("expected a torch.nn.Module as model, got ")
    expected = "expected a torch.optim.Optimizer or a callable that makes one, got "
    for optimizer in (lambda parameters: None, lambda parameters: "AdamW"):
        assert refusal(Tiny(), optimizer).startswith(expected)
    expected = "training_data: expected a Dataset with a length above 0, got "
    for data in (
        [],
        TensorDataset(torch.ones(0, 3)),
        Endless(),
        3,
        DataLoader(TensorDataset(torch.ones(2, 3))),
    ):
        assert refusal(Tiny(), training_data=data).startswith(expected)


def test_foreign_parameters_are_refused_with_their_shapes_and_groups():
    model = Tiny()
    foreign = nn.Linear(3, 5)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": foreign.parameters()}], lr=0.1)
    assert refusal(model, optimizer) == (
        "SGD holds 2 parameter(s) that are not the model's: [5, 3] in group 1, [5] in group 1. "
        "Build it over the parameters of the model given to initialize"
    )
    copied = copy.deepcopy(model)
    assert "that are not the model's: [] in group 0, [10, 7] in group 0, [10] in group 0. " in refusal(
        copied, adamw(model)
    )


@on_ranks(2)
def test_rank_0_warns_of_trainable_parameters_that_the_optimizer_does_not_hold():
    model = Tiny()
    model.gain.requires_grad_(False)
    left_out = [name for name, p in model.named_parameters() if p.requires_grad][1:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zeroshard.initialize(model, torch.optim.SGD([model.inner.weight], lr=0.1)).engine.close()
    found = [str(warning.message) for warning in caught if "does not hold" in str(warning.message)]
    assert len(found) == (dist.get_rank() == 0)
    for text in found:
        assert text.startswith(f"SGD does not hold {first_of(sorted(left_out))}, which never change. ")


def test_an_optimizer_that_has_stepped_is_refused_with_a_parameter():
    model = Tiny()
    optimizer = adamw(model)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    message = refusal(model, optimizer)
    assert message.startswith("AdamW has state already, for 'gain', 'inner.weight', ")
    assert message.endswith("initialize takes an optimizer that has not stepped yet")
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    momentum.step()
    assert refusal(model, momentum).startswith("SGD has state already, for ")


def own_optimizer(name, base=torch.optim.Optimizer, module="somebody.optim"):
    """A class of optimizers as other packages have them."""

    def build(self, parameters, lr=0.1):
        torch.optim.Optimizer.__init__(self, parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])

    methods = {} if base is not torch.optim.Optimizer else {"__init__": build, "step": step}
    return type(name, (base,), {"__module__": module, **methods})


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS", "SparseAdam"])
def test_optimizers_of_torch_that_need_whole_tensors_are_refused_by_name(name):
    model = nn.Linear(3, 3, bias=False)
    message = refusal(model, getattr(torch.optim, name)(model.parameters()))
    assert message.startswith(f"{name} needs whole tensors (")
    assert "and a rank holds slices of them; use an element-wise optimizer such as AdamW" in message


@pytest.mark.parametrize("name", ["SOAP", "Lamb", "DAdaptAdam", "DistributedShampoo", "AdafactorFB"])
def test_optimizers_of_others_that_need_whole_tensors_are_refused_by_name(name):
    model, kind = Tiny(), own_optimizer(name)
    for given, shown in ((kind, name), (own_optimizer("Mine", base=kind), "Mine")):
        for optimizer in (given, given(model.parameters())):
            assert refusal(model, optimizer).startswith(f"{shown} needs whole tensors (")


@on_ranks(2)
def test_an_unknown_optimizer_warns_once_where_initialize_is_called_and_trains():
    # torch runs the hooks of steps for a class and for its base; a step counts once nevertheless.
    own_step = {"step": lambda self, closure=None: torch.optim.SGD.step(self, closure)}
    for kind in (own_optimizer("Lion"), type("MySGD", (torch.optim.SGD,), own_step)):
        model = seeded(Tiny)
        plain = copy.deepcopy(model)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        weights = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        optimizer = kind([{"params": weights}, {"params": others}], lr=0.1)
        told = rf"^{kind.__name__} is not known to zeroshard\. It sees 1-D slices"
        with pytest.warns(UserWarning, match=told) as caught:
            engine, optimizer, _, _ = zeroshard.initialize(model, optimizer)
        (warning,) = caught
        assert Path(warning.filename).name == Path(__file__).name
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step, (one, made) in itertools.product(range(3), ((engine, optimizer), (plain, reference))):
                one(numbers(step, 5, 7, rank=0)).square().mean().backward()  # the same batch on every rank
                made.step()
                made.zero_grad()
        assert engine.global_step == 3
        state = engine.full_state_dict()
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items())


def test_what_is_no_scheduler_of_the_optimizer_is_refused():
    model, plateau = Tiny(), torch.optim.lr_scheduler.ReduceLROnPlateau
    own, other = (torch.optim.lr_scheduler.StepLR(adamw(model), 1) for _ in range(2))
    wrong = "expected a scheduler whose step() needs no argument, got "
    for optimizer, given, text in (
        (None, own, "expected an optimizer to go with it, got None"),
        (None, lambda _: own, "expected an optimizer to go with it, got None"),
        (own.optimizer, other, "belongs to another optimizer than the one given"),
        (own.optimizer, lambda _: other, "belongs to another optimizer than the one given"),
        (own.optimizer, 3, f"{wrong}int"),
        (own.optimizer, plateau(own.optimizer), f"{wrong}ReduceLROnPlateau"),
        (own.optimizer, plateau, f"{wrong}ReduceLROnPlateau"),
        (own.optimizer, lambda _: None, f"{wrong}NoneType"),
    ):
        message = refusal(model, optimizer, lr_scheduler=given)
        assert message.startswith("lr_scheduler")
        assert message.endswith(text)


@on_ranks(2)
def test_a_model_that_is_sharded_already_in_whole_or_in_part_is_refused():
    whole, partly, outer = Tiny(), Tiny(), Tiny()
    for sharded in (whole, partly.blocks[0], outer):
        zeroshard.initialize(sharded)
    inside = outer.blocks[0]
    for model, name in ((whole, "gain"), (partly, "blocks.0.0.weight"), (inside, "0.weight")):
        for optimizer in (None, torch.optim.AdamW):
            text = rf"^parameter '{name}' is sharded already: call engine.close\(\)"
            with pytest.raises(ValueError, match=text):
                zeroshard.initialize(model, optimizer)


# ------------------------------------------------------------------------------------ ranks that disagree


def two_layers(table=None, *, frozen=False, tied=False):
    model = nn.Module()
    model.first, model.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    model.second.requires_grad_(not frozen)
    model.second.weight = model.first.weight if tied else model.second.weight
    model.register_buffer("table", table)
    return model


def sgd(lr=0.1, order=1):
    return lambda parameters: torch.optim.SGD([{"params": [p]} for p in parameters[::order]], lr=lr)


SECOND = "parameter 'second.weight' (3, 3) torch.float32"


@on_ranks(3)
def test_ranks_that_differ_learn_the_first_difference_and_who_has_it():
    """In pairs: what ranks 0 and 2 are given, and rank 1; each with what the message shows of it."""
    given = [
        (nn.Linear(5, 7), None, {}, "parameter 'weight' (7, 5) torch.float32"),
        (nn.Linear(5, 8), None, {}, "parameter 'weight' (8, 5) torch.float32"),
        (Tiny(), torch.optim.AdamW, {}, "optimizer AdamW group 0 of 9 parameters"),
        (Tiny(), None, {}, "no optimizer"),
        (Tiny(), sgd(0.5), {}, "optimizer SGD group 0 lr=0.5"),
        (Tiny(), sgd(0.25), {}, "optimizer SGD group 0 lr=0.25"),
        (two_layers(), None, {}, SECOND),
        (two_layers(frozen=True), None, {}, f"{SECOND} frozen"),
        (two_layers(), None, {}, SECOND),
        (two_layers(tied=True), None, {}, f"{SECOND} tied to 'first.weight'"),
        (two_layers(torch.zeros(3)), None, {}, "buffer 'table' (3,) torch.float32"),
        (two_layers(torch.zeros(3).double()), None, {}, "buffer 'table' (3,) torch.float64"),
        (Tiny(), None, {"stage": 3}, "config stage=3"),
        (Tiny(), None, {"stage": 2}, "config stage=2"),
        (two_layers(), sgd(), {}, "optimizer SGD group 0 with 'first.weight'"),
        (two_layers(), sgd(order=-1), {}, "optimizer SGD group 0 with 'second.weight'"),
    ]
    told = "the ranks were given different models, configs, optimizers or data: "
    for usual, odd in zip(given[::2], given[1::2], strict=True):
        model, optimizer, config, _ = odd if dist.get_rank() == 1 else usual
        expected = f"{told}rank(s) 0, 2 have {usual[-1]}; rank(s) 1 have {odd[-1]}"
        assert refused(zeroshard.initialize, model, optimizer, config).startswith(expected)
    engine, optimizer, _, _ = zeroshard.initialize(Tiny(), torch.optim.SGD)
    square_loss(engine, 0).backward()
    optimizer.step()


def layers_by_name(num):
    return nn.ModuleDict({f"layer_{index:04d}": nn.Linear(1, 1, bias=False) for index in range(num)})


def bytes_of_agreement(num):
    """What a rank sends to agree on a model of `num` parameters."""
    model = layers_by_name(num)
    axis = Axis(dist.group.WORLD, device=torch.device("cpu"), timeout_s=20)
    settings, optimizer = flat(Config()), torch.optim.SGD(model.parameters())
    check_agreement(axis, model, settings, find_units(model, None), optimizer, {})
    return sum(axis.ledger.counter.bytes_sent.values())


@on_ranks(2)
def test_ranks_that_agree_send_digests_whatever_the_number_of_parameters():
    assert bytes_of_agreement(10) == bytes_of_agreement(500) < 1000


@on_ranks(2)
def test_the_first_difference_is_found_wherever_it_is():
    for index in (0, 64, 99):
        model = layers_by_name(100)
        for layer in list(model.values())[index:]:
            layer.requires_grad_(dist.get_rank() != 1)
        name = f"parameter 'layer_{index:04d}.weight' (1, 1) torch.float32"
        with pytest.raises(RuntimeError, match=re.escape(f"rank(s) 0 have {name}; rank(s) 1 have ")):
            zeroshard.initialize(model)


class Left(nn.Sequential):
    pass


class Right(nn.Sequential):
    pass


@on_ranks(2)
def test_ranks_that_would_shard_other_units_are_told_so():
    """Parameters have the same names and shapes but make up other units, by classes or by predicates."""
    is_odd = dist.get_rank() == 1
    told = "^the ranks were given different models, configs, optimizers or data: "
    for second, unit in ((Right if is_odd else Left, None), (Left, nn.Linear if is_odd else Left)):
        model = nn.ModuleList([Left(nn.Linear(3, 3)), second(nn.Linear(3, 3))])
        units = unit and (lambda module, unit=unit: isinstance(module, unit))
        with pytest.raises(RuntimeError, match=told):
            zeroshard.initialize(model, None, {"watchdog_s": 5.0, "units": units})


@on_ranks(2)
def test_settings_that_differ_in_their_address_alone_are_the_same():
    """A group may hold what has another address on every rank."""
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["schedule"] = lambda step: step
    zeroshard.initialize(model, optimizer)


def test_shard_takes_a_config_as_initialize_does_and_asks_for_a_process_group():
    with pytest.raises(ValueError, match="did you mean 'stage'"):
        zeroshard.shard(nn.Linear(2, 2), {"stge": 3})
    with pytest.raises(ValueError, match=r"process group .*init_process_group"):
        zeroshard.shard(nn.Linear(2, 2), {"stage": 3})
