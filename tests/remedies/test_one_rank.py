"""Remedies in errors on one rank are followed, and they work."""

import copy
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrize, prune
from torch.optim import SGD, AdamW

import zeroshard
from tests.distributed.models import small_llama
from tests.distributed.training import seeded
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

# ----------------------------------------------------------------------------------------------------- models


def test_a_model_is_sharded_before_it_is_compiled_by_jit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
    with told("expected the module before torch.jit"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start(torch.jit.trace(model, DATA))
    trains(start(copy.deepcopy(model)), model)


def test_a_parameter_of_another_class_is_ignored():
    class Odd(torch.Tensor):
        """It has operations of its own."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    models = [net() for _ in range(2)]
    for model in models:
        model.odd = nn.Parameter(torch.ones(3).as_subclass(Odd), requires_grad=False)
    with told("or leave the parameter out with Config(ignored=...)"):
        start(models[0])
    trains(start(models[0], ignored=["odd"]), models[1])


def test_gradient_hooks_are_registered_after_initialize():
    model, engine = net(), start()
    for own in (model, engine):
        dict(own.named_parameters())["gain"].register_hook(lambda gradient: 2 * gradient)
    words = "register them after initialize, on the parameter of that name in engine.named_parameters()"
    with told(words):
        start(model)
    trains(engine, model)


def test_units_are_the_classes_that_have_a_forward():
    with told("name the class of the modules inside (Sequential), or of the module around it"):
        start(units=["ModuleList"])
    trains(start(units=["Sequential"]))
    trains(start(units=["Tiny"]))
    with told("close to it are 'Sequential'"):
        start(units=["Sequentail"])


def test_a_distributed_tensor_is_made_whole():
    start()
    whole_value = net().inner.weight.detach()
    model = net()
    model.inner.weight = nn.Parameter(distribute_tensor(whole_value, init_device_mesh("cpu", (1,))))
    with told("replace a DTensor by nn.Parameter(parameter.full_tensor())"):
        start(model)
    model.inner.weight = nn.Parameter(model.inner.weight.detach().full_tensor())
    trains(start(model), net())


def test_names_of_one_parameter_may_be_given_one_dtype():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    model[1].weight = model[0].weight
    engine = start(model, precision={"param_dtype": "bf16", "overrides": {"0": "fp32", "1": "fp32"}})
    assert engine(DATA).isfinite().all()


def test_a_cache_is_switched_off_for_recomputation():
    def loss(model):
        tokens = torch.arange(8)[None]
        return model(input_ids=tokens, labels=tokens).loss

    with told("set use_cache=False in the model's config for training"):
        loss(start(small_llama(use_cache=True), recompute="unit"))
    trains(start(small_llama(), recompute="unit"), small_llama(), losses=[loss])


def test_a_deferred_model_is_sharded_after_the_block():
    with zeroshard.deferred_init():
        model = nn.Linear(7, 7)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        with told("build the model in the block, and call initialize after it"):
            start(model)
    want = nn.Linear(7, 7)
    nn.init.ones_(want.weight), nn.init.ones_(want.bias)
    trains(start(model), want)


def test_ignored_parameters_are_client_state(tmp_path):
    engine = start(ignored=["gain"])
    with warned("Give them as client_state if they are the same on all ranks"):
        engine.save_checkpoint(tmp_path / "without")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save_checkpoint(tmp_path, client_state={"gain": engine.module.gain.detach().clone()})
    other = start(ignored=["gain"])
    assert torch.equal(other.load_checkpoint(tmp_path)["gain"], torch.ones(()))


# ------------------------------------------------------------------------------------ parameters of an engine


def test_a_parameter_of_two_units_is_in_one():
    class Borrows(nn.Module):
        """The second block computes with the weight of the first."""

        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Sequential(nn.Linear(7, 7)) for _ in range(2))

        def forward(self, x):
            return self.second(self.first(x)) @ self.first[0].weight

    model = seeded(Borrows)
    engine = start(copy.deepcopy(model), units=["Sequential"])
    with told("To share it between modules"):
        loss_of(engine)
    trains(start(copy.deepcopy(model), units=["Borrows"]), model)


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


def test_gradients_of_gradients_need_no_transform():
    def slopes(model):
        x = DATA.clone().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]

    engine = start()
    with told("torch.autograd.grad(outputs, inputs, create_graph=True)"):
        torch.func.grad(lambda x: engine(x).sum())(DATA)
    assert torch.equal(slopes(engine), slopes(net()))


def test_pruning_is_undone_in_the_block_and_parametrizations_are_added_before():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    engine = start()
    with told("and undo pruning in the same block"), engine.unsharded():
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


def test_a_replaced_parameter_is_edited_in_place_or_left():
    engine = start()
    engine.module.inner.weight = nn.Parameter(torch.ones(10, 7))
    with told("use a model that is not sharded. engine.close(restore=False) gives the model up"):
        engine.close()
    engine.close(restore=False)
    engine = start()
    with engine.unsharded(write_back=True):
        engine.module.inner.weight.data.fill_(1)
    engine.close()
    assert torch.equal(engine.module.inner.weight, torch.ones(10, 7))


def test_optimizers_step_before_the_forward():
    want = trained(optimizer=lambda parameters: SGD(parameters, lr=0.1))
    for is_together in (True, False):
        dist.is_initialized() or dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        sharded = zeroshard.shard(net())
        parameters = list(sharded.module.parameters())
        made = [SGD(parameters[:2], lr=0.1), SGD(parameters[2:], lr=0.1)]
        for optimizers in [made] if is_together else [[one] for one in made]:
            sharded.attach(*optimizers)
        loss_of(sharded.module).backward()
        made[0].step()
        if is_together:
            with told("Step all of them before the forward, or attach each optimizer by itself"):
                loss_of(sharded.module)
        else:
            loss_of(sharded.module)
        made[1].step()
        same(whole(sharded), want)


# --------------------------------------------------------------------------- steps, batches and micro-batches


def test_clipping_needs_no_closure():
    engine = start(clip_grad_norm=100.0)

    def closure():
        loss = loss_of(engine)
        loss.backward()
        return loss

    with told("call engine.backward(loss), then step() without a closure"):
        engine.optimizer.step(closure)
    engine.zero_grad()
    engine.backward(loss_of(engine))
    engine.optimizer.step()
    same(whole(engine), trained())


def test_a_step_without_gradients_is_preceded_by_a_backward():
    engine = start()
    with warned("Call engine.backward(loss) before it"):
        engine.step()
    trains(engine)


def test_only_the_engine_counts_micro_batches():
    def accumulate(engine, number=2):
        for _ in range(number):
            (loss_of(engine) / 2).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    want = trained(losses=[lambda model: loss_of(model) / 2 + loss_of(model) / 2])
    engine = start(gradient_accumulation_steps=2)
    with warned("Call engine.backward(loss) and engine.step() for each micro-batch"):
        accumulate(engine, 1)
    engine = start(gradient_accumulation_steps=2)
    for _ in range(2):
        take_step(engine)
    same(whole(engine), want)
    engine = start(gradient_accumulation_steps=1)
    accumulate(engine)
    same(whole(engine), want)


def test_zero_grad_is_left_out_of_the_loop():
    engine = start(gradient_accumulation_steps=2)
    with warned("leave zero_grad() out of the loop"):
        for _ in range(4):
            engine.zero_grad()
            engine.zero_grad()  # the first of two calls counts
            take_step(engine)
    engine = start(gradient_accumulation_steps=2)
    for _ in range(4):
        take_step(engine)
    same(whole(engine), trained(losses=[loss_of] * 2))


def test_a_step_in_the_backward_is_switched_off():
    for reader in (
        lambda engine: engine.clip_grad_norm_(1.0),
        lambda engine: engine.set_full_gradient("inner.weight", torch.ones(10, 7)),
        lambda engine: engine.zero_grad(),
        lambda engine: engine.backward(loss_of(engine)),
    ):
        engine = start(offload={"step_in_backward": True})
        engine.backward(loss_of(engine))
        with told("set offload.step_in_backward=False"):
            reader(engine)
        engine = start()
        engine.backward(loss_of(engine))
        reader(engine)


def test_the_learning_rate_is_changed_before_the_backward():
    engine = start(offload={"step_in_backward": True})
    engine.backward(loss_of(engine))
    engine.optimizer.param_groups[0]["lr"] = 0.1
    with told("change it before backward, or set offload.step_in_backward=False"):
        engine.step()
    for stepped in (True, False):
        engine = start(offload={"step_in_backward": stepped})
        if stepped:
            engine.optimizer.param_groups[0]["lr"] = 0.1
        engine.backward(loss_of(engine))
        engine.optimizer.param_groups[0]["lr"] = 0.1
        engine.step()
        same(whole(engine), trained(optimizer=lambda parameters: AdamW(parameters, lr=0.1)))
