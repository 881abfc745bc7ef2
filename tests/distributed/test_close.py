"""A closed engine leaves an ordinary module, with its own parameters, hooks and methods."""

import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import STAGES, caught, numbers, square_loss
from tests.ranks import on_ranks
from zeroshard.checkpoint import save as saving
from zeroshard.parameters.sharded import ShardedParameter


class Net(nn.Module):
    """A tied weight, an LSTM with its list of weights, a BatchNorm, a frozen layer; [n, 7] -> [n, 7]."""

    def __init__(self):
        super().__init__()
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


def net():
    torch.manual_seed(0)
    return Net()


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def start(model, **options):
    return zeroshard.initialize(model, sgd(model), {"watchdog_s": 20, **options})


def train(engine, first=0, steps=2):
    for number in range(first, first + steps):
        engine.backward(square_loss(engine, number))
        engine.step()


def traces(model):
    """What sharding could leave in the modules: hooks, and attributes that hide those of the class."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_forward_hooks_always_called")
    found = []
    for name, module in model.named_modules():
        counts = {hook: len(getattr(module, hook)) for hook in hooks}
        hidden = sorted(set(vars(module)) & set(dir(type(module))))
        found.append((name, counts, hidden, module.training))
    return found


def values_of(engine):
    with engine.unsharded():
        return {name: p.detach().clone() for name, p in engine.named_parameters(remove_duplicate=False)}


# --------------------------------------------------------------------------------- the model is plain again


def closed_again(**options):
    """Problems with a model after an engine was closed."""
    model, problems = net(), []
    objects, before = dict(model.named_parameters(remove_duplicate=False)), traces(model)
    engine = start(model, **options).engine
    engine.register_forward_method("encode")
    train(engine)
    want = values_of(engine)
    engine.close()
    engine.close()
    if traces(model) != before:
        problems.append((before, traces(model)))
    got = dict(model.named_parameters(remove_duplicate=False))
    if any(got[name] is not parameter for name, parameter in objects.items()):
        problems.append("other objects")
    for name, parameter in got.items():
        is_right = type(parameter) is nn.Parameter and parameter.grad is None and parameter.is_leaf
        if not is_right or not torch.equal(parameter, want[name].float()) or parameter.dtype != torch.float32:
            problems.append(name)
        if parameter.untyped_storage().nbytes() != parameter.nbytes or not parameter.is_contiguous():
            problems.append(f"the storage of {name}")
        if parameter.requires_grad == name.startswith("frozen"):
            problems.append(f"requires_grad of {name}")
    if model.save_pretrained("nowhere") != "its own" or model.encode.__func__ is not Net.encode:
        problems.append("methods")
    fresh = net()
    fresh.load_state_dict(model.state_dict())
    x = numbers(9, 5, 7)
    outputs = [copy(x) for copy in (model, fresh)]
    for output in outputs:
        output.square().mean().backward()
    if not torch.equal(*outputs) or not torch.equal(model.head.weight.grad, fresh.head.weight.grad):
        problems.append("its forward and backward")
    return [(options, problem) for problem in problems]


@on_ranks(2)
def test_a_closed_engine_gives_the_model_back_whole_and_plain():
    options = [{"stage": stage} for stage in STAGES]
    options += [{"stage": 3, "shard_group_size": 1}, {"stage": 3, "recompute": "unit"}]
    options += [{"stage": stage, "precision": {"param_dtype": "bf16"}} for stage in (2, 3)]
    return [problem for option in options for problem in closed_again(**option)]


@on_ranks(2)
def test_parameters_come_back_in_the_main_dtype():
    model = net().bfloat16()
    engine = start(model, precision={"main_dtype": "bf16", "param_dtype": "bf16"}).engine
    train(engine)
    want = values_of(engine)
    engine.close()
    parameters = [(p.dtype, torch.equal(p, want[name])) for name, p in model.named_parameters()]
    assert set(parameters) == {(torch.bfloat16, True)}


# -------------------------------------------------------------------------------------- and can be used again


@on_ranks(2)
def test_close_gives_back_the_memory_of_shards():
    for restore in (True, False):
        model = net()
        engine, optimizer, *_ = start(model, stage=2)
        slices = list(engine.parameters())
        storage = weakref.ref(next(engine._runtime.buffers))
        train(engine)
        engine.close(restore)
        gc.collect()
        sizes = {p.untyped_storage().nbytes() for p in slices}
        assert (
            storage() is None,
            sizes,
            all(p.grad is None for p in optimizer.param_groups[0]["params"]),
        ) == (True, {0}, True)


# ----------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("restore", [True, False])
@on_ranks(2)
def test_uses_of_a_closed_engine_are_refused(tmp_path, restore):
    model = net()
    engine, optimizer, *_ = start(model, stage=3)
    train(engine)
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
    assert "SGD.step(): the sharded parameter 'blocks.0.0.weight'" in stale["optimizer.step"]
    assert "engine that was closed" in stale["weight"]
    assert "engine that has been closed: call backward" in stale["loss.backward"]
    assert is_sharded is not restore
    assert forward == "nothing was raised" if restore else "its model cannot be used" in forward


@on_ranks(2)
def test_the_optimizer_of_a_closed_engine_is_refused():
    model = net()
    engine, optimizer, *_ = start(model, stage=3)
    train(engine)
    engine.close()
    text = caught(lambda: zeroshard.initialize(model, optimizer))
    assert text.startswith("ValueError: SGD holds the slices of another engine; expected a new optimizer")


@on_ranks(2)
def test_close_does_not_write_over_a_parameter_that_was_replaced(num_ranks):
    model = net()
    engine = start(model, stage=3).engine
    train(engine)
    if dist.get_rank() == dist.get_world_size() - 1:
        model.frozen.weight = nn.Parameter(torch.ones(7, 7))
    text = caught(engine.close)
    engine.close(restore=False)
    assert "'frozen.weight' was replaced, tied or removed" in text
    assert num_ranks == 1 or f"rank {num_ranks - 1}" in text


@on_ranks(2)
def test_close_at_the_wrong_time_is_refused_and_changes_nothing():
    model = net()
    engine = start(model, stage=3).engine
    with engine.unsharded():
        inside = caught(engine.close)
    model.norm.register_forward_hook(lambda *_: engine.close())
    forward = caught(engine, numbers(0, 5, 7))
    model.norm._forward_hooks.clear()
    train(engine)
    engine.close()
    kind = type(model.head.weight)
    assert "inside engine.unsharded()" in inside
    assert "not inside a forward" in forward
    assert kind is nn.Parameter


@on_ranks(2)
def test_close_tells_that_a_save_in_the_background_failed(tmp_path):
    engine = start(net(), stage=3).engine
    with mock.patch.object(saving, "write_part", side_effect=OSError("the disk is full")):
        engine.save_checkpoint(tmp_path, blocking=False)
        first, step, second = caught(engine.close), caught(engine.step), caught(engine.close)
        assert "saved in the background failed" in first
        assert "the disk is full" in first
        assert "the engine is closed" in step
        assert second == "nothing was raised"
