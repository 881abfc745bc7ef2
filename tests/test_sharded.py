"""The composable layer has the calls of an engine, over a mesh whose axis has any name."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard
from tests.distributed.models import tiny
from tests.distributed.training import SOME_STAGES, numbers, plain, replicate
from tests.ranks import on_ranks


def three_norms(model, optimizer, clip, no_sync):
    """The norms of three steps of two micro-batches."""
    norms = []
    for number in range(3):
        for half in range(2):
            with contextlib.nullcontext() if half else no_sync():
                model(numbers(2 * number + half, 5, 7)).square().mean().backward()
        norms.append(float(clip(0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.long_where(num_ranks=[1])
@pytest.mark.parametrize(("num_ranks", "axes"), [(1, ("dp",)), (2, ("dp",)), (2, None)])
@on_ranks()
def test_the_composable_layer_clips_accumulates_and_shows_as_ddp(num_ranks, axes):
    replica = replicate(tiny())
    want = three_norms(
        replica,
        torch.optim.AdamW(replica.parameters(), lr=1e-2),
        lambda norm: torch.nn.utils.clip_grad_norm_(replica.parameters(), norm),
        contextlib.nullcontext if num_ranks == 1 else replica.no_sync,
    )
    want_state = plain(replica).state_dict()
    for stage in SOME_STAGES:
        model = tiny()
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=axes)
        sharded = zeroshard.shard(model, {"stage": stage}, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sharded.attach(optimizer)
        norms = three_norms(model, optimizer, sharded.clip_grad_norm_, sharded.no_sync)
        assert norms == pytest.approx(want, rel=1e-5)
        for name, value in sharded.full_state_dict().items():  # of rank 0
            assert torch.allclose(value, want_state[name], rtol=1e-5)
        with sharded.unsharded(model.inner):
            assert torch.allclose(model.inner.weight, want_state["inner.weight"], rtol=1e-5)
        assert sharded.module is model
        assert sharded.num_parameters() == sum(value.numel() for value in want_state.values())
        assert [unit.name for unit in sharded.units] == ["", "blocks.0", "blocks.1"]


@on_ranks(2)
def test_a_mesh_of_two_axes_with_other_names_is_refused():
    text = r"mesh of one axis, or one with an axis 'dp_shard'.*\('outer', 'inner'\)"
    with pytest.raises(ValueError, match=text):
        zeroshard.shard(tiny(), mesh=DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("outer", "inner")))


@on_ranks(2)
def test_a_rank_can_close_alone_to_give_back_memory():
    model = tiny()
    sharded = zeroshard.shard(model, {"stage": 3})
    if dist.get_rank() == 0:
        sharded.close(restore=False)  # without the other ranks
        with pytest.raises(RuntimeError, match="its model cannot be used"):
            model(numbers(0, 5, 7))
        assert not any(p.untyped_storage().nbytes() for p in model.parameters())


@on_ranks(pytest.param(1, marks=pytest.mark.long), 2)
def test_a_module_that_was_closed_is_plain_and_can_be_sharded_again():
    for stage in SOME_STAGES:
        replica, model = replicate(tiny()), tiny()
        names = [name for name, _ in model.named_parameters()]
        for number in range(2):
            sharded = zeroshard.shard(model, {"stage": stage})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            sharded.attach(optimizer)
            reference = torch.optim.SGD(replica.parameters(), lr=0.05)
            for one, its in ((model, optimizer), (replica, reference)):
                one(numbers(number, 5, 7)).square().mean().backward()
                its.step()
                its.zero_grad()
            sharded.close()
            sharded.close()
            got, want = dict(model.named_parameters()), dict(plain(replica).named_parameters())
            assert list(got) == names
            assert sharded.module is model
            for name, value in got.items():
                assert type(value) is torch.nn.Parameter
                assert torch.allclose(value, want[name], rtol=1e-5)
            for call in (sharded.full_state_dict, sharded.no_sync, lambda at=sharded: at.units):
                with pytest.raises(RuntimeError, match="is closed"):
                    call()
