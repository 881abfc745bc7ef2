"""Weights some steps ahead along the next update of an optimizer, against the formulas in float64."""

import pytest
import torch

from zeroshard.optim.asynchronous import update_of

NUM = 5000

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
}
# One rounding of a number of about 1, and for bfloat16 those of the second moment beside it: its parts are
# computed in this dtype where the states have it.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def stepped(maker, dtype):
    """An optimizer after three steps, and its parameter."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(NUM).to(dtype))
    optimizer = MAKERS[maker]([weights])
    for _ in range(3):
        weights.grad = torch.randn(NUM).to(dtype)
        optimizer.step()
    return optimizer, weights


def moments_of(optimizer, weights, names):
    """The moments in float64."""
    return [optimizer.state[weights][name].double() for name in names]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_weights_are_moved_along_the_formula(maker, dtype):
    optimizer, weights = stepped(maker, dtype)
    [group], state, ahead = optimizer.param_groups, optimizer.state[weights], 3
    before, out = weights.detach().clone(), torch.full((NUM,), float("nan"), dtype=dtype)
    update_of(optimizer, "test")(weights.detach(), group, state, ahead, out)
    old = before.double()
    if "sgd" in maker:
        [velocity] = moments_of(optimizer, weights, ["momentum_buffer"])
        change = -0.1 * velocity
    else:
        second = "max_exp_avg_sq" if maker == "amsgrad" else "exp_avg_sq"
        first, second = moments_of(optimizer, weights, ["exp_avg", second])
        change = -0.1 * first / (1 - 0.9**3) / ((second / (1 - 0.999**3)).sqrt() + 1e-8)
        if "adamw" in maker:
            change -= 0.1 * 0.1 * old
    torch.testing.assert_close(
        out.double(), old + ahead * change, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert torch.equal(weights.detach(), before)


@pytest.mark.parametrize("maker", list(MAKERS))
def test_before_the_first_step_weights_stay_where_they_are(maker):
    weights = torch.nn.Parameter(torch.randn(NUM))
    optimizer, out = MAKERS[maker]([weights]), torch.empty(NUM)
    update_of(optimizer, "test")(weights.detach(), optimizer.param_groups[0], {}, 2, out)
    assert torch.equal(out, weights)
