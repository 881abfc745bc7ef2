"""A closed engine leaves an ordinary module, with its own parameters, hooks and methods."""

import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import SOME_STAGES, caught, numbers, square_loss, start, take_steps
from tests.ranks import on_ranks
from zeroshard.checkpoint import save as saving
from zeroshard.parameters.sharded import ShardedParameter


class Net(nn.Module):
    """A tied weight, an LSTM with its list of weights, a BatchNorm, a frozen layer; [n, 7] -> [n, 7]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.lstm, self.norm = nn.LSTM(7, 7), nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 7, bias=False)
        self.head.weight = self.blocks[0][0].weight

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.frozen(self.norm(self.lstm(x)[0])))

    def encode(self, x):
        return self.blocks[0](x)

    def save_pretrained(self, folder):
        return "its own"


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05, momentum=0.9)


# --------------------------------------------------------------------------------- the model is plain again


def traces(model):
    """What sharding could leave in the modules: hooks, and attributes that hide those of the class."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_forward_hooks_always_called")
    return [
        (name, [len(getattr(module, hook)) for hook in hooks], set(vars(module)) & set(dir(type(module))))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize(
    "options",
    [
        *({"stage": stage} for stage in SOME_STAGES),
        {"stage": 3, "shard_group_size": 1, "recompute": "unit"},
        {"stage": 2, "precision": {"param_dtype": "bf16"}},
        {"stage": 3, "precision": {"main_dtype": "bf16", "param_dtype": "bf16"}},
    ],
)
@on_ranks(2)
def test_a_closed_engine_gives_the_model_back_whole_and_plain(options):
    dtype = torch.bfloat16 if "main_dtype" in options.get("precision", {}) else torch.float32
    model, fresh = Net().to(dtype), Net().to(dtype)
    objects, before = dict(model.named_parameters(remove_duplicate=False)), traces(model)
    engine, _ = start(model, sgd, watchdog_s=20, **options)
    engine.register_forward_method("encode")
    take_steps(engine, range(2))
    with torch.no_grad():
        encoded = [each.encode(numbers(0, 5, 7).to(dtype)) for each in (engine, model)]
    assert torch.equal(*encoded)
    with engine.unsharded():
        want = {name: p.detach().clone() for name, p in engine.named_parameters(remove_duplicate=False)}
    engine.close()
    engine.close()
    assert traces(model) == before
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is objects[name]
        assert type(parameter) is nn.Parameter
        assert (parameter.grad, parameter.is_leaf, parameter.dtype) == (None, True, dtype), name
        assert torch.equal(parameter, want[name].to(dtype)), name
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.is_contiguous()
        assert parameter.requires_grad != name.startswith("frozen")
    assert model.save_pretrained("nowhere") == "its own"
    assert model.encode.__func__ is Net.encode
    fresh.load_state_dict(model.state_dict())
    outputs = [each(numbers(9, 5, 7).to(dtype)) for each in (model, fresh)]
    for output in outputs:
        output.square().mean().backward()
    assert torch.equal(*outputs)
    assert torch.equal(model.head.weight.grad, fresh.head.weight.grad)


# -------------------------------------------------------------------------------------- and can be used again


@on_ranks(2)
def test_close_gives_back_the_memory_of_shards():
    for restore in (True, False):
        model = Net()
        engine, optimizer = start(model, sgd, watchdog_s=20, stage=2)
        slices = list(engine.parameters())
        storage = weakref.ref(engine._runtime.buffers[0])
        take_steps(engine, range(2))
        engine.close(restore)
        gc.collect()
        assert storage() is None
        assert {p.untyped_storage().nbytes() for p in slices} == {0}
        assert all(p.grad is None for p in optimizer.param_groups[0]["params"])


# ----------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("restore", [True, False])
@on_ranks(2)
def test_uses_of_a_closed_engine_are_refused(tmp_path, restore):
    model = Net()
    engine, optimizer = start(model, sgd, watchdog_s=20, stage=3)
    take_steps(engine, range(2))
    weight, loss = next(engine.parameters()), square_loss(engine, 5)
    engine.close(restore)
    engine.close()
    x = numbers(0, 5, 7)
    calls = {
        "forward": lambda: engine(x),
        "backward": lambda: engine.backward(torch.ones((), requires_grad=True)),
        "step": engine.step,
        "zero_grad": engine.zero_grad,
        "train_batch": lambda: engine.train_batch(x, x),
        "no_sync": engine.no_sync,
        "clip_grad_norm_": lambda: engine.clip_grad_norm_(1.0),
        "unsharded": lambda: engine.unsharded().__enter__(),
        "full_state_dict": engine.full_state_dict,
        "save_checkpoint": lambda: engine.save_checkpoint(tmp_path),
        "load_checkpoint": lambda: engine.load_checkpoint(tmp_path),
        "save_pretrained": lambda: engine.save_pretrained(tmp_path),
        "memory_report": engine.memory_report,
        "units": lambda: engine.units,
    }
    refusals = {name: caught(call) for name, call in calls.items()}
    stale = {
        "optimizer.step": caught(optimizer.step),
        "weight": caught(lambda: weight.sum()),
        "loss.backward": caught(loss.backward),
    }
    optimizer.zero_grad()
    is_sharded, forward = type(next(model.parameters())) is ShardedParameter, caught(model, x)
    for name, text in refusals.items():
        assert text.startswith("RuntimeError: the engine is closed"), (name, text)
    assert "make a new optimizer" in stale["optimizer.step"] or not restore
    text = caught(zeroshard.initialize, model, optimizer)
    assert "SGD holds the slices of another engine; expected a new optimizer" in text or not restore
    assert "SGD.step(): the sharded parameter 'blocks.0.0.weight'" in stale["optimizer.step"]
    assert "engine that was closed" in stale["weight"]
    assert "engine that has been closed: call backward" in stale["loss.backward"]
    assert is_sharded is not restore
    assert forward == "nothing was raised" if restore else "its model cannot be used" in forward


@on_ranks(2)
def test_close_does_not_write_over_a_parameter_that_was_replaced():
    model = Net()
    engine, _ = start(model, sgd, watchdog_s=20, stage=3)
    take_steps(engine, range(2))
    if dist.get_rank() == 1:
        model.frozen.weight = nn.Parameter(torch.ones(7, 7))
    text = caught(engine.close)
    engine.close(restore=False)
    assert "'frozen.weight' was replaced, tied or removed" in text
    assert "rank 1" in text


@on_ranks(2)
def test_close_at_the_wrong_time_is_refused_and_changes_nothing():
    model = Net()
    engine, _ = start(model, sgd, watchdog_s=20, stage=3)
    with engine.unsharded():
        inside = caught(engine.close)
    model.norm.register_forward_hook(lambda *_: engine.close())
    forward = caught(engine, numbers(0, 5, 7))
    model.norm._forward_hooks.clear()
    take_steps(engine, range(2))
    engine.close()
    assert "inside engine.unsharded()" in inside
    assert "not inside a forward" in forward
    assert type(model.head.weight) is nn.Parameter


@on_ranks(2)
def test_close_tells_that_a_save_in_the_background_failed(tmp_path):
    engine, _ = start(Net(), sgd, watchdog_s=20, stage=3)
    with mock.patch.object(saving, "write_part", side_effect=OSError("the disk is full")):
        engine.save_checkpoint(tmp_path, blocking=False)
        first, step, second = caught(engine.close), caught(engine.step), caught(engine.close)
        assert "saved in the background failed" in first
        assert "the disk is full" in first
        assert "the engine is closed" in step
        assert second == "nothing was raised"
