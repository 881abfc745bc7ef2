"""Frozen weights of bitsandbytes with 4 and 8 bits: adapters beside them train as on one process, to the bit.

Losses and parameters are the same bits: codes and scales are those of the unsharded model, each gradient is
scaled by a power of 2, and sums are taken in the order in which one process accumulates.
"""

import functools
import json
import re
from contextlib import nullcontext

import bitsandbytes
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

import zeroshard
from tests.forwards.quantized import (
    TARGETS,
    VOCABULARY,
    adamw,
    adapted_model,
    base,
    llama,
    losses_of,
    plain,
    quantized,
    same_bits,
    same_state,
    tokens_of,
    weight_of,
)
from tests.ranks import on_ranks
from zeroshard.hf.export import Format, export_checkpoint

LAYOUTS = [
    (2, 3, "nf4 twice", "dora"),
    (2, 3, "int8", "lora"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            (2, 0, "int8", "lora"),
            (2, 3, "fp4 in bfloat16", "lora"),
            (2, 3, "nf4 twice", "oft"),
            (4, 2, "nf4 twice", "lora"),
        )
    ),
]


@pytest.mark.parametrize(("num_ranks", "stage", "kind", "adapter"), LAYOUTS)
@on_ranks()
def test_adapters_train_as_in_one_process_to_the_bit(num_ranks, stage, kind, adapter):
    model, rank = adapted_model(kind, adapter=adapter), dist.get_rank()
    want = plain(model, range(3), num_ranks)
    sharded = adapted_model(kind, seed=10 * rank, adapter=adapter)  # all get the codes and scales of rank 0
    engine = zeroshard.initialize(sharded, adamw, {"stage": stage}).engine
    assert losses_of(engine, range(3)) == want
    found = engine.full_state_dict()
    engine.close()
    if not rank:  # the model is an ordinary one again; the optimizer begins anew on both sides
        same_state(found, dict(model.state_dict()))
        same_state(dict(sharded.state_dict()), found)
        assert plain(sharded, range(3, 5)) == plain(model, range(3, 5))


# ---------------------------------------------------------------------------------------------- precision


@on_ranks(2)
def test_codes_are_not_cast_to_the_compute_dtype():
    kind = "nf4 twice in float32"
    want = adapted_model(kind).state_dict()
    model = adapted_model(kind)
    config = {"stage": 3, "precision": {"param_dtype": "bfloat16"}}
    engine = zeroshard.initialize(model, adamw, config).engine
    losses = losses_of(engine, range(3))
    state = engine.full_state_dict()
    state = {name: value for name, value in state.items() if "base_layer" in name or ".mlp." in name}
    assert losses == pytest.approx(plain(adapted_model(kind), range(3), 2), rel=1e-2)  # bf16 has 8 bits
    for name, value in state.items():
        if "lora_" not in name:
            assert same_bits(value, want[name]), name


# ----------------------------------------------------------------------------------------------- in memory


def beside(model):
    """Scales and tables of quantized layers."""
    for layer in model.modules():
        if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
            yield layer.weight.SCB
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            state = layer.weight.quant_state
            yield from (state.absmax, state.code)
            yield from (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("nf4 twice", 3), *(pytest.param(*case, marks=pytest.mark.long) for case in (("int8", 3), ("nf4", 0)))],
)
@on_ranks(2)
def test_a_rank_keeps_its_share_of_the_codes_and_all_scales(kind, stage):
    model = adapted_model(kind, width=256)
    sizes = {
        "frozen": sum(p.nbytes for p in model.parameters() if not p.requires_grad),
        "scales": sum(tensor.nbytes for tensor in beside(model)),
    }
    config = {"stage": stage}
    want = zeroshard.estimate(model, 2, config, host_computes=True)
    shapes = (getattr(getattr(p, "quant_state", None), "shape", p.shape) for p in model.parameters())
    num_params = sum(shape.numel() for shape in shapes)
    engine = zeroshard.initialize(model, adamw, config).engine
    assert engine.num_parameters() == num_params
    losses_of(engine, range(1))
    buffers = [buffer for unit in engine._runtime.units for buffer in unit.buffers if not buffer.trainable]
    held = sum(buffer.main.nbytes + buffer.full.untyped_storage().nbytes() for buffer in buffers)
    report = engine.memory_report()
    if stage == 3:
        assert held == pytest.approx(sizes["frozen"] / 2, rel=0.02)
    assert report.scales == want.scales == sizes["scales"]
    assert report.parameters == want.parameters
    assert all("scales of codes" in str(each) for each in (report, want))
    assert report.total == report.parameters + report.scales + report.gradients + report.optimizer


