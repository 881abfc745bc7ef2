"""Remedies in errors about the parameters of an engine are followed, and they work."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import zeroshard
from tests.distributed.models import Tiny
from tests.remedies.told import (
    DATA,
    adamw,
    loss_of,
    net,
    same,
    start,
    take_step,
    told,
    trained,
    trains,
    warned,
    whole,
)


def test_a_parameter_of_two_units_is_in_one():
    class Borrows(nn.Module):
        """The second block computes with the weight of the first."""

        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Sequential(nn.Linear(7, 7)) for _ in range(2))

        def forward(self, x):
            return self.second(self.first(x)) @ self.first[0].weight

    torch.manual_seed(0)
    model = Borrows()
    engine = start(copy.deepcopy(model), units=["Sequential"])
    with told("To share it between modules"):
        loss_of(engine)
    trains(start(copy.deepcopy(model), units=["Borrows"]), model)


def test_a_method_has_another_name_than_that_of_the_engine():
    class Steps(Tiny):
        def step(self, x):
            return self(x)

        walk = step

    torch.manual_seed(0)
    engine = start(Steps())
    with told("give the model's method another name"):
        engine.register_forward_method("step")
    engine.register_forward_method("walk")
    assert torch.equal(engine.walk(DATA), net()(DATA))


def test_values_are_copied_into_a_parameter():
    engine = start()
    parameter, values = engine.module.inner.weight, torch.ones(10, 7)
    with told("copy_() into it under torch.no_grad()"):
        parameter.data = values
    with torch.no_grad():
        parameter.copy_(values.flatten())
    assert torch.equal(whole(engine)["inner.weight"], values)
    with told("or edit the whole under engine.unsharded(module, write_back=True)"):
        parameter.data = values
    with engine.unsharded(engine.module.inner, write_back=True):
        engine.module.inner.weight.data.copy_(2 * values)
    assert torch.equal(whole(engine)["inner.weight"], 2 * values)


def test_a_parameter_is_trained_before_initialize_and_frozen_after():
    model = net()
    model.inner.weight.requires_grad_(False)
    engine = start(model)
    words = "set requires_grad=True before initialize; afterwards it can be frozen and trained in turns"
    with told(words):
        engine.module.inner.weight.requires_grad_(True)
    engine = start()
    engine.module.inner.weight.requires_grad_(False)
    frozen = net()
    frozen.inner.weight.requires_grad_(False)
    trains(engine, frozen, optimizer=adamw)
    engine.module.inner.weight.requires_grad_(True)
    before = whole(engine)["inner.weight"]
    take_step(engine)
    assert not torch.equal(whole(engine)["inner.weight"], before)


def test_a_gradient_is_taken_by_backward():
    model = net()
    loss_of(model).backward()
    want = model.inner.weight.grad.flatten()
    engine = start()
    parameter = engine.module.inner.weight
    words = "Freeze the other parameters before the forward, call loss.backward() and read p.grad"
    with told(words):
        torch.autograd.grad(loss_of(engine), parameter)
    with told(words):
        loss_of(engine).backward(inputs=[parameter])
    engine.zero_grad()
    for other in engine.parameters():
        other.requires_grad_(other is parameter)
    loss_of(engine).backward()
    assert torch.equal(parameter.grad.flatten(), want)
    engine.zero_grad()
    seen = []
    hook = engine.module.inner.register_forward_hook(lambda module, *_: seen.append(module.weight))
    loss = loss_of(engine)
    hook.remove()
    assert torch.equal(torch.autograd.grad(loss, seen[0])[0].flatten(), want)


def test_an_edit_under_unsharded_ends_before_the_forward():
    engine = start()
    with engine.unsharded(), told("Leave the block, with write_back=True, and then call forward"):
        engine.module.gain.data.mul_(2)
        loss_of(engine)
    with engine.unsharded(write_back=True):
        engine.module.gain.data.mul_(2)
    model = net()
    model.gain.data.mul_(2)
    trains(engine, model)


def test_parameters_are_assigned_and_tied_before_initialize():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(7, 7), nn.Linear(7, 7)

        def forward(self, x):
            return self.two(self.one(x))

    engine = start(Two())
    engine.module.one.weight = nn.Parameter(torch.ones(7, 7))
    with told("Assign, tie and remove parameters before initialize, or edit them in place under engine"):
        loss_of(engine)
    model = Two()
    model.one.weight = nn.Parameter(torch.ones(7, 7))
    trains(start(copy.deepcopy(model)), copy.deepcopy(model))
    engine = start(Two())
    with engine.unsharded(write_back=True):
        engine.module.one.weight.data.fill_(1)
    trains(engine, model)
    engine = start(Two())
    engine.module.one.weight = engine.module.two.weight
    with told("Assign, tie and remove parameters before initialize"):
        loss_of(engine)
    model = Two()
    model.one.weight = model.two.weight
    trains(start(copy.deepcopy(model)), model)


def test_parameters_are_edited_between_steps_and_not_in_a_forward():
    def assign(module, *_):
        module[0].bias.data = module[2].bias.data

    def built():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))

    engine = start(built())
    handle = engine.module.register_forward_pre_hook(assign)
    with told("edit it between steps, under engine.unsharded(write_back=True)"):
        loss_of(engine)
    handle.remove()
    with engine.unsharded(write_back=True), torch.no_grad():
        engine.module[0].bias.copy_(engine.module[2].bias)
    model = built()
    with torch.no_grad():
        model[0].bias.copy_(model[2].bias)
    trains(engine, model)


def test_gradients_of_gradients_need_no_transform():
    def slopes(model):
        x = DATA.clone().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]

    engine = start()
    with told("torch.autograd.grad(outputs, inputs, create_graph=True)"):
        torch.func.grad(lambda x: engine(x).sum())(DATA)
    assert torch.equal(slopes(engine), slopes(net()))


def test_parametrizations_are_undone_in_the_block_or_added_before():
    from torch.nn.utils import parametrize, prune

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    engine = start()
    words = "and undo parametrizations and pruning in the same block"
    with told(words), engine.unsharded():
        prune.l1_unstructured(engine.module.inner, "weight", amount=0.5)
    engine = start()
    with engine.unsharded(write_back=True):
        prune.l1_unstructured(engine.module.inner, "weight", amount=0.5)
        prune.remove(engine.module.inner, "weight")
    assert (whole(engine)["inner.weight"] == 0).sum() == 35
    model = net()
    parametrize.register_parametrization(model.inner, "weight", Doubled())
    trains(start(copy.deepcopy(model)), model)


def test_an_original_parameter_is_read_from_its_module():
    model = net()
    kept = model.inner.weight
    engine = start(model)
    with told("under engine.unsharded()"):
        kept.square()
    with engine.unsharded():
        assert torch.equal(engine.module.inner.weight.square(), net().inner.weight.square())
    model = net()
    late = [*model.parameters()]
    engine = start(model, optimizer=None)
    with told("Build an optimizer that initialize is not given over engine.parameters()"):
        loss = loss_of(engine)
        loss.backward()
        AdamW(late).param_groups[0]["params"][0].add(1)
    engine.zero_grad()
    optimizer = adamw(engine.parameters())
    loss_of(engine).backward()
    optimizer.step()
    same(whole(engine), trained())


def test_layers_are_added_to_a_closed_model():
    engine = start()
    engine.module.late = nn.Linear(3, 3)
    with told("call engine.close() on all ranks, add it, and initialize again"):
        take_step(engine)
    engine = start()
    engine.close()
    model = engine.module
    torch.manual_seed(5)
    model.late = nn.Linear(3, 3)
    model.register_forward_hook(lambda module, args, output: module.late(output))
    trains(start(copy.deepcopy(model)), model)


def test_a_sharded_model_is_copied_before_initialize_or_after_close():
    model = net()
    copied = copy.deepcopy(model)
    engine = start(model)
    with told("copy the model before initialize or after engine.close()"), engine.unsharded():
        copy.deepcopy(engine.module)
    with told("or load engine.full_state_dict() (called on all ranks) into another model"):
        copy.deepcopy(engine.module)
    other = net()
    other.load_state_dict(whole(engine))
    engine.close()
    for made in (copied, other, copy.deepcopy(engine.module)):
        same(trained(made), trained())


def test_a_sharded_model_is_saved_by_its_own_calls(tmp_path):
    engine = start()
    with told("save engine.full_state_dict() (called on all ranks)"):
        pickle.dumps(engine.module)
    torch.save(engine.full_state_dict(), tmp_path / "whole.pt")
    same(torch.load(tmp_path / "whole.pt"), net().state_dict())
    with warned("Save engine.full_state_dict()"):
        torch.save(engine.module.state_dict(), tmp_path / "slices.pt")
    with warned("call engine.save_checkpoint(folder) on all ranks"):
        torch.save(engine.optimizer.state_dict(), tmp_path / "states.pt")
    engine.save_checkpoint(tmp_path / "checkpoints")
    take_step(engine)
    engine.load_checkpoint(tmp_path / "checkpoints")
    trains(engine)


def test_dtypes_are_those_of_the_config():
    engine = start()
    with told("set Config(precision=...) for dtypes"):
        engine.half()
    with told("For another dtype set Config(precision=...)"):
        engine.module.half()
    assert start(precision="bf16")(DATA).dtype == torch.bfloat16


def test_a_model_goes_back_to_initialize_after_close():
    engine = start()
    engine.close()
    with told("give the model to zeroshard.initialize or zeroshard.shard once more, with a new optimizer"):
        engine(DATA)
    with told("make a new optimizer over model.parameters()"):
        engine.optimizer.step()
    same(trained(copy.deepcopy(engine.module)), trained())
    trains(start(engine.module))


def test_a_replaced_parameter_is_edited_in_place_or_left():
    engine = start()
    engine.module.inner.weight = nn.Parameter(torch.ones(10, 7))
    words = "use a model that is not sharded. engine.close(restore=False) gives the model up"
    with told(words):
        engine.close()
    engine.close(restore=False)
    engine = start()
    with engine.unsharded(write_back=True):
        engine.module.inner.weight.data.fill_(1)
    engine.close()
    assert torch.equal(engine.module.inner.weight, torch.ones(10, 7))


def test_backward_comes_before_close():
    engine = start()
    loss = loss_of(engine)
    engine.close()
    with told("call backward before close()"):
        loss.backward()
    engine = start()
    loss_of(engine).backward()
    engine.optimizer.step()
    engine.close()
    same(engine.module.state_dict(), trained())


def test_a_tracer_gets_a_second_model():
    engine = start()
    with told("or a second model that has loaded engine.full_state_dict()"):
        torch.export.export(engine.module, (DATA,))
    second = Tiny()
    second.load_state_dict(engine.full_state_dict())
    assert torch.equal(torch.export.export(second, (DATA,)).module()(DATA), net()(DATA))


def test_optimizers_step_before_the_forward():
    dist.is_initialized() or dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded = zeroshard.shard(net())
    parameters = list(sharded.module.parameters())
    made = [SGD(parameters[:2], lr=0.1), SGD(parameters[2:], lr=0.1)]
    sharded.attach(*made)
    loss_of(sharded.module).backward()
    made[0].step()
    with told("Step all of them before the forward, or attach each optimizer by itself"):
        loss_of(sharded.module)
    made[1].step()
    want = trained(optimizer=lambda parameters: SGD(parameters, lr=0.1))
    loss_of(sharded.module)
    same(whole(sharded), want)
    dist.is_initialized() or dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded = zeroshard.shard(net())
    parameters = list(sharded.module.parameters())
    made = [SGD(parameters[:2], lr=0.1), SGD(parameters[2:], lr=0.1)]
    for one in made:
        sharded.attach(one)
    loss_of(sharded.module).backward()
    made[0].step()
    loss_of(sharded.module)
    made[1].step()
    same(whole(sharded), want)


def test_an_average_has_a_name_of_its_own_and_is_taken_away_first(tmp_path):
    engine = start()
    average = zeroshard.EMA(engine, decay=0.5)
    with told("give this one another name"):
        zeroshard.EMA(engine, decay=0.9)
    zeroshard.EMA(engine, decay=0.9, name="slow")
    with average.applied(), told("call it after the block, which puts the trained values back"):
        take_step(engine)
    with average.applied(), told("call it after the block, which puts the trained values back"):
        engine.save_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path)
    engine.zero_grad()
    trains(engine)
