"""Units and their gradients move as drawn, and their buffers are freed and refilled in place."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import seeded
from tests.ranks import on_ranks
from zeroshard.assemble import shard_over
from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.comm.mesh import Axes
from zeroshard.config.sections import Config, Offload, Precision
from zeroshard.parallel.tensor.division import Division
from zeroshard.plan.layout import Layout
from zeroshard.plan.units import find_units
from zeroshard.sharding.gradients import Role
from zeroshard.stepping.attach import attach

CPU = torch.device("cpu")
BF16 = Precision(param_dtype=torch.bfloat16)


@pytest.fixture
def freed(tmp_path):
    """Settings of one rank, which gathers nothing: it frees units whose values rest in files."""
    offload = Offload(optimizer="nvme", parameters="nvme", nvme_path=str(tmp_path))
    return {"stage": 3, "precision": BF16, "offload": offload}


def undivided(model, units=None):
    return Division([], find_units(model, units))


class Net(nn.Module):
    """A unit of two layers inside a root that owns a layer too."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 20)
        self.block = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20))


def shard_net(axis=None, **options):
    """The runtime of a sharded Net, its root unit and its inner unit, and the values before sharding."""
    net = seeded(Net)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    config = Config(units=["Sequential"], **options)
    axis = axis or Axis(None, device=CPU, timeout_s=10)
    runtime = shard_over(net, undivided(net, config.units), config, Axes.of_one_group(None, axis))
    root, inner = runtime.units
    optimizer = torch.optim.SGD(net.parameters())
    attach(runtime, None, optimizer)
    return SimpleNamespace(
        net=net,
        runtime=runtime,
        root=root,
        inner=inner,
        before=before,
        axis=axis,
        step=runtime.after_step,
    )


def world():
    return Axis(dist.group.WORLD, device=CPU, timeout_s=20)


def unsharded_values(unit):
    (buffer,) = unit.buffers
    return {o.fqn: p.detach().clone() for o, p in zip(buffer.originals, buffer.unsharded, strict=True)}


def storage_bytes(unit):
    return unit.buffers[0].full.untyped_storage().nbytes()


def test_the_padding_of_packed_gradients_is_zero(freed):
    sharded = shard_net(**freed)  # a runtime that is collected drains its exchanges
    (gradients,) = sharded.inner.gradients
    used = torch.full((gradients.buffer.layout.total,), 7.0)
    gradients.begin(Role())
    with mock.patch.object(gradients._pool, "take", return_value=used):
        flat = gradients._open()
    assert gradients.buffer.layout.gaps
    assert not any(flat[gap.slice].any() for gap in gradients.buffer.layout.gaps)


@on_ranks(3)
def test_a_gather_is_started_once_and_brings_rank_0s_values_to_every_rank():
    sharded = shard_net(world(), stage=3)
    ledger, unit = sharded.axis.ledger, sharded.inner
    owned = torch.tensor(sum(parameter.numel() for parameter in unit.buffers[0].sharded))
    ledger.counter = Counter()
    unit.unshard()
    unit.unshard()
    unit.wait()
    unit.wait()
    unit.unshard()
    assert ledger.counter.calls["all_gather"] == 1
    unit.reshard()
    assert storage_bytes(unit) == 0
    unit.unshard()
    unit.reshard()  # before anybody waited
    assert (unit.state.value, storage_bytes(unit)) == ("sharded", 0)
    unit.wait()
    for name, value in unsharded_values(unit).items():
        assert torch.equal(value, sharded.before[name])
    dist.all_reduce(owned)
    assert owned == 600 + 30 + 600 + 20


@on_ranks(2)
def test_gradients_are_averaged_and_what_no_rank_used_stays_without():
    """Two parameters get gradients, one of them on rank 0 alone; two get none on any rank."""
    axis = world()
    for stage, deferred in itertools.product(range(4), (False, True)):
        sharded = shard_net(axis, stage=stage)
        (gradients,) = sharded.inner.gradients
        scale = 10.0**axis.rank
        gradients.begin(Role(defers=deferred, has_more=deferred))
        gradients.pack(0, torch.full((30, 20), scale))
        if axis.rank == 0:
            gradients.pack(1, torch.full((30,), 4.0))
        if deferred:
            gradients.pack(0, torch.full((30, 20), scale))
        assert (gradients.flat is None) == (not gradients.buffer.plan.reductions)
        for _ in gradients.reduce():
            assert gradients.flat is None
        gradients.deliver(axis.any(gradients.used, "test")())
        grads = [parameter.grad for parameter in gradients.buffer.sharded]
        layout = Layout((600, 30, 600, 20), 2)
        sizes = [layout.owned(n, axis.rank).size if stage else size for n, size in enumerate(layout.sizes)]
        assert torch.equal(grads[0], torch.full((sizes[0],), (2 if deferred else 1) * (1.0 + 10.0) / 2))
        assert torch.equal(grads[1], torch.full((sizes[1],), 2.0))
        assert grads[2:] == [None, None]


BUFFER_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
]


def buffers_of(shift):
    """Buffers of many dtypes and of all memory layouts, and the memory beside one of them."""
    values = torch.arange(24.0).view(4, 6) + shift
    beside = values.clone()
    ones = torch.full((3, 2), 1.0 - shift)
    buffers = {f"in_{dtype}".replace(".", "_"): ones.to(dtype) for dtype in BUFFER_DTYPES}
    buffers |= {
        "number": torch.tensor(7 + shift),
        "empty": torch.zeros(0),
        "transposed": values.clone().t(),
        "strided": values.clone()[:, ::2],
        "column": values.clone()[:, 1],
        "part": values.clone()[1:3, 1:4],
        "expanded": beside[0, :1].expand(3),
    }
    return buffers, beside


@on_ranks(2)
def test_buffers_of_any_dtype_and_layout_get_rank_0s_values_and_nothing_beside_them_changes():
    axis = world()
    (buffers, beside), (expected, _) = buffers_of(axis.rank), buffers_of(0)
    module = nn.Linear(2, 2)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer, persistent=name != "number")
    shard_over(module, undivided(module), Config(), Axes.of_one_group(None, axis))
    found = dict(module.named_buffers())
    assert list(found) == list(expected)
    for name, want in expected.items():
        assert found[name].dtype == want.dtype
        assert torch.equal(found[name].to(torch.complex64), want.to(torch.complex64)), name
    assert torch.equal(beside.view(-1)[1:], torch.arange(1.0, 24.0) + axis.rank)
