"""Local steps of replicas, and outer steps: against one process that trains a model for each replica."""

import copy
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.distributed.training import refused, seeded, take_steps
from tests.ranks import on_ranks

WIDTH, STEPS = 16, 7


class Net(nn.Module):
    """Three blocks and a root, of float64; a frozen layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.double()

    def forward(self, x):
        x = self.frozen(self.first(x))
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x


adamw = partial(torch.optim.AdamW, lr=1e-2)
sgd = partial(torch.optim.SGD, lr=0.05)


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)


def replicas(outer_step, optimizer=adamw, *, seed=0, stage=3, group=None, **config):
    model = seeded(Net, seed=seed)
    config = {"stage": stage, "shard_group_size": group if stage else None, "units": ["Linear"], **config}
    return zeroshard.initialize(model, optimizer, config, outer_step=outer_step).engine


def loss_of(engine, step):
    return engine(batch(step, engine.dp_rank)).square().mean()


def stepped(engine, steps):
    take_steps(engine, steps, loss_of)
    return engine


class Simulation:
    """Replicas and their outer steps in plain PyTorch; the units in the order of their names' first calls."""

    def __init__(self, policy, optimizer, num_replicas, group=1, max_norm=1e9):
        self.policy, self.group, self.max_norm = policy, group, max_norm
        self.models = [seeded(Net) for _ in range(num_replicas)]
        self.optimizers = [optimizer(one.parameters()) for one in self.models]
        anchor = copy.deepcopy(self.models[0])
        # "first", then blocks; the root has no parameters of its own.
        units = [anchor.first, *anchor.blocks]
        self.names = {p: name for name, p in anchor.named_parameters()}
        self.fragments = [
            [p for unit in units[at :: policy.fragments] for p in unit.parameters()]
            for at in range(policy.fragments)
        ]
        sgd = {"lr": policy.lr, "momentum": policy.momentum, "nesterov": policy.momentum > 0}
        self.outer = [torch.optim.SGD(fragment, **sgd) for fragment in self.fragments]
        self.sent = None
        self.count = 0

    @torch.no_grad()
    def mean(self, p):
        own = [dict(one.named_parameters())[self.names[p]] for one in self.models]
        return torch.stack([each.detach() for each in own]).mean(0)

    @torch.no_grad()
    def give(self, p):
        for one in self.models:
            own = dict(one.named_parameters())[self.names[p]]
            own.copy_(p.lerp(own, self.policy.keep_local))

    def step(self, step):
        for replica, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            ranks = range(replica * self.group, (replica + 1) * self.group)
            losses = [model(batch(step, rank)).square().mean() for rank in ranks]
            (sum(losses) / self.group).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        self.count += 1
        policy = self.policy
        if self.count <= policy.warmup:
            for p in self.names:
                if p.requires_grad:
                    p.data.copy_(self.mean(p))
                    self.give(p)
            return
        period, after = policy.every // policy.fragments, self.count - policy.warmup
        if after % period == 0:
            number = (after // period - 1) % policy.fragments
            self.sent = number, [p.detach() - self.mean(p) for p in self.fragments[number]]
        if after - policy.delay > 0 and (after - policy.delay) % period == 0:
            number, changes = self.sent
            for p, change in zip(self.fragments[number], changes, strict=True):
                p.grad = change
            self.outer[number].step()
            for p in self.fragments[number]:
                self.give(p)

    def replica(self, number):
        return self.models[number].state_dict()


def far(engine, want, bound=1e-12):
    """Names of parameters that are not those of a model; on rank 0 of each replica."""
    got = engine.full_state_dict()
    assert not got or got.keys() == want.keys()
    return [name for name in got if (got[name].double() - want[name]).abs().max() > bound]


def replica_of(engine):
    return engine._axes.outer.rank


def simulated(policy, optimizer=adamw, *, group=1, bound=1e-12, **config):
    engine = replicas(policy, optimizer, group=group, **config)
    max_norm = config.get("clip_grad_norm", 1e9)
    reference = Simulation(policy, optimizer, engine.world_size // group, group, max_norm)
    found = []
    for step in range(STEPS):
        stepped(engine, [step])
        reference.step(step)
        want = reference.replica(replica_of(engine))
        found += [f"step {step}: {name}" for name in far(engine, want, bound)]
    return found


UNDER_WAY = zeroshard.OuterStep(every=2, delay=1)
STREAMING = zeroshard.OuterStep.diloco(every=4, fragments=2, delay=1, keep_local=0.25)
POLICIES = {
    "each step": zeroshard.OuterStep.periodic_averaging(1),
    "periodic": zeroshard.OuterStep.periodic_averaging(3),
    "post-local": zeroshard.OuterStep.post_local_sgd(3, warmup=2),
    "DiLoCo": zeroshard.OuterStep.diloco(every=3),
    "streaming": STREAMING,
}


@on_ranks(2)
def test_replicas_equal_one_process_that_trains_them():
    """Each preset in float64; "each step" with SGD is the average of the replicas' models."""
    found = {}
    for stage in (0, 3) if dist.get_world_size() > 1 else ():
        for name, policy in POLICIES.items():
            found[stage, name] = simulated(policy, sgd if name == "each step" else adamw, stage=stage)
    return [f"{key}: {names[:2]}" for key, names in found.items() if names]


@pytest.mark.long
@on_ranks(4)
def test_replicas_of_two_ranks_equal_one_process_that_trains_them():
    """Stages, tiers and clipping: norms are of a replica."""
    found = {}
    for stage in (1, 2, 3):
        found[stage] = simulated(STREAMING, stage=stage, group=2)
    found["anchors on the host"] = simulated(replace(STREAMING, offload=True), stage=3, group=2)
    found["host"] = simulated(STREAMING, stage=3, group=2, offload={"optimizer": "cpu"})
    # A step of SGD shows the factor, which is a float32.
    found["clipped"] = simulated(STREAMING, sgd, stage=3, group=2, clip_grad_norm=0.05, bound=1e-8)
    return [f"{key}: {names[:2]}" for key, names in found.items() if names]


@on_ranks(2)
def test_replicas_begin_with_the_values_of_rank_0():
    engine = replicas(zeroshard.OuterStep.periodic_averaging(4), seed=dist.get_rank())
    assert (engine.dp_rank, engine.dp_world_size) == (dist.get_rank(), 2)
    assert not far(engine, seeded(Net).state_dict(), 0.0)


@pytest.mark.parametrize(("num_ranks", "stages"), [(2, [0, 3]), (4, [1, 2, 3])])
@on_ranks()
def test_replicas_do_not_wait_for_each_other_between_outer_steps(num_ranks, stages):
    """Replica 1 stays in its first backward until replica 0 has taken all of its local steps."""
    group, found = num_ranks // 2, []

    def wait_for_replica_0(_):
        dist.recv(torch.zeros(1), dist.get_rank() - group)

    for stage in stages:
        engine = replicas(zeroshard.OuterStep.periodic_averaging(4), stage=stage, group=group)
        replica, first = replica_of(engine), loss_of(engine, 0)
        if replica == 1:
            first.register_hook(wait_for_replica_0)
        engine.backward(first)
        engine.step()
        stepped(engine, range(1, 3))
        if replica == 0:
            dist.send(torch.zeros(1), dist.get_rank() + group)
        before = engine.full_state_dict()
        stepped(engine, [3])
        after = engine.full_state_dict()
        found += [(stage, name) for name in after if after[name].equal(before[name]) != ("frozen" in name)]
    return found


@on_ranks(2)
def test_a_replica_that_is_alone_trains_as_without_outer_steps():
    plain, outer = (replicas(policy, group=2) for policy in (None, zeroshard.OuterStep.periodic_averaging(1)))
    return far(stepped(outer, range(3)), stepped(plain, range(3)).full_state_dict(), 0.0)


@on_ranks(2)
def test_bytes_between_replicas_are_those_of_gradients_over_the_steps_between():
    sent = {}
    for every in (1, 4):
        engine = replicas(zeroshard.OuterStep.diloco(every=every))
        engine.reset_comm_report()
        report = stepped(engine, range(8)).comm_report()
        sent[every] = report.bytes_sent["all_reduce"]
        assert not any(report.bytes_sent[kind] for kind in ("all_gather", "reduce_scatter"))
    padded = sum(
        gradients.buffer.main.numel() for unit in engine._runtime.units for gradients in unit.gradients
    )
    assert sent[1] == 8 * padded * 8  # 2 (N - 1) / N values of 8 bytes in each of 8 steps
    assert sent[4] == sent[1] / 4


def resumed(folder, group, stop):
    """Train through a checkpoint after some steps, and from it: the same bits."""
    engine = stepped(replicas(STREAMING, group=group), range(stop))
    engine.save_checkpoint(folder)
    want = stepped(engine, range(stop, STEPS)).full_state_dict()
    again = stepped(replicas(STREAMING, group=group, seed=5), range(2))
    again.load_checkpoint(folder)
    return far(stepped(again, range(stop, STEPS)), want, 0.0)


@on_ranks(2)
def test_a_checkpoint_between_outer_steps_resumes_to_the_bit(tmp_path):
    """After 2 steps values are under way, after 5 steps replicas are apart."""
    return [name for stop in (2, 5) for name in resumed(tmp_path / str(stop), 1, stop)]


@pytest.mark.long
@on_ranks(4)
def test_a_checkpoint_of_replicas_of_two_ranks_resumes_to_the_bit(tmp_path):
    return [name for stop in (2, 3, 5) for name in resumed(tmp_path / str(stop), 2, stop)]


@on_ranks(2)
def test_checkpoints_that_do_not_fit_the_replicas_are_refused(tmp_path):
    engine = stepped(replicas(STREAMING), range(3))
    engine.save_checkpoint(tmp_path)
    values = engine.full_state_dict()
    other = replicas(zeroshard.OuterStep.diloco(every=5))
    text = refused(lambda: other.load_checkpoint(tmp_path))
    assert "was saved with another outer_step" in text
    [remedy] = set(re.findall(r"load '(\S+)'", text))
    # One replica's values for all: here those of replica 0.
    own = [None, None]
    dist.all_gather_object(own, values)
    other.load_checkpoint(remedy)
    assert not far(other, own[0], 0.0)
    plain = replicas(None)
    with pytest.warns(UserWarning, match=r"'(outer_4_0_2_1_\d+)', '\1_anchor'") as caught:
        plain.load_checkpoint(remedy)
    assert len(caught) == 1
    if dist.get_rank() == 0:
        (tmp_path / "replica-2").mkdir()
    dist.barrier()
    assert "expected checkpoints of 2 replicas, found 3" in refused(lambda: engine.load_checkpoint(tmp_path))
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "replica-2").rmdir()
    stepped(engine, [3])
    engine.save_checkpoint(tmp_path)
    dist.barrier()
    if dist.get_rank() == 1:
        (tmp_path / "replica-1" / "latest").write_text("step-3")
    dist.barrier()
    assert "checkpoints of other steps" in refused(lambda: engine.load_checkpoint(tmp_path))


@on_ranks(2)
def test_values_under_way_are_loaded_for_the_parameters_of_their_fragment_alone(tmp_path):
    engine, units = stepped(replicas(STREAMING), range(2)), {"units": ["blocks.0"]}
    engine.save_checkpoint(tmp_path / "two")
    other = replicas(STREAMING, **units)
    assert "for other units or trained parameters" in refused(lambda: other.load_checkpoint(tmp_path / "two"))
    engine = stepped(replicas(UNDER_WAY), range(2))
    engine.save_checkpoint(tmp_path / "one")
    other = replicas(UNDER_WAY, **units, seed=5)
    other.load_checkpoint(tmp_path / "one")
    assert not far(stepped(other, [2]), stepped(engine, [2]).full_state_dict(), 0.0)


@on_ranks(2)
def test_replicas_that_load_one_checkpoint_draw_random_numbers_of_their_own(tmp_path):
    plain = replicas(None)
    torch.manual_seed(dist.get_rank())
    plain.save_checkpoint(tmp_path, "one")
    engine = replicas(zeroshard.OuterStep.periodic_averaging(2))
    engine.load_checkpoint(tmp_path)
    drawn = [None, None]
    dist.all_gather_object(drawn, torch.rand(4).tolist())
    assert drawn[0] != drawn[1]
    stepped(engine, range(2))
    engine.save_checkpoint(tmp_path / "two")
    assert "load '" in refused(lambda: replicas(None).load_checkpoint(tmp_path / "two"))


@on_ranks(2)
def test_a_replica_may_be_edited_alone_and_not_fall_a_step_behind():
    engine = replicas(zeroshard.OuterStep.periodic_averaging(4))
    stepped(engine, range(2))
    engine.load_state_dict({"first.bias": torch.zeros(WIDTH).double()}, strict=False)
    assert not engine.full_parameter("first.bias").any()
    if engine._axes.outer.rank:
        with pytest.raises(RuntimeError, match="would be a step behind the others"):
            engine.step()


def test_an_outer_step_that_cannot_be_is_refused():
    cases = [
        ({"every": 0}, "every"),
        ({"every": 4, "fragments": 3}, "a divisor of every=4"),
        ({"every": 4, "fragments": 2, "delay": 2}, "an integer from 0 to below 2"),
        ({"every": 4, "momentum": 1.0}, "momentum"),
        ({"every": 4, "keep_local": 1.0}, "keep_local"),
    ]
    for options, expected in cases:
        with pytest.raises(ValueError, match=expected):
            zeroshard.OuterStep(**options)


def test_what_outer_steps_do_not_go_with_is_refused(ranks):
    assert ranks(1, refusals)[0] == []


def refusals():
    policy = zeroshard.OuterStep.diloco(every=2)
    cases = {
        "expected an optimizer": lambda: replicas(policy, None),
        "nonfinite='report'": lambda: replicas(policy, nonfinite="skip"),
        "mesh.pp=1": lambda: replicas(policy, mesh={"tp": 2}),
    }
    return [expected for expected, act in cases.items() if expected not in refused(act)]


@on_ranks(1)
def test_an_edit_beside_anchors_or_means_under_way_is_refused_until_a_checkpoint_is_loaded(tmp_path):
    for policy in (zeroshard.OuterStep.diloco(every=2), UNDER_WAY):
        engine = stepped(replicas(policy), range(2))
        engine.save_checkpoint(tmp_path)
        engine.set_full_parameter("first.bias", torch.ones(WIDTH).double())
        assert "load a checkpoint to be rid of the edit" in refused(lambda: stepped(engine, [2]))  # noqa: B023
        engine.load_checkpoint(tmp_path)
        assert not far(stepped(engine, [2]), stepped(replicas(policy), range(3)).full_state_dict(), 0.0)
    engine.set_full_parameter("first.bias", torch.ones(WIDTH).double())  # no means are under way
    stepped(engine, range(3, 5))
