"""A budget of memory: units keep what fits, and compute the rest again."""

import os
import random
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import ALL_STAGES, STAGES, take_steps
from tests.forwards.peak import Peak
from tests.parallel.models import build, kind_of
from tests.parallel.runs import compare, divided, plain
from zeroshard.comm import streams
from zeroshard.forwards.budget import PLANNED
from zeroshard.forwards.dryrun import LiveBytes
from zeroshard.memory.report import take_peak

WIDTH, BLOCKS, ROWS = 32, 6, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Sequential):
    """Calls its blocks by itself: a choice for each of them is all that can be carried out."""

    def forward(self, x):
        for block in self:
            x = block(x)
        return x


def stack(kind=Blocks, num=BLOCKS):
    torch.manual_seed(0)
    return kind(*[Block() for _ in range(num)])


KEPT, INPUTS = ROWS * (WIDTH + 4 * WIDTH) * 4, ROWS * WIDTH * 4
"""Bytes that a block keeps: its input, and what tanh gives, the input of the other layer; or its input."""
LOSS = 3 * INPUTS
"""Bytes of the output, of its gradient, and of what a loss makes of it."""
STATES = 4 * sum(p.numel() for p in stack().parameters()) * 4
"""Parameters, gradients and two states of AdamW, in float32."""


adamw = partial(torch.optim.AdamW, lr=1e-3)


