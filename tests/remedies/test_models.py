"""Remedies in errors about models for `initialize`, and in saves, are followed, and they work."""

import copy
import warnings

import torch
from torch import nn

import zeroshard
from tests.remedies.told import DATA, net, start, told, trains, warned


def model_with(**changes):
    """`Tiny` with other attributes."""
    model = net()
    for name, value in changes.items():
        setattr(model, name, value)
    return model


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

    odd = nn.Parameter(torch.ones(3).as_subclass(Odd), requires_grad=False)
    with told("or leave the parameter out with Config(ignored=...)"):
        start(model_with(odd=odd))
    trains(start(model_with(odd=odd), ignored=["odd"]), model_with(odd=odd))


def test_gradient_hooks_are_registered_after_initialize():
    model, seen = net(), []
    model.gain.register_hook(seen.append)
    words = "register them after initialize, on the parameter of that name in engine.named_parameters()"
    with told(words):
        start(model)
    engine = start()
    dict(engine.named_parameters())["gain"].register_hook(lambda gradient: 2 * gradient)
    model = net()
    model.gain.register_hook(lambda gradient: 2 * gradient)
    trains(engine, model)


def test_units_are_the_classes_that_have_a_forward():
    with told("name the class of the modules inside (Sequential), or of the module around it"):
        start(units=["ModuleList"])
    trains(start(units=["Sequential"]))
    trains(start(units=["Tiny"]))
    with told("did you mean 'Sequential'?"):
        start(units=["Sequentail"])


def test_a_distributed_tensor_is_made_whole():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

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
    import transformers

    def llama(**options):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 9}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=2, **options)
        return transformers.LlamaForCausalLM(config)

    def loss(model):
        tokens = torch.arange(8)[None]
        return model(input_ids=tokens, labels=tokens).loss

    with told("set use_cache=False in the model's config for training"):
        loss(start(llama(), recompute="unit"))
    trains(start(llama(use_cache=False), recompute="unit"), llama(use_cache=False), losses=[loss])


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
