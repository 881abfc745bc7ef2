"""Units to whose gradients no later backward adds are reduced ahead of the last backward of a step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.models import Residual
from tests.distributed.training import unequal
from tests.ranks import on_ranks
from zeroshard.sharding.gradients import Gradients

WIDTH, ROWS = 7, 5
PARTS = (1, 1, 0, 0)
"""The half of the model that each micro-batch runs through."""


class Halves(nn.Module):
    """Two halves that share one parameter alone; a rank may leave out a block of the second one."""

    def __init__(self, left_out):
        super().__init__()
        self.left_out = left_out
        self.halves = nn.ModuleList(nn.Sequential(*(Residual() for _ in range(3))) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, part):
        x = x * self.scale
        for number, block in enumerate(self.halves[part]):
            x = x if (part, number) == (1, self.left_out) else block(x)
        return x


class Run:
    """A sharded model of two halves."""

    def __init__(self, stage, left_out=None, **options):
        torch.manual_seed(0)
        config = {"stage": stage, "units": ["Residual"], **options}
        self.engine = zeroshard.initialize(Halves(left_out), torch.optim.AdamW, config).engine
        self.reducer = self.engine._runtime.reducer
        self.second = frozenset(unit for unit in self.engine._runtime.units if "halves.1" in unit.name)

    def backward(self, number, *, more, but=()):
        """Run a micro-batch; return the names of the units whose reductions it started."""
        seed = 10 * number + self.engine.dp_rank
        x, names = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)), []
        reduce = Gradients.reduce
        Gradients.reduce = lambda one: (names.append(one.buffer.unit_name), reduce(one))[1]
        try:
            with self.reducer.next_backward(more, but=but):
                self.engine.module(x, PARTS[number]).square().mean().backward()
        finally:
            Gradients.reduce = reduce
        return names

    def gradients(self):
        names = [name for name, _ in self.engine.module.named_parameters()]
        found = {name: self.engine.full_gradient(name) for name in names}
        return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


BF16 = {"param_dtype": "bf16", "reduce_dtype": "bf16", "main_dtype": "bf16"}


def batch(run, chosen):
    """Run four micro-batches; `chosen` has those that reduce the second half. Return what each reduced."""
    return [
        run.backward(number, more=number < 3, but=run.second if number in chosen else ())
        for number in range(4)
    ]


def check(run, stage, **options):
    """Compare with the gradients where all wait for the last backward."""
    other = Run(stage, **options)
    batch(other, ())
    assert not list(unequal("gradients", run.gradients(), other.gradients()))


@pytest.mark.long_where(num_ranks=[3])
@pytest.mark.parametrize(
    ("num_ranks", "stage", "options"), [(2, 3, {}), (3, 1, {}), (3, 0, {"precision": BF16})]
)
@on_ranks()
def test_units_that_are_done_are_reduced_in_their_last_backward_with_the_same_bits(stage, options):
    run = Run(stage, **options)
    first, second, third, last = batch(run, {1})
    assert first == third == []
    assert second == ["halves.1.2", "halves.1.1", "halves.1.0"]
    assert last == ["halves.0.2", "halves.0.1", "halves.0.0", ""]
    assert run.reducer.local_bytes == 0
    check(run, stage, **options)


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(
    ("num_ranks", "stage", "options"),
    [(2, 0, {}), (4, 2, {"shard_group_size": 2}), (4, 3, {"shard_group_size": 2})],
)
@on_ranks()
def test_ranks_that_leave_out_other_units_start_their_later_exchanges_in_one_order(num_ranks, stage, options):
    """The end of a step compares the orders of exchanges, and raises an error if these differ."""
    left_out = 1 if dist.get_rank() < num_ranks // 2 else None
    run = Run(stage, left_out, num_prefetch=1, **options)
    batch(run, {1})
    check(run, stage, left_out=left_out, num_prefetch=1, **options)


@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize(("stage", "is_stepped"), [(3, False), (0, True)])
@on_ranks(2)
def test_reductions_can_be_started_between_backwards_and_go_on(stage, is_stepped):
    """The second half is started between two backwards, twice; the last ones are reduced by the step."""
    run = Run(stage)
    for number in range(4):
        run.backward(number, more=number < 3 or is_stepped)
        for _ in range(2 if number == 1 else 0):
            run.reducer.start_ahead(run.second)
            sending = [unit.name for unit in run.reducer.sending]
            assert sending == ["halves.1.2", "halves.1.1", "halves.1.0"]
    if is_stepped:
        run.engine._runtime.before_step()
    check(run, stage)


@on_ranks(2)
def test_a_gradient_that_comes_nevertheless_is_reduced_by_itself():
    """A backward adds to units that are reduced already, also after such a batch was dropped."""
    run, other = Run(3), Run(3)
    run.backward(0, more=True, but=run.second)
    run.backward(1, more=True)
    run.engine.zero_grad()
    batch(run, {0})
    batch(other, ())
    torch.testing.assert_close(run.gradients(), other.gradients())


@pytest.mark.long_where(stage=[1])
@pytest.mark.parametrize(("stage", "failing"), [(3, 1), (1, 2)])
@on_ranks(2)
def test_a_batch_can_be_run_again_after_an_exception(stage, failing):
    """A backward fails on all ranks, in or after the one that reduces ahead; the batch is run again."""
    run = Run(stage)

    def fail(gradient):
        raise ValueError("a hook fails")

    for number in range(failing):
        run.backward(number, more=True, but=run.second if number == 1 else ())
    handle = run.engine.module.halves[PARTS[failing]][1].up.weight.unsharded().register_hook(fail)
    with pytest.raises(ValueError, match="a hook fails"):
        run.backward(failing, more=failing < 3, but=run.second if failing == 1 else ())
    handle.remove()
    run.engine.zero_grad()
    assert (run.reducer.local_bytes, [*run.reducer.sending]) == (0, [])
    batch(run, {1})
    check(run, stage)