# -------------------------------------------------------------------------------------------- checkpoints


def saved(kind, stage, frozen, directory):
    config = {"stage": stage, "checkpoint": {"frozen": frozen}}
    engine = zeroshard.initialize(adapted_model(kind), adamw, config).engine
    losses_of(engine, range(2))
    engine.save_checkpoint(directory)
    return losses_of(engine, range(2, 4)), engine.full_state_dict()


def loaded(kind, stage, seed, directory):
    engine = zeroshard.initialize(adapted_model(kind, seed), adamw, {"stage": stage}).engine
    engine.load_checkpoint(directory)
    return losses_of(engine, range(2, 4)), engine.full_state_dict()


@pytest.mark.long_where(kind=["int8"])
@pytest.mark.parametrize(("kind", "frozen"), [("nf4 twice", True), ("int8", False)])
def test_a_checkpoint_loads_at_another_layout_over_the_same_base_or_any(ranks, tmp_path, kind, frozen):
    seed = 5 if frozen else 0
    (want, state), *_ = ranks(2, saved, kind, 3, frozen, tmp_path)
    (losses, found), *_ = ranks(1, loaded, kind, 2, seed, tmp_path)
    same_state(ranks(2, loaded, kind, 2, seed, tmp_path)[0][1], state)
    assert losses == pytest.approx(want, rel=1e-5)  # one rank has other sums
    assert found.keys() == state.keys()
    other, text = ("nf4", "is quantized as") if frozen else (kind, "leaves out the frozen parameter")
    with pytest.raises(AssertionError, match=text):
        ranks(2, loaded, other, 3, 5, tmp_path)


# ------------------------------------------------------------------------------------------------- export


@on_ranks(2)
def test_codes_are_not_exported_without_the_config_that_tells_what_they_are(tmp_path):
    model = transformers.LlamaForCausalLM(llama())
    model.set_submodule("model.layers.0.mlp.up_proj", quantized(model.model.layers[0].mlp.up_proj, "nf4"))
    engine = zeroshard.initialize(model, adamw, {"stage": 3}).engine
    engine.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.up_proj.weight' holds codes of a quantized"):
        engine.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (checkpoint,) = (path for path in (tmp_path / "checkpoint").iterdir() if path.is_dir())
    with pytest.raises(ValueError, match="has weights as codes"):
        export_checkpoint(checkpoint, tmp_path / "out", Format())


PARTS = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "num_microbatches": 2}}


def dequantized_base(kind):
    """A plain model with the weights that codes stand for."""
    model = transformers.LlamaForCausalLM(llama())
    state = base(kind).state_dict()
    for name, layer in base(kind).named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt):
            state[f"{name}.weight"] = weight_of(layer)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model


