"""Remedies in errors about models and optimizers for `initialize` are followed, and they work."""

import copy
import warnings

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import zeroshard
from tests.distributed.models import Tiny
from tests.remedies.told import DATA, adamw, loss_of, net, start, take_step, told, trains


def model_with(**changes):
    """`Tiny` with other attributes."""
    model = net()
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def test_a_model_is_given_without_its_wrapper():
    wrapped = nn.DataParallel(net())
    with told("give initialize the model inside, its attribute `module`"):
        start(wrapped)
    trains(start(wrapped.module))


def test_a_model_is_sharded_before_it_is_compiled_by_jit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
    with told("expected the module before torch.jit"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start(torch.jit.trace(model, DATA))
    trains(start(copy.deepcopy(model)), model)


def test_a_sharded_model_is_closed_before_it_is_sharded_again():
    engine = start()
    with told("call engine.close() on all ranks first, which gives the whole model back"):
        start(engine.module)
    engine.close()
    trains(start(engine.module))


def test_shared_memory_becomes_one_parameter_or_two():
    def built(kind):
        model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
        torch.manual_seed(0)
        nn.init.normal_(model[0].weight)
        nn.init.normal_(model[1].weight)
        if kind == "shared":
            model[1].weight = nn.Parameter(model[0].weight.data)
        elif kind == "tied":
            model[1].weight = model[0].weight
        else:
            model[1].weight = nn.Parameter(model[0].weight.data.clone())
        for layer in model:
            nn.init.zeros_(layer.bias)
        return model

    with told(
        "assign one Parameter object to both modules (b.weight = a.weight), or give each its own values"
    ):
        start(built("shared"))
    for kind in ("tied", "apart"):
        trains(start(built(kind)), built(kind))


def test_an_odd_parameter_becomes_a_buffer_or_a_real_view():
    with told(
        "Keep an untrained tensor in a buffer (register_buffer), and a complex parameter as its real view"
    ):
        start(model_with(count=nn.Parameter(torch.arange(3), requires_grad=False)))
    model = net()
    model.register_buffer("count", torch.arange(3))
    start(model)
    value = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    with told("only floating-point parameters"):
        start(model_with(phase=nn.Parameter(value)))

    class Turned(Tiny):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__()
            self.phase = nn.Parameter(torch.view_as_real(value).clone())

        def forward(self, x):
            return (super().forward(x) * torch.view_as_complex(self.phase)).abs()

    trains(start(Turned()), Turned())


def test_a_sparse_buffer_becomes_its_parts():
    def sparse():
        return torch.eye(3).to_sparse()

    model = net()
    model.register_buffer("table", sparse())
    with told(
        "Register its parts (indices and values, integers and scale, ...) as buffers and put them toge"
    ):
        start(model)

    class Parts(Tiny):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__()
            self.register_buffer("indices", sparse().coalesce().indices())
            self.register_buffer("values", 2 * sparse().coalesce().values())

        def forward(self, x):
            return torch.sparse.mm(
                super().forward(x), torch.sparse_coo_tensor(self.indices, self.values, (3, 3))
            )

    trains(start(Parts()), Parts())
    trains(start(model_with(table=sparse())))


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


def test_a_lazy_module_runs_once_before():
    def built():
        torch.manual_seed(0)
        return nn.Sequential(nn.LazyLinear(5))

    model = built()
    with told("run the model once before it is sharded"):
        start(model)
    model(DATA)
    trains(start(copy.deepcopy(model)), model)


def test_layers_that_sharding_would_change_are_built_without():
    tokens = torch.tensor([[1, 2], [3, 1]])
    for option, words in (
        ({"sparse": True}, "expected sparse=False"),
        ({"max_norm": 1.0}, "expected max_norm=None"),
    ):
        with told(words):
            start(nn.Sequential(nn.Embedding(5, 4, **option)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4))
    trains(start(copy.deepcopy(model)), model, losses=[lambda model: loss_of(model, tokens)])


def test_units_are_the_classes_that_have_a_forward():
    with told("name the class of the modules inside (Sequential), or of the module around it"):
        start(units=["ModuleList"])
    trains(start(units=["Sequential"]))
    trains(start(units=["Tiny"]))
    with told("did you mean 'Sequential'?"):
        start(units=["Sequentail"])


def test_an_optimizer_is_built_over_the_models_parameters_and_has_not_stepped():
    with told("Build it over the parameters of the model given to initialize"):
        zeroshard.initialize(net(), adamw(net().parameters()))
    model = net()
    optimizer = adamw(model.parameters())
    loss_of(model).backward()
    optimizer.step()
    with told("initialize takes an optimizer that has not stepped yet"):
        zeroshard.initialize(model, optimizer)
    model = net()
    trains(start(model, adamw(model.parameters())))


def test_whole_tensors_come_from_the_optimizers_of_zeroshard():
    from torch.optim import Muon

    def matrices(model):
        return [p for p in model.parameters() if p.ndim == 2]

    model = net()
    with told("zeroshard.optim.Muon gets whole ones"):
        zeroshard.initialize(model, Muon(matrices(model)))
    with told("use an element-wise optimizer such as AdamW, SGD or RMSprop"):
        zeroshard.initialize(model, Muon(matrices(model)))
    with told("Put it into a group with use_muon=False, which AdamW steps"):
        start(optimizer=lambda parameters: zeroshard.optim.Muon(parameters, lr=0.1))
    model = net()
    start(model, zeroshard.optim.Muon(zeroshard.optim.muon_groups(model), lr=0.1))
    model = net()
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices(model)}, {"params": others, "use_muon": False}]
    take_step(start(model, zeroshard.optim.Muon(groups, lr=0.1)))


def test_a_schedule_comes_with_its_optimizer():
    with told("lr_scheduler: expected an optimizer to go with it"):
        zeroshard.initialize(net(), lr_scheduler=lambda optimizer: StepLR(optimizer, 1))
    model = net()
    other = StepLR(adamw(net().parameters()), 1)
    with told("lr_scheduler belongs to another optimizer than the one given"):
        zeroshard.initialize(model, adamw(model.parameters()), lr_scheduler=other)
    optimizer = adamw(model.parameters())
    engine, *_ = zeroshard.initialize(model, optimizer, lr_scheduler=StepLR(optimizer, 1, gamma=0.5))
    take_step(engine)
    assert engine.get_lr() == [0.005]


def test_options_of_a_loader_are_those_of_the_users_own():
    data = TensorDataset(DATA)
    with told("expected them in the arguments of your DataLoader"):
        zeroshard.initialize(net(), None, {"micro_batch_size": 2}, training_data=DataLoader(data))
    loader = zeroshard.initialize(net(), training_data=DataLoader(data, batch_size=2)).dataloader
    assert len(next(iter(loader))[0]) == 2


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


def test_states_of_muon_begin_anew_in_another_group():
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = zeroshard.optim.Muon([{"params": matrices[:1]}, {"params": matrices[1:]}], lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    optimizer.param_groups[0].update(use_muon=False, betas=(0.9, 0.95), eps=1e-8)
    with told("or let it begin anew, by del optimizer.state[parameter]"):
        optimizer.step()
    del optimizer.state[matrices[0]]
    optimizer.step()


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


def test_an_estimate_of_another_model_is_given_its_loss():
    model = net()
    with told("give loss_of= in its place, which computes a loss with the model"):
        zeroshard.estimate(model, 1, num_tokens=8)
    assert zeroshard.estimate(model, 1, loss_of=lambda model: loss_of(model, torch.ones(4, 7)))
