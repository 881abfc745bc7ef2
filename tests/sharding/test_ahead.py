"""Units to whose gradients no later backward adds are reduced ahead of the last backward of a step."""

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.sharding.unit import Unit

WIDTH, ROWS = 6, 5
PARTS = (1, 1, 0, 0)
"""The half of the model that each micro-batch runs through."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Halves(nn.Module):
    """Two halves that share one parameter alone."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ModuleList(nn.Sequential(*(Block() for _ in range(3))) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, part):
        return self.halves[part](x * self.scale)


class Run:
    """A sharded model of two halves."""

    def __init__(self, stage, **options):
        torch.manual_seed(0)
        config = {"stage": stage, "units": ["Block"], **options}
        self.engine = zeroshard.initialize(Halves(), torch.optim.AdamW, config).engine
        self.reducer = self.engine._runtime.reducer
        self.second = frozenset(unit for unit in self.engine._runtime.units if "halves.1" in unit.name)

    def backward(self, number, *, more, but=()):
        """Run a micro-batch; return the names of the units whose reductions it started."""
        seed = 10 * number + self.engine.dp_rank
        x, names = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)), []
        start = Unit.start_reduce
        Unit.start_reduce = lambda unit: (names.append(unit.name), start(unit))[1]
        try:
            with self.reducer.next_backward(more, but=but):
                self.engine.module(x, PARTS[number]).square().mean().backward()
        finally:
            Unit.start_reduce = start
        return names

    def gradients(self):
        names = [name for name, _ in self.engine.module.named_parameters()]
        found = {name: self.engine.full_gradient(name) for name in names}
        return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def deferred(stage, options):
    """The gradients where all wait for the last backward."""
    run = Run(stage, **options)
    for number in range(4):
        run.backward(number, more=number < 3)
    return run.gradients()


def chosen(run, number):
    return run.second if number == 1 else frozenset()


def ahead(stage, options):
    run = Run(stage, **options)
    started = [run.backward(number, more=number < 3, but=chosen(run, number)) for number in range(4)]
    return started, run.gradients(), run.reducer.local_bytes


def same(found, want):
    assert found.keys() == want.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, want[name]), name


BF16 = {"param_dtype": "bf16", "reduce_dtype": "bf16", "main_dtype": "bf16"}


LAYOUTS = [(3, 1, {}), (3, 3, {})] + [
    pytest.param(num_ranks, stage, {"precision": BF16}, marks=pytest.mark.long)
    for num_ranks, stage in ((3, 0), (2, 2))
]


@pytest.mark.parametrize(("num_ranks", "stage", "options"), LAYOUTS)
def test_units_that_are_done_are_reduced_in_their_last_backward_with_the_same_bits(
    ranks, num_ranks, stage, options
):
    [want, *_] = ranks(num_ranks, deferred, stage, options)
    for (first, second, third, last), found, local_bytes in ranks(num_ranks, ahead, stage, options):
        assert first == third == []
        assert second == ["halves.1.2", "halves.1.1", "halves.1.0"]
        assert last == ["halves.0.2", "halves.0.1", "halves.0.0", ""]
        assert local_bytes == 0
        same(found, want)


# ------------------------------------------------------------------------------------ between backwards


def between(stage, is_stepped):
    """The second half is started between two backwards, twice; the last ones are reduced by the step."""
    run = Run(stage)
    for number in range(4):
        run.backward(number, more=number < 3 or is_stepped)
        if number == 1:
            run.reducer.start_ahead(run.second)
            under_way = [unit.name for unit in run.reducer.under_way]
            run.reducer.start_ahead(run.second)
            assert [unit.name for unit in run.reducer.under_way] == under_way
    if is_stepped:
        run.engine._runtime.before_step()
    return under_way, run.gradients()


@pytest.mark.parametrize(("stage", "is_stepped"), [(3, False), (3, True), (0, True)])
def test_reductions_can_be_started_between_backwards_and_go_on(ranks, stage, is_stepped):
    [want, *_] = ranks(2, deferred, stage, {})
    for under_way, found in ranks(2, between, stage, is_stepped):
        assert under_way == ["halves.1.2", "halves.1.1", "halves.1.0"]
        same(found, want)


def too_early(is_dropped=False):
    """A backward adds to units that are reduced already."""
    run = Run(3)
    if is_dropped:
        run.backward(0, more=True, but=run.second)
        run.backward(1, more=True)
        run.engine.zero_grad()
    for number in range(4):
        run.backward(number, more=number < 3, but=run.second if number == 0 else ())
    return run.gradients()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_gradient_that_comes_nevertheless_is_reduced_by_itself(ranks, is_dropped):
    [want, *_] = ranks(2, deferred, 3, {})
    for found in ranks(2, too_early, is_dropped):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, want[name], msg=name)


# ------------------------------------------------------------------------------------------- failures


def again(stage, failing):
    """A backward fails on all ranks, in or after the one that reduces ahead; the batch is run again."""
    run = Run(stage)

    def fail(gradient):
        raise ValueError("a hook fails")

    for number in range(failing):
        run.backward(number, more=True, but=chosen(run, number))
    handle = run.engine.module.halves[PARTS[failing]][1].linear.weight.unsharded().register_hook(fail)
    with pytest.raises(ValueError, match="a hook fails"):
        run.backward(failing, more=failing < 3, but=chosen(run, failing))
    handle.remove()
    run.engine.zero_grad()
    assert run.reducer.local_bytes == 0
    assert run.reducer.under_way == []
    for number in range(4):
        run.backward(number, more=number < 3, but=chosen(run, number))
    return run.gradients()


@pytest.mark.parametrize(("stage", "failing"), [(3, 1), (1, 2), (3, 3)])
def test_a_batch_can_be_run_again_after_an_exception(ranks, stage, failing):
    [want, *_] = ranks(2, deferred, stage, {})
    for found in ranks(2, again, stage, failing):
        same(found, want)
