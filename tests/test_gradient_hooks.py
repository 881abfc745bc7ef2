"""Communication hooks of torch's DistributedDataParallel over our buckets, against that class itself.

Gloo runs the callbacks of a future in a thread of its own. There PowerSGD starts further collectives, whose
order among those of other buckets is not the same on all ranks: so the reference waits in each hook, too.
"""

import contextlib
import copy
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from examples import hooks
from tests.distributed.training import farthest, flat_values, numbers, take_steps, values_after
from tests.ranks import Ranks, on_ranks
from zeroshard.optim import LAMB, Muon

SIZES = [(60, 40), (50, 60), (7, 50)]
"""The matrices of the model. PowerSGD of rank 2 compresses all of them, by a factor of 4.8 and more."""
RANK, WARM_UP = 2, 3


def layers(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(i, o, bias=bias), nn.Tanh()) for o, i in SIZES))


def power():
    return PowerSGDState(None, RANK, start_powerSGD_iter=WARM_UP)


def loss_of(model, number):
    return model(numbers(number, 6, 40).to(next(model.parameters()).dtype)).square().mean()


def waiting(hook):
    """The hook, with a wait of the host."""

    def wait(state, bucket):
        future = hook(state, bucket)
        future.wait()
        return future

    return wait


def train_replicated(state, hook, num_steps, *, k=1, clip=None, model=None, after=list, **options):
    """The parameters of DistributedDataParallel on this rank; a function takes them after each step."""
    model = DistributedDataParallel(model or layers(), **options)
    model.register_comm_hook(state, waiting(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(num_steps):
        for micro in range(k):
            with model.no_sync() if micro + 1 < k else contextlib.nullcontext():
                (loss_of(model, step * k + micro) / k).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        after(model.parameters())
        optimizer.zero_grad()
    return [p.detach().view(-1) for p in model.module.parameters()]


def sharded(state, hook, *, model=None, **config):
    model = model or layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = {"units": lambda module: False, **config}
    return zeroshard.initialize(model, optimizer, config, gradient_hook=(state, hook)).engine


class Stacked(dist.ProcessGroup):
    """Gloo, but the future of an all-gather has one tensor for all ranks, as with NCCL.

    torch's quantization reads the first tensor. Of Gloo's list it is rank 0's: an IndexError, under DDP too.
    """

    def allgather(self, outputs, *arguments):
        dist.group.WORLD.allgather(outputs, *arguments).wait()
        return SimpleNamespace(get_future=lambda: future_of([torch.stack(outputs[0])]))


@on_ranks(2)
def test_hooks_of_torch_give_the_bits_of_ddp():
    for hook in (allreduce_hook, bf16_compress_hook, fp16_compress_wrapper(allreduce_hook)):
        want = train_replicated(None, hook, 3)
        for stage in (0, 1):
            assert not farthest(values_after(sharded(None, hook, stage=stage), range(3), loss_of), want)


@on_ranks(2)
def test_quantization_gives_the_bits_of_ddp():
    """Over one parameter, as in the first step of DDP others have another order in their bucket."""
    group = Stacked(dist.get_rank(), dist.get_world_size())
    for hook in (quantization_perchannel_hook, quantization_pertensor_hook):
        models = [nn.Linear(40, 60, bias=False) for _ in range(3)]
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        want = train_replicated(group, hook, 5, model=models[0])
        for stage, model in enumerate(models[1:]):
            assert not farthest(
                values_after(sharded(group, hook, model=model, stage=stage), range(5), loss_of), want
            )
    engine = sharded(None, quantization_pertensor_hook, stage=0)
    with pytest.raises(RuntimeError, match="IndexError: "):  # of torch, over Gloo alone
        loss_of(engine, 0).backward()


def elements_sent(call):
    """The elements that hooks of torch give to all-reduces in a call, and its result."""
    sent, own = [], dist.all_reduce

    def all_reduce(tensor, *arguments, **options):
        if "ddp_comm_hooks" in sys._getframe(1).f_globals["__name__"]:
            sent.append(tensor.numel())
        return own(tensor, *arguments, **options)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        result = call()
    return sum(sent), result


@on_ranks(2)
def test_power_sgd_gives_the_bits_of_ddp_and_sends_what_its_formula_says():
    want = train_replicated(power(), powerSGD_hook, 20)
    for stage in (0, 1):
        engine = sharded(power(), powerSGD_hook, stage=stage)
        take_steps(engine, range(WARM_UP), loss_of)
        sent, got = elements_sent(lambda engine=engine: values_after(engine, range(WARM_UP, 20), loss_of))
        assert not farthest(got, want)
        # P of n r and Q of m r elements for each matrix, and the biases as they are.
        assert sent == (20 - WARM_UP) * sum((n + m) * RANK + n for n, m in SIZES)
        # On this rank errors of all elements, P and Q of matrices stay.
        num = sum(n * m + n + (n + m) * RANK for n, m in SIZES)
        momenta = sum(p.numel() for p in engine.parameters())
        assert engine.memory_report().optimizer == 4 * (num + momenta)


@on_ranks(2)
def test_power_sgd_over_several_units_gives_the_bits_of_ddp_over_as_many_buckets():
    want = train_replicated(power(), powerSGD_hook, 8, model=layers(bias=False), bucket_cap_mb=1e-6)
    state = power()
    engine = sharded(state, powerSGD_hook, model=layers(bias=False), stage=1, units=("Linear",))
    assert not farthest(values_after(engine, range(8), loss_of), want)
    assert len(state.error_dict) == len(SIZES)
    assert state.iter == 8


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@on_ranks()
def test_a_hook_runs_at_the_boundary_and_clipping_sees_its_means(num_ranks):
    config = {"gradient_accumulation_steps": 3, "clip_grad_norm": 0.01, "stage": 1}
    config |= {"shard_group_size": 2} if num_ranks == 4 else {}
    want = train_replicated(power(), powerSGD_hook, 6, k=3, clip=0.01)
    assert farthest(values_after(sharded(power(), powerSGD_hook, **config), range(18), loss_of), want) < 1e-6


@on_ranks(2)
def test_ranks_of_post_local_sgd_go_apart_as_in_ddp_and_are_saved_where_they_agree(tmp_path):
    for local in (True, False):

        def state(local=local):
            subgroup, _ = dist.new_subgroups(1)
            return PostLocalSGDState(None, subgroup, 2, post_local_gradient_allreduce=local)

        want = train_replicated(state(), post_localSGD_hook, 4)
        engine = sharded(state(), post_localSGD_hook, stage=0)
        take_steps(engine, range(2), loss_of)
        engine.save_checkpoint(tmp_path, f"{local}")
        take_steps(engine, range(2, 4), loss_of)
        got = [p.detach() for p in engine.parameters()]
        assert not farthest(got, want)
        with pytest.raises(RuntimeError, match=r"has let ranks go apart: .*unsharded\(write_back=True\)"):
            engine.save_checkpoint(tmp_path)
        with pytest.raises(RuntimeError, match="ranks have different gradients"):
            engine.clip_grad_norm_(1.0)
        average_wholes(engine, dist.group.WORLD)
        engine.save_checkpoint(tmp_path, optimizer=False)


START, PERIOD = 2, 2
"""The first step of post-local SGD that averages parameters, and the steps from one average to the next."""


def post_local(group_size, **options):
    """A state whose subgroup is the shard group, and the group of the ranks with the same shard."""
    shape = dist.get_world_size() // group_size, group_size
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    state = PostLocalSGDState(None, mesh.get_group("dp_shard"), START, **options)
    return state, mesh.get_group("dp_replicate")


def average_slices(engine, replicas):
    for p in engine.parameters():
        dist.all_reduce(p.data.div_(replicas.size()), group=replicas)


def average_wholes(engine, replicas):
    with engine.unsharded(write_back=True):
        average_parameters(iter([p for p in engine.parameters() if p.requires_grad]), replicas)


@pytest.mark.parametrize(("num_ranks", "group_size"), [(4, 2), (2, 1), (2, 2)])
@on_ranks()
def test_post_local_sgd_over_shard_groups_gives_the_parameters_of_ddp_at_stage_1(num_ranks, group_size):
    """In float64: Gloo's sums of 4 ranks depend on the place in a bucket, and DDP's first one is another."""
    state, replicas = post_local(group_size)
    averager, want = PeriodicModelAverager(PERIOD, START, replicas), []

    def after(parameters):
        averager.average_parameters(parameters := list(parameters))
        want.append([p.detach().flatten().clone() for p in parameters])

    train_replicated(state, post_localSGD_hook, 6, model=layers().double(), after=after)
    for average in (average_slices, average_wholes):
        config = {"model": layers().double(), "stage": 1, "shard_group_size": group_size}
        engine = sharded(post_local(group_size)[0], post_localSGD_hook, **config)
        for step in range(6):
            take_steps(engine, [step], loss_of)
            if step >= START and (step - START) % PERIOD == 0:
                average(engine, replicas)
            assert farthest(flat_values(engine), want[step]) < 1e-12, step


@on_ranks(2)
def test_a_state_of_ranks_that_go_further_apart_or_of_another_hook_is_not_loaded(tmp_path):
    """One of the shard group neither takes a state of no group: the hook would take the ranks of a node."""
    saved = [
        (post_local(2, post_local_gradient_allreduce=False)[0], post_localSGD_hook),
        (PostLocalSGDState(None, None, START), post_localSGD_hook),
        (power(), powerSGD_hook),
    ]
    for tag, pair in enumerate(saved):
        sharded(*pair, stage=0).save_checkpoint(tmp_path, str(tag))
        state = post_local(2)[0]
        engine = sharded(state, post_localSGD_hook, stage=1)
        compressed = sharded(None, bf16_compress_hook, stage=1)
        for one in (engine, compressed):
            with pytest.warns(UserWarning, match="a hook keeps its present state"):
                one.load_checkpoint(tmp_path, str(tag))
        assert state.post_local_gradient_allreduce
        assert (state.subgroup is not None, state.iter) == (True, 0)


@on_ranks(4)
def test_slices_of_post_local_sgd_are_saved_where_replicas_agree(tmp_path):
    state, replicas = post_local(2)
    engine = sharded(state, post_localSGD_hook, stage=1, shard_group_size=2)
    take_steps(engine, range(START + 1), loss_of)
    with pytest.raises(RuntimeError, match="has let ranks go apart"):
        engine.save_checkpoint(tmp_path)
    average_slices(engine, replicas)
    with pytest.raises(RuntimeError, match="leave out states that differ with optimizer=False"):
        engine.save_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, optimizer=False)
    want = flat_values(engine)
    take_steps(engine, [START + 1], loss_of)
    engine.load_checkpoint(tmp_path, optimizer=False)
    assert not farthest(flat_values(engine), want)
    if dist.get_rank() == 2:  # two of the four ranks hold other slices, and agree
        next(engine.parameters()).data.add_(1)
    with pytest.raises(RuntimeError, match="has let ranks go apart"):
        engine.save_checkpoint(tmp_path, optimizer=False)


POWER, APART = (power, powerSGD_hook), (lambda: PostLocalSGDState(None, None, 1), post_localSGD_hook)
OTHERS = lambda: post_local(2)[0], post_localSGD_hook
ALONE = lambda: post_local(2, post_local_gradient_allreduce=False)[0], post_localSGD_hook
REFUSED = [
    (POWER, {"stage": 2}, r"powerSGD_hook with stage=2: expected one of \[0, 1\].*reduce_dtype='bf16'"),
    (POWER, {"stage": 3}, r"powerSGD_hook with stage=3: expected one of \[0, 1\]"),
    (POWER, {"precision": {"param_dtype": "fp16"}}, "with float16: .*expected bf16"),
    (POWER, {"nonfinite": "skip"}, "with nonfinite='skip': expected one of .'report', 'error'."),
    (APART, {"stage": 1}, r"with stage=1: expected one of \[0\], as ranks go on with different gradients"),
    (OTHERS, {"stage": 1, "shard_group_size": 1}, "unless subgroup is the shard group.; OuterStep"),
    (ALONE, {"stage": 1}, r"post_localSGD_hook with stage=1: expected one of \[0\], as ranks go on"),
    ((dict, noop_hook), {"stage": 1}, r"noop_hook with stage=1: expected one of \[0\], as ranks go on"),
    (APART, {"clip_grad_norm": 1.0}, "with clip_grad_norm=1.0: expected one of .None., as ranks go on"),
    (APART, {"nonfinite": "error"}, "with nonfinite='error': expected one of .'report'."),
    (APART, {"offload": {"optimizer": "cpu"}}, "with offload.optimizer='cpu': expected one of .'none'."),
    (APART, {"precision": {"main_dtype": "bf16"}}, "with precision.main_dtype=torch.bfloat16: expected"),
    (APART, {"ignored": ["0.0.bias"]}, "with ignored=.*: expected one of .None."),
]


@on_ranks(2)
def test_settings_in_which_a_hook_cannot_be_right_are_refused():
    for (make, hook), config, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            sharded(make(), hook, **{"stage": 0, **config})
    plan, pair = {"0.0": "colwise", "1.0": "rowwise"}, (power(), powerSGD_hook)
    config = {"stage": 1, "mesh": {"tp": 2}}
    with pytest.raises(ValueError, match=r"with mesh\.tp=2: expected one of .1."):
        zeroshard.initialize(layers(), None, config, tp_plan=plan, gradient_hook=pair)
    with pytest.raises(ValueError, match=r"expected \(state, hook\)"):
        zeroshard.initialize(layers(), None, {"stage": 0}, gradient_hook=powerSGD_hook)
    with pytest.raises(ValueError, match="expected a dict or an object as state, to be saved, got a list"):
        zeroshard.initialize(layers(), None, {"stage": 0}, gradient_hook=([], allreduce_hook))
    alone, _ = dist.new_subgroups(1)
    with pytest.raises(ValueError, match="expected a group of all 2 ranks, got 1"):
        sharded(PowerSGDState(alone), powerSGD_hook, stage=0)
    state = PowerSGDState(None, 1 + dist.get_rank())
    with pytest.raises(RuntimeError, match="'matrix_approximation_rank': 2"):
        sharded(state, powerSGD_hook, stage=0)
    for kind in (LAMB, Muon):  # their updates would be of several ranks' gradients
        model = layers(bias=False)
        with pytest.raises(ValueError, match=f"noop_hook with {kind.__name__}: expected an element-wise opt"):
            zeroshard.initialize(model, kind(model.parameters()), {"stage": 0}, gradient_hook=({}, noop_hook))


WRONG = [
    (lambda _, bucket: bucket.buffer(), "<lambda>: expected a torch.futures.Future of the means, got Tensor"),
    (lambda _, bucket: future_of(bucket.buffer()[1:]), r"<lambda>: expected a future of a tensor of .*got"),
    (lambda _, bucket: future_of(None), r"<lambda>: expected a future of a tensor of .*got None"),
]


def future_of(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


@on_ranks(2)
def test_a_hook_that_returns_something_else_is_named():
    for hook, message in WRONG:
        engine = sharded(None, hook, stage=1)
        with pytest.raises(TypeError, match=message):
            loss_of(engine, 0).backward()


@on_ranks(2)
def test_after_a_backward_that_failed_a_warning_says_that_the_state_may_hold_parts_of_it():
    engine = sharded(power(), powerSGD_hook, stage=1, units=("Linear",))
    take_steps(engine, range(5), loss_of)

    def fail(_):
        raise ArithmeticError

    loss = loss_of(engine, 5)
    next(iter(engine.module.parameters())).register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    with pytest.warns(UserWarning, match="Load the last checkpoint"):
        engine.zero_grad()


# ---------------------------------------------------------------------------------------------- checkpoints


def resume(folder, num_steps):
    """Train on from a checkpoint with another state of the hook."""
    engine = sharded(power(), powerSGD_hook, stage=1, units=("Linear",))
    engine.load_checkpoint(folder, "middle")
    return values_after(engine, range(engine.global_step, num_steps), loss_of)


def save_in_the_middle(folder, num_steps):
    engine = sharded(power(), powerSGD_hook, stage=0, units=("Linear",))
    take_steps(engine, range(6), loss_of)
    engine.save_checkpoint(folder, "middle", blocking=False)
    found = values_after(engine, range(6, num_steps), loss_of)
    return found, resume(folder, num_steps)


def load_elsewhere(folder):
    state = power()
    with_hook = sharded(state, powerSGD_hook, stage=1, units=("Linear",))
    plain = zeroshard.initialize(layers(), lambda ps: torch.optim.SGD(ps, 0.05, 0.9), {"stage": 1}).engine
    for engine in (with_hook, plain):
        with pytest.warns(UserWarning, match="state of a gradient hook on 2 ranks"):
            engine.load_checkpoint(folder, "middle")
    return state.iter


def test_checkpoints_keep_errors_and_memory_of_each_rank_for_the_same_number_of_ranks(ranks: Ranks, tmp_path):
    for found, resumed in ranks(2, save_in_the_middle, str(tmp_path), 12):
        assert not farthest(found, resumed)
    assert ranks(1, load_elsewhere, str(tmp_path)) == [0]


@on_ranks(2)
def test_states_may_be_dicts_or_objects_and_what_no_checkpoint_can_hold_is_refused_by_name(tmp_path):
    def count(state, bucket):
        values = state if isinstance(state, dict) else vars(state)
        values["seen"] = values.get("seen", 0) + bucket.buffer()
        return allreduce_hook(None, bucket)

    for name, make in (("dict", dict), ("object", SimpleNamespace)):
        states = make(), make()
        engine = sharded(states[0], count, stage=0)
        take_steps(engine, range(3), loss_of)
        engine.save_checkpoint(tmp_path, name)
        sharded(states[1], count, stage=1).load_checkpoint(tmp_path, name)
        seen = [(state if name == "dict" else vars(state))["seen"] for state in states]
        assert torch.equal(*seen)
    engine = sharded({"call": copy.copy}, count, stage=0)
    with pytest.raises(ValueError, match=r"gradient_hook.*'call'"):
        engine.save_checkpoint(tmp_path)


# ------------------------------------------------------------------------- the hooks of examples/hooks.py


@pytest.mark.parametrize("levels", [1, 7])
def test_qsgd_is_unbiased_and_its_variance_is_within_the_bound(levels):
    num, num_draws = 256, 10_000
    v = torch.randn(num, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    codes, norms = hooks.quantize(v.expand(num_draws, num), levels, torch.Generator().manual_seed(2))
    draws = hooks.dequantize(codes.double(), norms, levels)
    bound = min(num / levels**2, num**0.5 / levels) * v.norm() ** 2
    assert (draws - v).square().sum(1).mean() <= bound
    # The mean of draws has a variance of `bound` / num_draws at most; 5 times its root is never reached.
    assert (draws.mean(0) - v).norm() < 5 * (bound / num_draws).sqrt()
    assert codes.abs().max() <= levels


def test_a_sketch_finds_the_largest_elements_and_is_linear():
    num, columns, largest = 2000, 200, [7, 800, 1999]
    v = torch.randn(num, generator=torch.Generator().manual_seed(1)) * 0.1
    v[largest] = torch.tensor([9.0, -8.0, 7.0])
    places, signs = hooks.hashes(num, 5, columns, 0, v.device)
    table = hooks.sketch(v, places, signs, columns)
    assert sorted(hooks.estimate(table, places, signs).abs().topk(3).indices.tolist()) == largest
    double = hooks.sketch(v + v, places, signs, columns)
    assert torch.equal(double, table + table)
    assert places.max() < columns
    assert set(signs.unique().tolist()) == {-1, 1}


@on_ranks(2)
def test_the_examples_train_alike_under_zeroshard_and_ddp():
    for make, hook in (
        (hooks.QSGD, hooks.qsgd_hook),
        (lambda: hooks.SketchedSGD(share=0.1, columns=0.1), hooks.sketched_hook),
    ):
        model = nn.Linear(40, 20, bias=False)
        want = train_replicated(make(), hook, 30, model=copy.deepcopy(model))
        for stage in (0, 1):
            state = make()
            engine = sharded(state, hook, model=copy.deepcopy(model), stage=stage)
            assert not farthest(values_after(engine, range(30), loss_of), want)
            assert state.iter == 30


def mean_of_ranks(values):
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def hooked(hook, state, values):
    """What a hook of examples/hooks.py gives for one bucket, after its exact means."""
    state.iter = max(state.iter, hooks.FIRST)
    bucket = SimpleNamespace(buffer=values.clone, index=lambda: 0, is_last=lambda: True)
    return hook(state, bucket).value()


@on_ranks(2)
def test_a_sketch_of_everything_gives_the_exact_mean():
    state, values = hooks.SketchedSGD(share=1.0, columns=1.0), numbers(0, 50)
    assert torch.allclose(hooked(hooks.sketched_hook, state, values), mean_of_ranks(values), atol=1e-7)
    assert not state.errors[0].any()


@on_ranks(2)
def test_what_a_sketch_does_not_move_is_kept_for_later_backwards():
    state, before = hooks.SketchedSGD(share=0.1, columns=0.2), torch.zeros(200)
    for step in range(3):
        values = numbers(step, 200)
        moved = hooked(hooks.sketched_hook, state, values)
        assert 0 < moved.count_nonzero() <= 20
        left = mean_of_ranks(state.errors[0])
        assert torch.allclose(moved + left, mean_of_ranks(values + before), atol=1e-6)
        before = state.errors[0].clone()


@on_ranks(2)
def test_qsgd_gives_the_mean_of_what_the_codes_of_all_ranks_stand_for():
    state, values = hooks.QSGD(), numbers(0, 300)  # a block, and a part of one
    state.iter = hooks.FIRST
    blocks = nn.functional.pad(values, (0, 212)).view(2, 256)
    own = hooks.dequantize(*hooks.quantize(blocks, 7, state.generator(0, values.device)), 7)
    with mock.patch.object(dist, "all_gather", side_effect=dist.all_gather) as sent:
        got = hooked(hooks.qsgd_hook, state, values)
    assert torch.allclose(got, mean_of_ranks(own.flatten()[:300]), atol=1e-7)
    assert sent.call_args.args[1].nbytes == 2 * (256 // 2 + 4)  # 4 bits an element, and a norm
