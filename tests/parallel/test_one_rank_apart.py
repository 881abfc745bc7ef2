"""One tensor rank has something that the others have not: all of them answer alike."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.runs import PLAN, adamw, build, digests, initialize, loss_of, own_part
from tests.ranks import RankError

HALF = {"param_dtype": "fp16", "loss_scale": {"start": 8.0, "window": 2, "minimum": 1.0}}


def begin(config, plan=PLAN, seed=0):
    torch.manual_seed(seed)
    return initialize(build(seed).float(), adamw, config, plan)


def spoil(engine, value, name="blocks.1.up.weight"):
    """Have a hook on the gradient of a cut parameter, on the last rank alone."""
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter = next(p for p in engine.parameters() if p.fqn == name)
        return parameter.register_hook(lambda gradient: gradient * value)
    return None


def step_with(engine, number):
    loss = loss_of(engine, number, own_part(engine._axes.dp))
    engine.backward(loss)
    return engine.step()


def not_a_number(config):
    engine = begin(config)
    step_with(engine, 0)
    hook, before = spoil(engine, float("nan")), engine.loss_scale
    found = []
    try:
        found.append(step_with(engine, 1))
    except RuntimeError as error:
        found.append(str(error))
        engine.zero_grad()
    if hook is not None:
        hook.remove()
    found += [engine.loss_scale / before, step_with(engine, 2)]
    whole = digests(engine)
    engine.close(restore=False)
    return found, whole


@pytest.mark.parametrize(
    "options", [{"nonfinite": "skip"}, {"precision": HALF}, {"nonfinite": "error"}], ids=str
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_by_all(ranks, options):
    runs = ranks(2, not_a_number, {"stage": 3, "mesh": {"tp": 2}, **options})
    for (first, scale, last), whole in runs:
        if options.get("nonfinite") == "error":
            assert "not finite are the gradients of 'blocks.1.up.weight'. The step was not taken" in first
        else:
            assert first is False
        assert scale == (0.5 if "precision" in options else 1.0)
        assert last is True
        assert whole.keys() == runs[0][1].keys()


class Dropping(nn.Module):
    """Between divided layers, where all tensor ranks compute the same."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.dropout, self.own = inner, nn.Dropout(0.5), None

    def forward(self, x):
        if self.own is None:
            return self.inner(self.dropout(x))
        return self.inner(x * torch.rand(x.shape, dtype=x.dtype, generator=self.own))


def apart(what):
    plan = {key: value for key, value in PLAN.items() if what != "plan" or "each_head" not in key}
    model = build(0)
    if what in ("dropout", "nothing"):
        model.norm = Dropping(model.norm)
        if what == "dropout":  # of numbers that are not those of the default generator
            model.norm.own = torch.Generator().manual_seed(dist.get_rank())
    engine = initialize(model, adamw, {"stage": 3, "mesh": {"tp": 2}}, plan)
    axes, whole = engine._axes, None
    torch.manual_seed(dist.get_rank())
    part = own_part(axes.dp)
    before = digests(engine)
    engine.backward(loss_of(engine, 0, part))
    try:
        engine.step()
    except RuntimeError as error:
        whole = str(error)
        assert digests(engine) == before
    engine.close(restore=False)
    return whole


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("dropout", "norm.inner.weight"),
        ("plan", "blocks.0.each_head.weight"),
        ("nothing", None),
    ],
)
def test_ranks_that_would_train_different_models_are_told_at_the_first_step(ranks, what, name):
    for text in ranks(4, apart, what):
        if name is None:
            assert text is None
        else:
            assert f"the tensor ranks have different gradients of '{name}'" in text
            assert "The step was not taken" in text


def other_batches(what):
    engine, found = begin({"stage": 3, "mesh": {"tp": 2}}), []
    rank = engine._axes.tp.rank
    tokens = torch.arange(20).view(4, 5)
    given = {"values": tokens + (what == "values" and rank), "shapes": tokens[: 4 - rank]}.get(what, tokens)
    try:
        engine(given)
    except RuntimeError as error:
        found.append(str(error))
    found.append(step_with(engine, 0))
    engine.close(restore=False)
    return found


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("values", "torch.int64 [4, 5] of some values, rank {} others of the same shapes"),
        ("shapes", "torch.int64 [4, 5], rank {} torch.int64 [3, 5]"),
    ],
)
def test_tensor_ranks_with_different_batches_are_told_before_they_mix_them(ranks, what, text):
    for rank, (error, is_taken) in enumerate(ranks(4, other_batches, what)):
        first = rank // 2 * 2
        assert f"expected the same batch on the tensor ranks [{first}, {first + 1}]" in error
        assert f"rank {first} was given {text.format(first + 1)}. " in error
        assert is_taken


def burns():
    """The last rank's backward fails in a hook, after its last exchange; others get an error of their own."""
    engine = begin({"stage": 3, "mesh": {"tp": 2}, "watchdog_s": 10})
    step_with(engine, 0)
    before = digests(engine)
    hook = spoil(engine, None, "tokens.weight")  # a product that raises
    with pytest.raises((RuntimeError, TypeError)) as caught:
        step_with(engine, 1)
    if hook is not None:
        hook.remove()
    engine.zero_grad()
    found = digests(engine) == before, step_with(engine, 1), str(caught.value)
    engine.close(restore=False)
    return found


def test_a_backward_that_fails_on_one_rank_after_its_last_exchange_is_an_error_on_all(ranks):
    (*others, told), (*last, burned) = ranks(2, burns)
    assert others == last == [True, True]  # nothing was changed, and the next step is taken
    assert "backward of another rank has ended in an exception" in told
    assert "unsupported operand" in burned


def hangs():
    """The second rank of the second tensor group stays away from a forward."""
    engine = begin({"stage": 1, "mesh": {"tp": 2}, "watchdog_s": 4})
    step_with(engine, 0)
    if dist.get_rank() == 3:
        time.sleep(12)
    try:
        step_with(engine, 1)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.long
def test_a_rank_that_waits_for_another_tensor_rank_names_the_group(ranks):
    with pytest.raises(RankError) as caught:
        ranks(4, hangs)
    assert re.search(
        r"rank 2 of 4 gave up in the (comparison of inputs|random states of the tensor ranks) "
        r"over the tensor ranks \[2, 3\]",
        str(caught.value),
    )
