"""One tensor rank has something that the others have not: all of them answer alike."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import refused
from tests.parallel.runs import PLAN, adamw, digests, initialize, loss_of, own_part, small_gpt
from tests.ranks import RankError, on_ranks

HALF = {"param_dtype": "fp16", "loss_scale": {"start": 8.0, "window": 2, "minimum": 1.0}}


def begin(config, plan=PLAN, seed=0):
    torch.manual_seed(seed)
    return initialize(small_gpt(seed).float(), adamw, config, plan)


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


@on_ranks(2)
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_by_all():
    for options in ({"nonfinite": "skip"}, {"precision": HALF}, {"nonfinite": "error"}):
        engine = begin({"stage": 3, "mesh": {"tp": 2}, **options})
        step_with(engine, 0)
        hook, before = spoil(engine, float("nan")), engine.loss_scale
        if options.get("nonfinite") == "error":
            text = "not finite are the gradients of 'blocks.1.up.weight'. The step was not taken"
            with pytest.raises(RuntimeError, match=text):
                step_with(engine, 1)
            engine.zero_grad()
        else:
            assert step_with(engine, 1) is False
        if hook is not None:
            hook.remove()
        assert engine.loss_scale / before == (0.5 if "precision" in options else 1.0)
        assert step_with(engine, 2) is True
        engine.close(restore=False)


class Dropping(nn.Module):
    """Between divided layers, where all tensor ranks compute the same."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.dropout, self.own = inner, nn.Dropout(0.5), None

    def forward(self, x):
        if self.own is None:
            return self.inner(self.dropout(x))
        return self.inner(x * torch.rand(x.shape, dtype=x.dtype, generator=self.own))


def step_apart(what):
    """The error of a step whose gradients differ between tensor ranks."""
    plan = {key: value for key, value in PLAN.items() if what != "plan" or "each_head" not in key}
    model = small_gpt(0)
    if what != "plan":
        model.norm = Dropping(model.norm)
    if what == "dropout":  # of numbers that are not those of the default generator
        model.norm.own = torch.Generator().manual_seed(dist.get_rank())
    engine, error = initialize(model, adamw, {"stage": 3, "mesh": {"tp": 2}}, plan), None
    torch.manual_seed(dist.get_rank())
    before = digests(engine)
    engine.backward(loss_of(engine, 0, own_part(engine._axes.dp)))
    try:
        engine.step()
    except RuntimeError as caught:
        error = str(caught)
        assert digests(engine) == before
    return error


@on_ranks(2)
def test_ranks_that_would_train_different_models_are_told_at_the_first_step():
    for what, name in (("dropout", "norm.inner.weight"), ("plan", "blocks.0.each_head.weight")):
        text = step_apart(what)
        assert f"the tensor ranks have different gradients of '{name}'" in text
        assert "The step was not taken" in text
    assert step_apart("nothing") is None


@on_ranks(4)
def test_tensor_ranks_with_different_batches_are_told_before_they_mix_them():
    engine, tokens = begin({"stage": 3, "mesh": {"tp": 2}}), torch.arange(20).view(4, 5)
    rank, first = engine._axes.tp.rank, dist.get_rank() // 2 * 2
    for given, text in (
        (tokens + rank, "torch.int64 [4, 5] of some values, rank {} others of the same shapes"),
        (tokens[: 4 - rank], "torch.int64 [4, 5], rank {} torch.int64 [3, 5]"),
    ):
        message = refused(engine, given)
        assert f"expected the same batch on the tensor ranks [{first}, {first + 1}]" in message
        assert f"rank {first} was given {text.format(first + 1)}. " in message
    assert step_with(engine, 0)


@on_ranks(2)
def test_a_backward_that_fails_on_one_rank_after_its_last_exchange_is_an_error_on_all():
    """Nothing is changed, and the next step is taken."""
    engine = begin({"stage": 3, "mesh": {"tp": 2}, "watchdog_s": 10})
    step_with(engine, 0)
    before = digests(engine)
    hook = spoil(engine, None, "tokens.weight")  # a product that raises
    text = "unsupported operand" if hook else "backward of another rank has ended in an exception"
    with pytest.raises((RuntimeError, TypeError), match=text):
        step_with(engine, 1)
    if hook is not None:
        hook.remove()
    engine.zero_grad()
    assert digests(engine) == before
    assert step_with(engine, 1)


def hangs():
    """The second rank of the second tensor group stays away from a forward."""
    engine = begin({"stage": 1, "mesh": {"tp": 2}, "watchdog_s": 4})
    step_with(engine, 0)
    # Rank 2 is the first that gives up: the ranks of the other group begin to wait for theirs a second later.
    time.sleep({2: 0, 3: 40}.get(dist.get_rank(), 1))
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