@pytest.mark.parametrize(
    ("kind", "adapters", "config"),
    [
        ("nf4 twice", True, {"stage": 3}),
        pytest.param("int8", False, {"stage": 3}, marks=pytest.mark.long),
        pytest.param("nf4 twice", True, {"stage": 3, **PARTS}, marks=pytest.mark.long),
    ],
)
@on_ranks(2)
def test_a_whole_export_is_the_model_that_peft_merges_into_dequantized_weights(
    tmp_path, kind, adapters, config
):
    want, model = dequantized_base(kind), adapted_model(kind) if adapters else base(kind)
    if adapters:
        own = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}
        want = peft.get_peft_model(want, model.peft_config["default"])
        want.load_state_dict(own, strict=False)
        want = want.merge_and_unload()
    else:
        model.model.norm.weight.requires_grad_(True)
    engine = zeroshard.initialize(model, adamw, config).engine
    if adapters:
        engine.save_pretrained(tmp_path / "adapters")
        with pytest.raises(ValueError, match="has adapters of peft"):
            engine.save_pretrained(tmp_path / "adapters", merge_adapters=True)
        with pytest.raises(ValueError, match="expected merge_adapters=True with it"):
            engine.save_pretrained(tmp_path / "out", dequantize=True)
    engine.save_pretrained(tmp_path / "out", merge_adapters=adapters, dequantize=not adapters)
    if adapters:  # training goes on as before
        assert losses_of(engine, range(2)) == plain(adapted_model(kind), range(2), 2)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in content
    assert content["architectures"] == ["LlamaForCausalLM"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is transformers.LlamaForCausalLM
    same_state(model.state_dict(), want.state_dict())


@on_ranks(2)
def test_adapters_around_weights_that_are_not_sharded_are_not_left_out_of_a_merge():
    config = {"stage": 3, "ignored": ["*q_proj.base_layer.weight"]}
    engine = zeroshard.initialize(adapted_model("nf4"), adamw, config).engine
    with pytest.raises(ValueError, match=r"q_proj.base_layer.weight', which is ignored, has an adapter"):
        engine.named_full_parameters(merge_adapters=True)
    assert losses_of(engine, range(1)) == plain(adapted_model("nf4"), range(1), 2)


@on_ranks(2)
def test_an_adapter_that_does_more_than_add_is_refused_before_a_file_is_there(tmp_path):
    for lora in (
        peft.LoraConfig(use_dora=True, **TARGETS),
        peft.LoraConfig(lora_bias=True, **TARGETS),
        peft.OFTConfig(oft_block_size=4, **TARGETS),
        peft.HiraConfig(r=4, **TARGETS),
    ):
        engine = zeroshard.initialize(peft.get_peft_model(base("nf4"), lora), adamw, {"stage": 3}).engine
        text = r"q_proj.weight', which is quantized: expected LoRA without a bias"
        with pytest.raises(ValueError, match=text):
            engine.save_pretrained(tmp_path / "out", merge_adapters=True)
        assert not (tmp_path / "out").exists()
        with pytest.raises(ValueError, match=text):
            engine.named_full_parameters(merge_adapters=True)


# ------------------------------------------------------------------------------------------------- errors


UP = "base_model.model.model.layers.0.mlp.up_proj"


def not_yet(model, _):
    model.set_submodule(UP, bitsandbytes.nn.Linear4bit(64, 96, bias=False))


class Doubled(bitsandbytes.nn.Linear8bitLt):
    def forward(self, x):
        return 2 * super().forward(x)


def with_another_forward(model, _):
    layer = quantized(nn.Linear(64, 96), "int8")
    layer.__class__ = Doubled
    model.set_submodule(UP, layer)


def with_an_embedding(model, _):
    model.base_model.model.model.embed_tokens = bitsandbytes.nn.EmbeddingNF4(VOCABULARY, 64).to("cpu")


def other_blocks(model, rank):
    model.get_submodule(UP).weight.quant_state.blocksize = 64 * (1 + rank)


def packed_on_rank_1(model, rank):
    if rank == 1:
        model.get_submodule(UP).weight.quant_state.packing_format_for_cpu = True


def nothing(model, _):
    pass


@on_ranks(2)
def test_mistakes_are_named_on_all_ranks():
    for change, config, text in (
        (not_yet, {}, "layers.0.mlp.up_proj.weight' is not quantized yet"),
        (packed_on_rank_1, {}, "layers.0.mlp.up_proj.weight' was packed for inference"),
        (with_another_forward, {}, "layers.0.mlp.up_proj' (a layer of Doubled) has a forward of its own"),
        (with_an_embedding, {}, "embed_tokens' (a layer of EmbeddingNF4) needs the scales"),
        (other_blocks, {}, "is quantized in another way on some ranks"),
        (nothing, {"mesh": {"tp": 2}}, "holds codes of a quantized weight, which tensor ranks cannot divide"),
    ):
        model = adapted_model("nf4 twice")
        change(model, dist.get_rank())
        with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
            zeroshard.initialize(model, adamw, config)


@on_ranks(2)
def test_adapters_are_not_merged_into_the_codes_of_an_engine():
    model = adapted_model("nf4 twice", adapter="rslora")
    want = plain(model, range(3), 2)
    want += plain(model, range(3, 4), 2)
    model = adapted_model("nf4 twice", adapter="rslora")
    engine = zeroshard.initialize(model, adamw, {"stage": 3}).engine
    losses = losses_of(engine, range(1))
    for shown in (nullcontext, functools.partial(engine.unsharded, write_back=True)):
        with shown(), pytest.raises(RuntimeError, match=r"merge\(\) .* of an adapter around codes"):
            model.merge_adapter()
    losses += losses_of(engine, range(1, 3))
    engine.close()
    losses += plain(model, range(3, 4), 2)
    model.merge_adapter()
    assert losses == want


def test_codes_that_are_to_be_trained_are_refused():
    model = nn.Linear(8, 8)
    model.weight.quant_state = object()
    with pytest.raises(ValueError, match="'weight' holds codes of a quantized weight, which no gradient"):
        zeroshard.estimate(model, 2)


# ----------------------------------------------------------------------------------------------- a stream


@pytest.mark.long_where(kind=["nf4 twice in float32", "int8"])
@pytest.mark.parametrize(
    ("kind", "adapter", "merge_adapters"),
    [
        ("nf4 twice in float32", "lora", True),
        ("nf4 twice", "rslora", True),
        ("int8", "lora", False),
    ],
)
@on_ranks(2)
def test_a_stream_has_weights_and_not_codes(kind, adapter, merge_adapters):
    model = adapted_model(kind, adapter=adapter)
    want = {name: p.detach() for name, p in model.named_parameters() if p.dtype == torch.float32}
    for name, layer in model.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt):
            want[f"{name}.weight"] = weight_of(layer)
    if merge_adapters:
        for name, layer in model.named_modules():
            if hasattr(layer, "get_delta_weight"):
                want[f"{name}.base_layer.weight"] += layer.get_delta_weight("default").detach()
        plain_names = {
            name: name.replace("base_model.model.", "").replace(".base_layer", "") for name in want
        }
        want = {plain_names[name]: value for name, value in want.items() if "lora_" not in name}
    engine = zeroshard.initialize(adapted_model(kind, adapter=adapter), adamw, {"stage": 3}).engine
    stream = engine.named_full_parameters(dtype=torch.float32, merge_adapters=merge_adapters)
    same_state({name: value.cpu() for name, value in stream}, want)


