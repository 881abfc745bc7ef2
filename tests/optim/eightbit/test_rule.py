"""A new 8-bit rule is written in one place: here it is one that zeroshard does not have.

RMSprop with momentum, without centering, as torch.optim.RMSprop has it.
"""

import functools
import math
import warnings

import pytest
import torch
from torch import nn

from tests.checkpoint.runs import differences, start, state, train, without_numba
from tests.optim.eightbit.cases import check_states, gradients
from tests.optim.eightbit.reference import UNSIGNED as SQUARES
from tests.optim.eightbit.reference import Reference
from tests.optim.eightbit.reference import root as exact_root
from zeroshard.optim import AdamW8bit
from zeroshard.optim.adopted import check_optimizer
from zeroshard.optim.eightbit.base import ElementWise8bit
from zeroshard.optim.eightbit.rule import SIGNED, UNSIGNED, Rule, quotient, root
from zeroshard.optim.eightbit.rules import rule_named

# ------------------------------------------------------------------------------------------------ the rule


def update(p, g, states, scalars):
    alpha, rest, momentum, weight_decay, eps, lr = scalars
    v, m = states
    g = p * weight_decay + g
    v = v * alpha + (g * g) * rest
    m = m * momentum + quotient(g, root(v) + eps)
    return p - m * lr, (v, m)


TOY = Rule(
    optimizers=("Toy",),
    states={"square_avg": UNSIGNED, "momentum_buffer": SIGNED},
    scalars=lambda n: (
        n.settings["alpha"],
        1 - n.settings["alpha"],
        n.settings["momentum"],
        n.weight_decay,
        n.eps,
        n.lr,
    ),
    update=update,
    ranges={"alpha": (lambda x: 0 < x < 1, "a number above 0 and below 1")},
)


class Toy8bit(ElementWise8bit):
    rule = TOY

    def __init__(
        self, params, lr=1e-2, alpha=0.9, eps=1e-8, weight_decay=0.0, momentum=0.8, *, min_8bit_size=4096
    ):
        defaults = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, defaults, min_8bit_size)


# --------------------------------------------------------------------------------------------- its numbers

OPTIONS = {"lr": 1e-2, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.7}


class Expected(Reference):
    def toy8bit(self, g, lr, alpha, eps, weight_decay, momentum):
        g = self.p * weight_decay + g
        v = self.read("square_avg", SQUARES) * alpha + (g * g) * (1 - alpha)
        m = self.read("momentum_buffer") * momentum + g / (exact_root(v) + eps)
        self.p = self.p - m * lr
        self.keep("square_avg", v, SQUARES)
        self.keep("momentum_buffer", m)


@pytest.mark.parametrize("size", [4096, 5003])
def test_codes_scales_and_parameters_are_those_of_the_reference(size, kernel):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(size))
    reference = Expected("Toy8bit", parameter.detach().clone())
    optimizer = Toy8bit([parameter], **OPTIONS)
    for g in gradients((size,), 5):
        parameter.grad = g.clone()
        optimizer.step()
        reference.step(g, **OPTIONS)
        check_states(optimizer.state[parameter], reference)
        assert torch.equal(parameter.detach(), reference.p)
        assert torch.equal(parameter.grad, g), "a gradient is not changed"


def test_float32_states_of_small_parameters_follow_torch():
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4095))
    twin = nn.Parameter(parameter.detach().clone())
    optimizer, other = Toy8bit([parameter], **OPTIONS), torch.optim.RMSprop([twin], **OPTIONS)
    for g in gradients((4095,), 5):
        parameter.grad, twin.grad = g.clone(), g.clone()
        optimizer.step()
        other.step()
    for name in TOY.states:
        torch.testing.assert_close(optimizer.state[parameter][name], other.state[twin][name])
    torch.testing.assert_close(parameter, twin, rtol=1e-5, atol=1e-6)


def test_its_hyperparameters_are_checked_in_groups():
    parameter = nn.Parameter(torch.ones(2))
    for key, value in (("alpha", 1.0), ("momentum", 0.0), ("lr", -1.0)):
        with pytest.raises(ValueError, match=f"{key}: expected a"):
            Toy8bit([{"params": [parameter], key: value}])