def batch(number, rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def run_steps(engine, steps, rows=ROWS, first=0):
    numbers = range(first, first + steps)
    return take_steps(engine, numbers, lambda model, number: model(batch(number, rows)).square().mean())


def names(engine):
    budget = engine._runtime.budget
    return None if budget.plan is None else budget.names


def room_for(num_kept):
    """A budget in which so many blocks keep all, the last ones: there is as much room for a recomputation."""
    return STATES + LOSS + num_kept * KEPT + (BLOCKS - num_kept) * INPUTS + KEPT // 2


def held_after_forward(engine, rows=ROWS):
    x = batch(0, rows)
    with LiveBytes([x, *engine.module.parameters()]) as live:
        loss = engine(x).square().mean()
        found = live.now
    engine.backward(loss)
    engine.zero_grad()
    return found


@pytest.mark.parametrize("num_kept", [1, 2, BLOCKS])
def test_as_many_blocks_keep_all_as_the_budget_has_room_for(num_kept):
    config = {"stage": 0, "recompute": "auto", "memory_budget": room_for(num_kept)}
    engine = zeroshard.initialize(stack(), adamw, config).engine
    assert names(engine) is None
    losses = run_steps(engine, PLANNED + 2)
    assert names(engine) == ["recompute"] * (BLOCKS - num_kept) + ["keep"] * num_kept
    assert [unit.around[-1] for unit in engine.units if unit.name] == names(engine)
    assert losses == run_steps(zeroshard.initialize(stack(), adamw, {"stage": 0}).engine, PLANNED + 2)
    held = num_kept * KEPT + (BLOCKS - num_kept) * INPUTS
    assert held <= held_after_forward(engine) <= held + 3 * INPUTS  # the output, its square
    engine.close(restore=False)


def test_a_larger_batch_is_measured_anew_and_a_smaller_one_is_not():
    config = {"stage": 0, "recompute": "auto", "memory_budget": room_for(5)}
    engine = zeroshard.initialize(stack(), adamw, config).engine
    run_steps(engine, 3)
    assert names(engine).count("keep") == 5
    run_steps(engine, 1, rows=ROWS // 2)
    assert names(engine).count("keep") == 5
    run_steps(engine, 1, rows=2 * ROWS)
    assert names(engine) is None
    run_steps(engine, 3, rows=2 * ROWS)
    assert names(engine).count("keep") == 1  # in the place of its recomputation
    engine.close(restore=False)


def test_a_budget_that_is_too_small_warns_and_all_blocks_recompute():
    engine = zeroshard.initialize(stack(), adamw, {"recompute": "auto", "memory_budget": 1000}).engine
    run_steps(engine, 2)
    with pytest.warns(
        UserWarning, match=r"memory_budget: 1000 B are not enough for this batch: all else takes"
    ):
        run_steps(engine, 1)
    assert names(engine) == ["recompute"] * (BLOCKS - 1) + ["keep"]  # the last one as a recomputation needs
    engine.close(restore=False)


class Headed(nn.Module):
    """Blocks, and a head whose logits take more than a block keeps."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = stack(num=16), nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x, labels=None, tiles=None):
        hidden = self.blocks(x)
        if tiles is not None:
            return zeroshard.tiled_cross_entropy(hidden, labels, self.head, tiles=tiles)
        logits = self.head(hidden)
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


LOSSES = {
    "outside": lambda engine, x, labels: nn.functional.cross_entropy(engine(x), labels),
    "inside": lambda engine, x, labels: engine(x, labels),
    "in tiles": lambda engine, x, labels: engine(x, labels, tiles=4),
}


def share_of_budget(loss, rows=ROWS, units=None):
    """Bytes of activations in a step over the budget for them, of which a part of the blocks keeps all."""
    x, labels, model, room = batch(0, rows), torch.arange(rows), Headed(), 14 * KEPT * rows // ROWS
    states = 16 * sum(p.numel() for p in model.parameters())
    config = {"stage": 0, "recompute": "auto", "memory_budget": states + room, "units": units}
    engine = zeroshard.initialize(model, adamw, {**config, "gradient_accumulation_steps": 2}).engine
    for _ in range(2 * PLANNED + 3):
        engine.backward(LOSSES[loss](engine, x, labels))
        engine.step()
    assert 0 < names(engine).count("keep") < 16
    parameters = [*engine.module.parameters()]
    with Peak([x, labels, *parameters, *(p.grad for p in parameters)]) as live:
        engine.backward(LOSSES[loss](engine, x, labels))
    engine.close(restore=False)
    return live.peak / room


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_takes_at_least_nine_tenths_of_its_budget(loss):
    assert 0.9 < share_of_budget(loss) <= 1


def test_the_weight_of_a_head_that_is_a_unit_is_no_activation():
    """It takes more than the logits of a few rows."""

    def is_unit(module):
        return isinstance(module, Block) or getattr(module, "out_features", 0) == 8 * WIDTH

    few = ROWS // 4
    assert share_of_budget("outside", few, is_unit) == share_of_budget("outside", few) > 0.8


def shares_of_budgets():
    """Bytes of model states and activations in a step over the budget, at some stages; half of it is kept."""
    found, num, rows = [], 16, 32 * ROWS
    budget = num * STATES // BLOCKS + 32 * 12 * KEPT
    for stage in STAGES:
        config = {"stage": stage, "recompute": "auto", "memory_budget": budget}
        engine = zeroshard.initialize(stack(num=num), adamw, config).engine
        run_steps(engine, PLANNED + 2, rows)
        x, buffers = batch(0, rows), engine._runtime.buffers
        engine.reset_memory_report()
        with Peak([x, *(values for buffer in buffers for values in (buffer.full, buffer.main))]) as live:
            engine.backward(engine(x).square().mean())
        found.append((take_peak(engine) + live.peak) / budget)
        assert 0 < names(engine).count("keep") < num
        engine.close(restore=False)
    return found


def test_two_ranks_take_at_least_nine_tenths_of_their_budgets(ranks):
    shares = [share for own in ranks(2, shares_of_budgets) for share in own]
    assert 0.9 < min(shares) < max(shares) < 1.02, shares  # both count the gradients that the step makes


def choose(engine, choices):
    """Let each unit keep or recompute at random from here on."""
    budget = engine._runtime.budget
    budget._steps = PLANNED
    budget._name(choices.choice(["keep", "recompute"]) for _ in budget.names)


def random_plans(folder):
    """Losses and parameters at all stages and on all tiers, with other choices in each step."""
    found, choices = [], random.Random(0)
    tiers = [{"optimizer": tier, "parameters": tier, "nvme_path": folder} for tier in ("cpu", "nvme")]
    configs = [*({"stage": stage} for stage in ALL_STAGES), *({"stage": 3, "offload": one} for one in tiers)]
    for config in ({"stage": 0}, *({**one, "recompute": "auto", "memory_budget": "1GB"} for one in configs)):
        engine = zeroshard.initialize(stack(), adamw, config).engine
        losses = run_steps(engine, 3)
        for number in range(3, 6):
            if "recompute" in config:
                choose(engine, choices)
            losses += run_steps(engine, 1, first=number)
        found.append((losses, engine.full_state_dict()))
        engine.close(restore=False)
    return found


@pytest.mark.long_where(num_ranks=[1, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_choices_give_the_same_bits(ranks, num_ranks, tmp_path):
    for (want, state), *others in ranks(num_ranks, random_plans, str(tmp_path)):
        for losses, values in others:
            assert losses == want
            assert all(torch.equal(values[name], state[name]) for name in state)


@pytest.mark.long
@pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))),
    reason="torch.compile needs a C++ compiler on CPUs",
)
def test_compiled_blocks_keep_and_recompute_with_the_same_bits():
    found = []
    for config in ({}, {"recompute": "auto", "memory_budget": room_for(3)}):
        torch._dynamo.reset()
        engine = zeroshard.initialize(stack(), adamw, {"stage": 3, "compile": True, **config}).engine
        losses = run_steps(engine, PLANNED + 2)
        around = [unit.around[1:] for unit in engine.units if unit.name]
        for names in (["keep"] * BLOCKS, ["recompute"] * BLOCKS, ["keep", "recompute"] * (BLOCKS // 2)):
            if config:
                engine._runtime.budget._name(names)
            losses += run_steps(engine, 1)
        found.append((losses, engine.full_state_dict()))
        engine.close(restore=False)
    assert {*around} == {("recompute", "compile"), ("keep", "compile")}
    (want, state), (losses, values) = found
    assert losses == want
    assert all(torch.equal(values[name], state[name]) for name in state)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [
        (1, {"stage": 1, "memory_budget": "1MB"}),
        (2, {"stage": 3, "gradient_accumulation_steps": 2, "memory_budget": "120KB"}),
        (2, {"stage": 2, "mesh": {"tp": 2}, "memory_budget": "300KB"}),
    ],
    ids=str,
)
def test_a_model_of_transformers_trains_as_in_one_process(ranks, num_ranks, config):
    kind, steps = kind_of("Llama"), PLANNED + 1
    found = ranks(num_ranks, divided, {**config, "recompute": "auto"}, adamw, kind=kind, steps=steps)
    compare(found, plain(adamw, kind=kind, steps=steps), losses=1e-6, norms=1e-5, values=1e-6)


def choices_of_tensor_ranks():
    config = {"stage": 0, "mesh": {"tp": 2}, "recompute": "auto", "memory_budget": room_for(3)}
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    engine = zeroshard.initialize(stack(), adamw, config, tp_plan=plan).engine
    if dist.get_rank():
        engine._runtime.budget.take_peak = lambda: 10**9  # by itself it would have no room
    run_steps(engine, PLANNED + 1)
    return names(engine)


def test_tensor_ranks_choose_alike_whatever_each_has_measured(ranks):
    """A recomputation of divided layers adds up over them again."""
    one, other = ranks(2, choices_of_tensor_ranks)
    assert one == other
    assert "keep" in one


@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_sequential_recomputes_runs_in_runs_where_that_is_less(stage):
    """Of 16 blocks the inputs alone would take more than the budget."""
    num, states = 16, 16 * STATES // BLOCKS
    room = 8 * INPUTS + 2 * KEPT
    config = {"stage": stage, "recompute": "auto", "memory_budget": states + room}
    engine = zeroshard.initialize(stack(nn.Sequential, num), adamw, config).engine
    losses = run_steps(engine, PLANNED + 2)
    budget = engine._runtime.budget
    assert any(isinstance(inner, list) for part in budget.tree if isinstance(part, list) for inner in part)
    without = zeroshard.initialize(stack(num=num), adamw, {"stage": stage}).engine
    assert losses == run_steps(without, PLANNED + 2)
    x = batch(0)
    with Peak([x, *engine.module.parameters()]) as live:
        loss = engine(x).square().mean()
        held = live.now
        assert held < num * INPUTS
        engine.backward(loss)
    gradients = states // 4
    assert live.peak - gradients < room
    engine.close(restore=False)


def pipelined(config, num, room):
    """The choices of a pipeline rank with a budget, and its tree, after the steps of one that keeps all."""
    found, states = [], num * STATES // BLOCKS // 2
    for own in ({}, {"recompute": "auto", "memory_budget": states + room}):
        pipeline = {"num_microbatches": 4, **config.get("pipeline", {})}
        given = {"mesh": {"pp": 2}, **config, **own, "pipeline": pipeline}
        model, loss_fn = stack(nn.Sequential, num), nn.functional.mse_loss
        engine = zeroshard.initialize(model, adamw, given, loss_fn=loss_fn).engine
        pairs = [(batch(n, 4 * ROWS), batch(100 + n, 4 * ROWS)) for n in range(PLANNED + 3)]
        losses = [engine.train_batch(*pair).item() for pair in pairs[1:]]
        if budget := engine._runtime.budget:
            planned, tree, budget.tree = budget.names, budget.tree, None
            choose(engine, random.Random(dist.get_rank()))
        losses.append(engine.train_batch(*pairs[0]).item())
        found.append((losses, [p.detach().clone() for p in engine.module.parameters()]))
        engine.close(restore=False)
    (want, state), (losses, values) = found
    assert losses == want
    assert all(map(torch.equal, values, state))
    return planned, tree


IN_CHUNKS = {"schedule": "interleaved", "num_chunks": 3}


@pytest.mark.long_where(config=[{"stage": 1, "pipeline": {"schedule": "zb-h1"}}, {"stage": 3}])
@pytest.mark.parametrize(
    ("num_ranks", "config", "num", "room", "has_tree"),
    [
        (2, {"stage": 0}, 16, LOSS + 2 * (KEPT + 5 * INPUTS), True),
        (2, {"stage": 2, "pipeline": IN_CHUNKS}, BLOCKS, 3 * KEPT, False),
        (2, {"stage": 3}, BLOCKS, 4 * KEPT, False),
        (4, {"stage": 1, "pipeline": {"schedule": "zb-h1"}}, BLOCKS, KEPT, False),
    ],
    ids=str,
)
def test_micro_batches_in_flight_share_the_budget_of_a_pipeline_rank(
    ranks, num_ranks, config, num, room, has_tree
):
    (first, tree), *_, (last, _) = ranks(num_ranks, pipelined, config, num, room)
    assert "recompute" in first
    assert "keep" in last
    if "pipeline" not in config:  # on the last rank of 1F1B one is in flight
        assert first.count("keep") < last.count("keep")
    assert (tree is not None) == has_tree


def test_an_estimate_tells_what_a_budget_costs():
    def of_budget(config):
        loss = lambda model: model(torch.empty(ROWS, WIDTH)).square().mean()  # noqa: E731
        return zeroshard.estimate(stack(), 1, {"stage": 0, **config}, host_computes=True, loss_of=loss)

    keep, unit = of_budget({}), of_budget({"recompute": "unit"})
    times = []
    for num_kept in range(1, BLOCKS + 2):
        budget = room_for(num_kept) - LOSS
        found = of_budget({"recompute": "auto", "memory_budget": budget})
        num = round(found.extra_time * 3 * BLOCKS)
        times.append(found.extra_time)
        assert found.extra_time == pytest.approx(num / BLOCKS / 3)
        assert budget - KEPT < found.peak <= budget or num in (0, BLOCKS)
        assert num == BLOCKS or keep.activations - found.activations == num * (KEPT - INPUTS)
    assert times == sorted(times, reverse=True)
    assert len(set(times)) >= BLOCKS - 1
    assert (times[0], times[-1]) == (pytest.approx(unit.extra_time), 0)
    share = of_budget({"recompute": "auto", "memory_budget": 0.5})  # of a device that is not known: the least
    assert (share.activations, share.extra_time) == (unit.activations, unit.extra_time)


class Clock:
    """Time that passes in blocks alone."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Takes(torch.autograd.Function):
    """The identity, whose forward takes 1 s, and whose backward takes 3 s."""

    @staticmethod
    def forward(ctx, x, clock):
        clock.now += 1
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += 3
        return gradient, None


class Slow(Block):
    clock: Clock

    def forward(self, x):
        return super().forward(Takes.apply(x, self.clock))


class WithHead(Blocks):
    """Something that belongs to no block takes time, too."""

    def forward(self, x):
        return Takes.apply(super().forward(x), Slow.clock)


@pytest.mark.parametrize(
    ("kind", "room", "root"), [(WithHead, None, 4), (nn.Sequential, 5 * INPUTS + 2 * KEPT, 0)]
)
def test_a_step_takes_the_seconds_that_are_predicted(kind, room, root, monkeypatch):
    monkeypatch.setattr(streams, "time", clock := Clock())
    monkeypatch.setattr(Slow, "clock", clock, raising=False)
    model = kind(*[Slow() for _ in range(BLOCKS)])
    budget = room_for(3) if room is None else STATES + room
    engine = zeroshard.initialize(
        model, adamw, {"stage": 0, "recompute": "auto", "memory_budget": budget}
    ).engine
    for number in range(PLANNED + 3):
        begin = clock.now
        engine.backward(engine(batch(number).requires_grad_()).square().mean())
        engine.step()
        predicted = sum(unit.seconds for unit in engine.units)
        assert (predicted == 0) == (number < 2)  # it is measured
    assert predicted == clock.now - begin > 4 * BLOCKS
    assert [unit.seconds for unit in engine.units if not unit.name] == [root]
    assert f"{predicted:.4g} s" in str(engine.units)
    engine.close(restore=False)


@pytest.mark.parametrize(
    ("make", "config", "error"),
    [
        (stack, {"memory_budget": "1GB"}, "recompute"),
        (stack, {"recompute": "auto"}, "memory_budget: expected bytes on the CPU"),
        (stack, {"recompute": "auto", "memory_budget": 0.5}, "memory_budget: expected bytes on the CPU"),
        (stack, {"recompute": "auto", "memory_budget": "many"}, "a size such as '60GB'"),
        (lambda: nn.Linear(2, 2), {"recompute": "auto", "memory_budget": "1GB"}, "expected repeated blocks"),
        (
            stack,
            {"recompute": "auto", "memory_budget": "1GB", "offload": {"activations": "cpu"}},
            "recompute",
        ),
        (
            lambda: build("Llama"),
            {"recompute": "auto", "memory_budget": "1GB", "units": ["LlamaDecoderLayer", "LlamaMLP"]},
            "no unit inside of one",
        ),
    ],
)
def test_what_is_refused(make, config, error):
    with pytest.raises(ValueError, match=error):
        zeroshard.initialize(make(), adamw, config)


@pytest.mark.parametrize("pipeline", [{"schedule": "pipedream"}, {"trace": True, "split": ["0"]}])
def test_pipelines_that_step_late_or_are_traced_have_no_budget(pipeline):
    config = {"recompute": "auto", "mesh": {"pp": 2}, "memory_budget": "1GB", "pipeline": pipeline}
    with pytest.raises(
        ValueError, match=r"needs (recompute to be 'none', 'lean' or 'unit'|pipeline\.trace to be)"
    ):
        zeroshard.Config.from_dict(config)


def test_a_model_that_calls_a_block_twice_is_no_chain():
    found = []
    for config in ({}, {"recompute": "auto", "memory_budget": STATES // 3 + LOSS + 2 * KEPT}):
        blocks = stack(nn.Sequential, 2)
        engine = zeroshard.initialize(nn.Sequential(*blocks, *blocks), adamw, {"stage": 0, **config}).engine
        found.append(run_steps(engine, PLANNED + 1))
        engine.close(restore=False)
    assert found[0] == found[1]


class Graph(nn.Module):
    """Its root saves a sparse matrix, which has no storage."""

    def __init__(self):
        super().__init__()
        self.blocks = stack(nn.Sequential)
        self.edges = torch.eye(ROWS).to_sparse()

    def forward(self, x):
        return torch.sparse.mm(self.edges, self.blocks(x))


def test_a_root_may_save_sparse_tensors():
    found = []
    for config in ({}, {"recompute": "auto", "memory_budget": room_for(1)}):
        torch.manual_seed(0)
        engine = zeroshard.initialize(Graph(), adamw, {"stage": 0, **config}).engine
        found.append(run_steps(engine, 3))
        engine.close(restore=False)
    assert found[0] == found[1]


def test_a_module_without_an_engine_has_no_budget():
    with pytest.raises(ValueError, match=r"expected 'none', 'lean' or 'unit' for shard\(\)"):
        zeroshard.shard(stack(), {"recompute": "auto", "memory_budget": "1GB"})
