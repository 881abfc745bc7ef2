"""A new 8-bit rule is written in one place: here it is one that zeroshard does not have.

RMSprop with momentum, without centering, as torch.optim.RMSprop has it.
"""

import pytest
import torch
from torch import nn

from tests.checkpoint.runs import start, train, without_numba
from tests.optim.eightbit.cases import check_states, gradients
from tests.optim.eightbit.reference import UNSIGNED as SQUARES
from tests.optim.eightbit.reference import Reference
from tests.optim.eightbit.reference import root as exact_root
from tests.ranks import on_ranks
from zeroshard.optim import AdamW8bit
from zeroshard.optim.eightbit.rule import SIGNED, UNSIGNED, Rule, quotient, root
from zeroshard.optim.eightbit.rules import ElementWise8bit, rule_named

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


@pytest.mark.long_where(kernel=["numba"])
def test_codes_scales_and_parameters_are_those_of_the_reference(kernel):
    size = 5003
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


def test_its_hyperparameters_are_checked_in_groups():
    parameter = nn.Parameter(torch.ones(2))
    for key, value in (("alpha", 1.0), ("momentum", 0.0), ("lr", -1.0)):
        with pytest.raises(ValueError, match=f"{key}: expected a"):
            Toy8bit([{"params": [parameter], key: value}])


def test_an_optimizer_has_one_rule_and_a_rule_some_states():
    fields = {"scalars": TOY.scalars, "update": TOY.update}
    with pytest.raises(ValueError, match="expected those that have no rule yet"):
        Rule(optimizers=("Toy",), states={"m": SIGNED}, **fields)
    for number in (0, 4):
        with pytest.raises(ValueError, match=f"states: expected 1 to 3, got {number}"):
            Rule(optimizers=("Many",), states=dict.fromkeys("abcd"[:number], SIGNED), **fields)
    with pytest.raises(ValueError, match=r"update: expected quotient\(a, b\).*, got a / b"):
        Rule(optimizers=("Many",), states={"m": SIGNED}, scalars=TOY.scalars, update=lambda p, *_: p / 2)
    assert rule_named("PagedToy8bit") is TOY
    assert rule_named("Many") is None


# ------------------------------------------------------------------------------- over ranks, in checkpoints


class Derived(AdamW8bit):
    """A name that no rule has."""


@on_ranks(1)
@without_numba
def test_states_of_a_derived_class_are_read_by_name_with_the_codebooks_of_its_rule():
    engine = start(3, lambda model: Derived(model.parameters(), min_8bit_size=0))
    train(engine, range(1))
    squares = engine.full_optimizer_state("mix")["exp_avg_sq"]
    assert (squares >= 0).all()
    assert squares.max() > 0