def test_it_is_known_to_initialize_but_a_class_with_a_step_of_its_own_is_not():
    class Other8bit(Toy8bit):
        def step(self, closure=None):
            return super().step(closure)

    parameter = nn.Parameter(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizer(Toy8bit([parameter]), {parameter: "p"})
    with pytest.warns(UserWarning, match="Other8bit is not known to zeroshard"):
        check_optimizer(Other8bit([parameter]), {parameter: "p"})


def test_an_optimizer_has_one_rule_and_a_rule_some_states():
    fields = {"scalars": TOY.scalars, "update": TOY.update}
    with pytest.raises(ValueError, match="expected those that have no rule yet, got 'Toy'"):
        Rule(optimizers=("Toy",), states={"m": SIGNED}, **fields)
    with pytest.raises(ValueError, match="operator: expected one that has no rule yet, got 'adam'"):
        Rule(optimizers=("Many",), states={"m": SIGNED}, operator="adam", **fields)
    for number in (0, 4):
        with pytest.raises(ValueError, match=f"states: expected 1 to 3, got {number}"):
            Rule(optimizers=("Many",), states=dict.fromkeys("abcd"[:number], SIGNED), **fields)
    with pytest.raises(ValueError, match=r"update: expected quotient\(a, b\).*, got a / b"):
        Rule(optimizers=("Many",), states={"m": SIGNED}, scalars=TOY.scalars, update=lambda p, *_: p / 2)
    assert rule_named("PagedToy8bit") is TOY
    assert rule_named("Many") is None


# ------------------------------------------------------------------------------- over ranks, in checkpoints

CONFIGS = ({"stage": 0}, {"stage": 1}, {"stage": 3})


def make(model, min_8bit_size=700):
    return Toy8bit(model.parameters(), min_8bit_size=min_8bit_size)


@without_numba
def save(folder):
    """Losses, and the state at the stop and at the end, of a run that is not stopped."""
    engine = start(3, make)
    losses = train(engine, range(4))
    engine.save_checkpoint(folder)
    stop = state(engine)
    return losses, stop, state(engine, train(engine, range(4, 6)))


@without_numba
def resume(folder):
    found = []
    for config in CONFIGS:
        engine = start(config, make, seed=1)
        engine.load_checkpoint(folder)
        found.append((state(engine), state(engine, train(engine, range(4, 6)))))
    return found


@without_numba
def convert(folder):
    """8-bit states as they are read by name, and as they are converted to float32."""
    engine = start(3, make, seed=1)
    engine.load_checkpoint(folder)
    by_name = engine.full_optimizer_state("mix")
    engine = start(3, functools.partial(make, min_8bit_size=10_000), seed=1)
    engine.load_checkpoint(folder, convert_states=True)
    return by_name, engine.full_optimizer_state("mix")


def test_it_trains_and_its_checkpoints_go_on_at_one_and_two_ranks(ranks, tmp_path):
    losses, stop, end = ranks(2, save, tmp_path)[0]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert stop.tensors["mix", "square_avg"].dtype == torch.uint8
    assert stop.tensors["gain", "square_avg"].dtype == torch.float32
    for at_stop, at_end in ranks(2, resume, tmp_path)[0]:
        assert not differences(at_stop, stop)
        assert not differences(at_end, end)
    for at_stop, at_end in ranks(1, resume, tmp_path)[0]:
        assert not differences(at_stop, stop)
        assert at_end.losses == pytest.approx(end.losses, rel=1e-4)
    by_name, converted = ranks(2, convert, tmp_path)[0]
    for name in TOY.states:
        assert torch.equal(by_name[name], converted[name])
    assert (by_name["square_avg"] >= 0).all(), "read by the codebook of squares"


class Derived(AdamW8bit):
    """A name that no rule has."""


@without_numba
def read_squares():
    engine = start(3, lambda model: Derived(model.parameters(), min_8bit_size=0))
    train(engine, range(1))
    return engine.full_optimizer_state("mix")["exp_avg_sq"]


@pytest.mark.filterwarnings("ignore:Derived is not known to zeroshard")
def test_states_of_a_derived_class_are_read_by_name_with_the_codebooks_of_its_rule(ranks):
    (squares,) = ranks(1, read_squares)
    assert (squares >= 0).all()
    assert squares.max() > 0
