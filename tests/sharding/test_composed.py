"""Frozen weights that wrap other tensors, as those of torchao: sharded as codes, composed in each forward."""

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn import functional as F

import zeroshard
from tests.distributed.training import STAGES
from tests.ranks import on_ranks
from tests.sharding.quantized import adamw, llama, plain, same_state, train
from zeroshard.hf.export import Format, export_checkpoint

aten = torch.ops.aten


class Rows(torch.Tensor):
    """Codes with a scale for each row; a linear layer computes with the numbers that they stand for."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device, requires_grad=False
        )

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight, dtype):
        largest = {torch.int8: 127, torch.float8_e4m3fn: 448}[dtype]
        scale = weight.abs().amax(1, keepdim=True) / largest
        values = weight / scale
        return cls((values if dtype.is_floating_point else values.round()).to(dtype), scale)

    def dequantize(self):
        return self.codes.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"kind": "rows"}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, shape, stride):
        assert context == {"kind": "rows"}
        assert inner["codes"].shape == shape
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.dequantize(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale))
        raise NotImplementedError(func)


def of_torchao(weight, config):
    from torchao import quantization

    layer = nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight = nn.Parameter(weight)
    quantization.quantize_(layer, getattr(quantization, config)())
    return layer.weight.detach()


MAKES = {
    "int8": lambda weight: Rows.of(weight, torch.int8),
    "float8": lambda weight: Rows.of(weight, torch.float8_e4m3fn),
    **{
        f"torchao {name}": lambda weight, name=name: of_torchao(weight, f"{name}WeightOnlyConfig")
        for name in ("Int8", "Intx", "Float8")
    },
}
LONG = [name for name in MAKES if "torchao" in name]  # needs the package, which make test-all installs


PIPELINE = {"schedule": "1f1b", "num_microbatches": 2}


def base(kind, seed=0):
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(llama())
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.weight = nn.Parameter(MAKES[kind](layer.weight.detach()), requires_grad=False)
    return model.requires_grad_(False)


def build(kind, seed=0, change=lambda model: model):
    model = change(base(kind, seed))
    torch.manual_seed(seed + 1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def numbers(model):
    """Everything that a model computes with, weights as numbers."""
    return {
        name: (p.dequantize() if hasattr(p, "__tensor_flatten__") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def trained(kind, stage, folder):
    model = build(kind, seed=10 * dist.get_rank())  # all ranks get the weights of rank 0
    want = zeroshard.estimate(model, dist.get_world_size(), {"stage": stage}, host_computes=True)
    engine = zeroshard.initialize(model, adamw, {"stage": stage}).engine
    report = engine.memory_report()
    assert (report.parameters, report.scales) == (want.parameters, want.scales)
    losses = train(engine, range(3))
    assert engine.num_parameters() == sum(p.numel() for p in build(kind).parameters())
    stream = streamed(engine)
    engine.save_checkpoint(folder / "checkpoint")
    engine.save_pretrained(folder / "plain", merge_adapters=True)
    engine.close()
    after = numbers(model)
    if not dist.get_rank():  # the model is an ordinary one again
        losses += plain(model, range(3, 5))
    return losses, stream, after, report


LAYOUTS = [(2, 3, "int8")] + [
    pytest.param(*case, marks=pytest.mark.long)
    for case in ((2, 0, "float8"), (4, 2, "torchao Int8"), (2, 3, "torchao Intx"), (2, 3, "torchao Float8"))
]


@pytest.mark.parametrize(("num_ranks", "stage", "kind"), LAYOUTS)
def test_adapters_beside_them_train_as_in_one_process_to_the_bit(ranks, tmp_path, kind, num_ranks, stage):
    model = build(kind)
    want = plain(model, range(3), num_ranks)
    state = numbers(model)
    merged = build(kind, change=with_numbers)
    merged.load_state_dict({name: p for name, p in state.items() if "lora_" in name}, strict=False)
    merged = numbers(merged.merge_and_unload())
    (losses, stream, after, report), *others = ranks(num_ranks, trained, kind, stage, tmp_path)
    assert losses[:3] == want
    assert all(other[0] == want for other in others)
    same_state(stream, state)
    same_state(after, state)
    assert losses[3:] == plain(model, range(3, 5))  # the optimizer begins anew on both sides
    same_state(numbers(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), merged)
    if stage == 3:
        codes = sum(p.numel() for p in base(kind).parameters() if hasattr(p, "__tensor_flatten__"))
        others = sum(p.nbytes for n, p in state.items() if "base_layer" not in n and "_proj" not in n)
        lora = sum(p.nbytes for n, p in state.items() if "lora_" in n)
        assert report.parameters == pytest.approx((codes + others + lora) / num_ranks, rel=0.1)


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.long_where(kind=LONG)
@on_ranks(2)
def test_a_closed_model_in_bfloat16_computes_with_its_codes(kind):
    for stage in STAGES:
        torch.manual_seed(0)
        layers = nn.Embedding(9, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 3)
        model = nn.Sequential(*layers).bfloat16().requires_grad_(False)
        model[1].weight = nn.Parameter(MAKES[kind](model[1].weight), requires_grad=False)
        model[2].requires_grad_(True)
        before = {name: parameter.dtype for name, parameter in model.named_parameters()}
        tokens = torch.arange(6)
        hidden = model[:2](tokens)
        engine = zeroshard.initialize(
            model, torch.optim.SGD(model[2].parameters(), lr=0.1), {"stage": stage}
        ).engine
        engine.backward(engine(tokens).float().square().mean())
        engine.step()
        head = [engine.full_parameter(f"2.{name}").bfloat16() for name in ("weight", "bias")]
        engine.close()
        assert {name: parameter.dtype for name, parameter in model.named_parameters()} == before
        assert torch.equal(model(tokens), F.linear(hidden, *head))


def with_numbers(model):
    """The model, with weights as numbers."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and hasattr(layer.weight, "__tensor_flatten__"):
            layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    return model


