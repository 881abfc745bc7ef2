"""bitsandbytes' optimizers in one process: their steps, overrides, refusals."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.optim.eightbit.cases import OPTIONS, gradients
from zeroshard.optim import AdamW8bit
from zeroshard.optim.adopted import adopt, check_optimizer, num_bits, read_overrides, to_common

bnb = pytest.importorskip("bitsandbytes").optim
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

NAMES = ["Adam8bit", "AdamW8bit", "Lion8bit", "SGD8bit"]
PAGED = ["PagedAdam8bit", "PagedAdamW8bit", "PagedLion8bit"]


@pytest.fixture(autouse=True)
def manager():
    """That of all optimizers, empty."""
    manager = bnb.GlobalOptimManager.get_instance()
    manager.initialize()
    yield manager
    manager.initialize()


def adopted(name, parameter, **options):
    optimizer = getattr(bnb, name)([parameter], **options)
    adopt(optimizer, read_overrides(optimizer, {parameter: "p"}))
    return optimizer


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [5003, 300])
@pytest.mark.parametrize("name", [*NAMES, *PAGED])
def test_steps_are_those_of_the_class_itself(name, size, device):
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(size, device=device))
    theirs = nn.Parameter(ours.detach().clone())
    options = OPTIONS[name.removeprefix("Paged")]
    optimizer, other = adopted(name, ours, **options), getattr(bnb, name)([theirs], **options)
    for g in gradients((size,), 4):
        ours.grad, theirs.grad = g.to(device), g.to(device)
        optimizer.step()
        other.step()
    assert torch.equal(ours, theirs)
    state, want = to_common(optimizer, optimizer.state[ours]), to_common(other, other.state[theirs])
    assert state.keys() == want.keys()
    assert all(torch.equal(state[key], want[key]) for key in want.keys() - {"step"})


def test_how_many_bits_is_told_by_the_group():
    parameters = [nn.Parameter(torch.randn(size)) for size in (5000, 5000, 100)]
    optimizer = AdamW8bit(
        [{"params": [p], "min_8bit_size": size} for p, size in zip(parameters, (1, 9999, 101), strict=True)]
    )
    assert [num_bits(optimizer, p) for p in parameters] == [8, 32, 32]


# ------------------------------------------------------------------------------------------ overrides


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(100, 50)
        self.two = nn.Linear(100, 50)


def read(optimizer, model):
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: settings for p, settings in read_overrides(optimizer, names).items()}


def settings_of(model, **own):
    """With which an optimizer with 8 bits goes on."""
    plain = {"optim_bits": 8, "min_8bit_size": 4096}
    return {name: plain | own.get(name.replace(".", "_"), {}) for name, _ in model.named_parameters()}


def test_bits_of_modules_are_read_as_the_trainer_of_transformers_registers_them(manager):
    model = Net()
    manager.register_module_override(model.one, "weight", {"optim_bits": 32})
    manager.register_module_override(model.two, "bias", {"min_8bit_size": 50})
    optimizer = bnb.Adam(model.parameters(), optim_bits=8)
    found = read(optimizer, model)
    assert found == settings_of(model, one_weight={"optim_bits": 32}, two_bias={"min_8bit_size": 50})
    optimizer.check_overrides()  # as each first step of an optimizer of theirs does
    assert read(optimizer, model) == found
    names = {p: name for name, p in model.named_parameters()}
    adopt(optimizer, read_overrides(optimizer, names))
    assert [num_bits(optimizer, p) for p in model.parameters()] == [32, 32, 8, 8]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optim_bit": 32}, "override of 'one.weight' .* register_module_override .*, got {'optim_bit': 32}"),
        ({"lr": 0.5}, "got {'lr': 0.5}. Other hyperparameters need a group of their own"),
        ({"optim_bits": 16}, "override of 'one.weight': optim_bits: expected 8 or 32, got 16"),
    ],
)
def test_what_is_registered_for_a_module_beside_bits_is_an_error(manager, config, message):
    model = Net()
    manager.register_module_override(model.one, "weight", config)
    with pytest.raises(ValueError, match=message):
        read(bnb.AdamW8bit(model.parameters()), model)


def test_what_is_registered_for_a_parameter_is_an_error_and_can_be_taken_back(manager):
    model = Net()
    manager.override_config(model.two.bias, "optim_bits", 32)
    with pytest.raises(ValueError, match=r"override of 'two.bias' .* got {'optim_bits': 32}"):
        read(bnb.AdamW8bit(model.parameters()), model)
    manager.initialize()
    assert len(read(bnb.AdamW8bit(model.parameters()), model)) == 4


def test_an_optimizer_that_was_taken_over_does_not_ask_the_manager_of_all(manager):
    parameter = nn.Parameter(torch.randn(5000))
    optimizer = adopted("AdamW8bit", parameter)
    manager.override_config(parameter, "lr", 1e6)
    manager.index2config[0, 0] = {"lr": 1e6}
    parameter.grad = torch.ones(5000)
    before = parameter.detach().clone()
    optimizer.step()
    assert (parameter.detach() - before).abs().max() < 0.1


# ------------------------------------------------------------------------------------------- refusals


def check(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    check_optimizer(optimizer, dict.fromkeys(parameters, "p"))


ARGS = {"optim_bits": 8, "min_8bit_size": 4096, "max_unorm": 0.0, "skip_zeros": False}


class Renamed(bnb.AdamW8bit):
    pass


class Other(bnb.AdamW8bit):
    def update_step(self, group, p, gindex, pindex):
        p.grad.zero_()


def test_a_class_derived_from_theirs_gets_one_warning():
    parameter = nn.Parameter(torch.randn(5000))
    with pytest.warns(UserWarning, match="Renamed is not known to zeroshard") as caught:
        check(Renamed([parameter]))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(bnb.AdamW8bit([parameter]))


class Unknown(bnb.AdamW8bit):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.optimizer_name = "adan"


def with_args(**options):
    return lambda parameters: bnb.AdamW(parameters, args=SimpleNamespace(**ARGS | options))


LARS = {"lr": 0.1, "momentum": 0.9}
REFUSED = [
    *((getattr(bnb, f"LAMB{bits}"), rf"LAMB{bits} needs whole .*zeroshard\.optim\.LAMB and LAMB8bit get them")
      for bits in ("", "8bit", "32bit")),
    *((partial(getattr(bnb, name), **LARS), rf"{name} needs whole .*\.optim\.LARS and LARS8bit get them")
      for name in ("LARS", "LARS8bit", "LARS32bit", "PytorchLARS")),
    (with_args(max_unorm=0.1), "AdamW: expected max_unorm=0, got 0.1: it needs norms of whole tensors"),
    (with_args(skip_zeros=True), "AdamW: expected skip_zeros=False, got True: not all devices have it"),
    (with_args(optim_bits=4), "AdamW: optim_bits: expected 8 or 32, got 4"),
    (Other, r"Other has its own update_step\(\): expected the update_step\(\) of bitsandbytes"),
    (bnb.AdEMAMix, r"got 'ademamix'. zeroshard.optim has AdEMAMix8bit"),
    (bnb.RMSprop8bit, r"got 'rmsprop'. .* torch has RMSprop"),
    (Unknown, "Unknown: expected an optimizer of bitsandbytes .* got 'adan'"),
]  # fmt: skip


def test_optimizers_that_would_step_otherwise_are_refused_by_name():
    check(with_args()([nn.Parameter(torch.randn(5000))]))
    for make, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            check(make([nn.Parameter(torch.randn(5000))]))
