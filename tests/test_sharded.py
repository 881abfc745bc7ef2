"""The composable layer has the calls of an engine, over a mesh whose axis has any name."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard
from tests.distributed.models import tiny
from tests.distributed.training import SOME_STAGES, numbers, plain, replicate


def train(model, optimizer, clip, no_sync):
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


def train_by_the_composable_layer(axes):
    """Where the composable layer and DDP differ, by stage."""
    replica = replicate(tiny())
    is_alone = dist.get_world_size() == 1
    want = train(
        replica,
        torch.optim.AdamW(replica.parameters(), lr=1e-2),
        lambda norm: torch.nn.utils.clip_grad_norm_(replica.parameters(), norm),
        contextlib.nullcontext if is_alone else replica.no_sync,
    )
    want_state, found = plain(replica).state_dict(), []
    for stage in SOME_STAGES:
        model = tiny()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=axes)
        sharded = zeroshard.shard(model, {"stage": stage}, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sharded.attach(optimizer)
        norms = train(model, optimizer, sharded.clip_grad_norm_, sharded.no_sync)
        state = sharded.full_state_dict()
        with sharded.unsharded(model.inner):
            shown = torch.equal(model.inner.weight, want_state["inner.weight"]) or torch.allclose(
                model.inner.weight, want_state["inner.weight"], rtol=1e-5
            )
        facts = [
            norms == pytest.approx(want, rel=1e-5),
            shown,
            sharded.module is model,
            sharded.num_parameters() == sum(value.numel() for value in want_state.values()),
            [unit.name for unit in sharded.units] == ["", "blocks.0", "blocks.1"],
            dist.get_rank() != 0
            or all(torch.allclose(state[name], value, rtol=1e-5) for name, value in want_state.items()),
        ]
        found += [(stage, facts)] * (not all(facts))
    return found


@pytest.mark.parametrize(("num_ranks", "axes"), [(1, ("dp",)), (2, None)])
def test_the_composable_layer_clips_accumulates_and_shows_as_ddp(ranks, num_ranks, axes):
    assert ranks(num_ranks, train_by_the_composable_layer, axes) == [[]] * num_ranks


def shard_over_two_axes(names):
    with pytest.raises(ValueError, match=r"mesh of one axis, or one with an axis 'dp_shard'") as caught:
        zeroshard.shard(tiny(), mesh=DeviceMesh("cpu", [[0], [1]], mesh_dim_names=names))
    return str(caught.value)


def test_a_mesh_of_two_axes_with_other_names_is_refused(ranks):
    for text in ranks(2, shard_over_two_axes, ("outer", "inner")):
        assert "('outer', 'inner')" in text


def closed_alone():
    model = tiny()
    sharded = zeroshard.shard(model, {"stage": 3})
    if dist.get_rank() == 0:
        sharded.close(restore=False)  # without the other ranks
        with pytest.raises(RuntimeError, match="its model cannot be used"):
            model(numbers(0, 5, 7))
        return sum(p.untyped_storage().nbytes() for p in model.parameters())
    return 0


def test_a_rank_can_close_alone_to_give_back_memory(ranks):
    assert ranks(2, closed_alone) == [0, 0]


def closed_and_sharded_again():
    """By stage, where a module that is closed between two steps, and sharded again, differs from DDP."""
    found = []
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
            if list(got) != names or sharded.module is not model:
                found.append((stage, list(got)))
            found += [
                (stage, number, name)
                for name, value in got.items()
                if type(value) is not torch.nn.Parameter or not torch.allclose(value, want[name], rtol=1e-5)
            ]
            for call in (sharded.full_state_dict, sharded.no_sync, lambda at=sharded: at.units):
                with pytest.raises(RuntimeError, match="is closed"):
                    call()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_module_that_was_closed_is_plain_and_can_be_sharded_again(ranks, num_ranks):
    assert ranks(num_ranks, closed_and_sharded_again) == [[]] * num_ranks