def streamed(engine):
    return {name: values.clone() for name, values in engine.named_full_parameters()}


def loaded(folder, seed):
    engine = zeroshard.initialize(build("int8", seed), adamw, {"stage": 3}).engine
    engine.load_checkpoint(folder)
    return streamed(engine), train(engine, range(3, 5))


def saved(folder):
    engine = zeroshard.initialize(build("int8"), adamw, {"stage": 3}).engine
    train(engine, range(3))
    engine.save_checkpoint(folder)
    return streamed(engine), train(engine, range(3, 5))


def test_a_checkpoint_has_the_codes_and_scales_and_is_not_exported_as_numbers(ranks, tmp_path):
    (state, losses), _ = ranks(2, saved, tmp_path)
    for found, again in ranks(2, loaded, tmp_path, 7):
        same_state(found, state)
        assert again == losses
    (checkpoint,) = (path for path in tmp_path.iterdir() if path.is_dir())
    with pytest.raises(ValueError, match="adapters"):
        export_checkpoint(checkpoint, tmp_path / "out", Format())


def nothing(model, _):
    model.model.norm.weight.requires_grad_(True)


def elsewhere(model, _):
    nothing(model, _)
    weight = model.model.embed_tokens.weight.detach()
    model.model.embed_tokens.weight = nn.Parameter(Rows.of(weight, torch.int8), requires_grad=False)


def other_kind(model, rank):
    nothing(model, rank)
    layer = model.model.layers[0].mlp.up_proj
    if rank:
        layer.weight = nn.Parameter(OtherRows(layer.weight.codes, layer.weight.scale), requires_grad=False)


def own_forward(model, _):
    layer = model.model.layers[1].mlp.up_proj
    before = layer.forward
    layer.forward = lambda x: 2 * before(x)  # as hooks of accelerate are


def own_buffer(model, _):
    model.model.layers[1].mlp.up_proj.register_buffer("weight_scale", torch.ones(1))


class OtherRows(Rows):
    pass


@pytest.mark.parametrize(
    ("change", "config", "optimizer", "text"),
    [
        (nothing, {"mesh": {"tp": 2}}, None, "holds codes of a quantized weight, which tensor ranks cannot"),
        (
            nothing,
            {"mesh": {"pp": 2}, "pipeline": {**PIPELINE, "split": ["a"], "trace": True}},
            None,
            "a trace",
        ),
        (nothing, {}, torch.optim.AdamW, "without frozen weights that wrap other tensors"),
        (elsewhere, {}, None, "'model.embed_tokens.weight' is a Rows with operations of its own"),
        (own_forward, {}, None, "'model.layers.1.mlp.up_proj.weight' is a Rows with operations of its own"),
        (own_buffer, {}, None, "'model.layers.1.mlp.up_proj.weight' is a Rows with operations of its own"),
        (other_kind, {}, None, "rank(s) 0 have 'model.layers.0.mlp.up_proj' as"),
    ],
)
@on_ranks(2)
def test_weights_that_cannot_be_sharded_are_named(change, config, optimizer, text):
    model = base("int8")
    change(model, dist.get_rank())
    before = [type(p) for p in model.parameters()]
    names = set(model.state_dict())
    with pytest.raises((ValueError, RuntimeError)) as caught:
        zeroshard.initialize(model, adamw if optimizer is None else optimizer(model.parameters()), config)
    assert [type(p) for p in model.parameters()] == before  # the model is as it was
    assert set(model.state_dict()) == names
    assert "forward" not in vars(model.model.layers[0].mlp.up_proj)
    if change is nothing:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    message = str(caught.value)
    assert text in message