def with_threshold():
    model = adapted_model("int8")
    for layer in model.modules():
        if hasattr(layer, "state") and hasattr(layer.state, "threshold"):
            layer.state.threshold = 0.5
    return model


@on_ranks(2)
def test_outliers_of_8_bits_are_computed_as_in_one_process():
    model, tokens = with_threshold(), tokens_of(9)
    engine = zeroshard.initialize(with_threshold(), adamw, {"stage": 3}).engine
    for steps in ([], range(2)):
        assert losses_of(engine, steps) == plain(model, steps, 2)
        model.eval()
        with torch.no_grad():
            want = model(input_ids=tokens, labels=tokens).loss.item()
        model.train()
        assert engine.eval_batch({"input_ids": tokens}, tokens).item() == want


STEPS = 3


class Block(nn.Module):
    def __init__(self, kind, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 32), nn.Linear(width + 32, width)
        for name, linear in self.named_children():
            layer = quantized(linear, kind)
            layer.bias = nn.Parameter(linear.bias.detach().clone())
            setattr(self, name, layer)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def net(kind, width=65):
    """Blocks of 64 lie across rows, and the last one is not full."""
    torch.manual_seed(0)
    blocks = Block(kind, width), Block(kind, width)
    return nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 4))


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def in_one_process(model, num_parts):
    optimizer, losses = adamw(model.parameters()), []
    for number in range(STEPS):
        total = torch.zeros(())
        for x, y in zip(*(part.chunk(num_parts) for part in batch(number)), strict=True):
            loss = cross_entropy(model(x), y) / num_parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("kind", ["nf4 twice", pytest.param("int8", marks=pytest.mark.long)])
@on_ranks(2)
def test_layers_of_any_size_with_biases_train_as_in_one_process(kind):
    model = net(kind)
    want = in_one_process(model, 2)
    engine = zeroshard.initialize(net(kind), adamw, {"stage": 3}).engine
    for number in range(STEPS):
        x, y = (part.chunk(2)[engine.dp_rank] for part in batch(number))
        loss = cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        total = loss.detach() / 2
        dist.all_reduce(total)
        assert total.item() == want[number]
    if state := engine.full_state_dict():
        same_state(state, dict(model.state_dict()))
