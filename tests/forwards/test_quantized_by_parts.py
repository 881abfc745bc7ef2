"""Ranks quantize parts of a weight: codes and scales are those of bitsandbytes for the whole, to the bit."""

from functools import partial
from itertools import pairwise

import bitsandbytes
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import zeroshard
from tests.forwards.quantized import (
    ADAPTERS,
    adamw,
    llama,
    losses_of,
    plain,
    same_bits,
    same_state,
    weight_of,
)
from tests.ranks import on_ranks
from zeroshard.lazy.deferred import Codes
from zeroshard.plan.layout import Span

FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
KINDS = {
    "nf4 twice": {**FOUR, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4 in bfloat16": {**FOUR, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


def config_of(kind):
    return transformers.BitsAndBytesConfig(**KINDS[kind])


def with_adapters(model):
    torch.manual_seed(1)
    return peft.get_peft_model(model, ADAPTERS["lora"]()).train()


def theirs(folder, kind):
    """The model that transformers quantizes as it loads it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config_of(kind), device_map="cpu", dtype=torch.float32
    )
    return with_adapters(model)


def from_file(folder, kind):
    model = zeroshard.from_pretrained(
        transformers.AutoModelForCausalLM, folder, quantization_config=config_of(kind), dtype=torch.float32
    )
    with zeroshard.deferred_init():
        return with_adapters(model)


def from_init(_, kind):
    torch.manual_seed(dist.get_rank())  # the values of rank 0 count
    with zeroshard.deferred_init():
        return with_adapters(zeroshard.quantize(transformers.LlamaForCausalLM(llama()), config_of(kind)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(llama()).save_pretrained(path)
    return path


PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "num_microbatches": 2}}
LAYOUTS = [
    (2, 3, {}, from_file, "nf4 twice"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            (1, 3, {}, from_file, "fp4 in bfloat16"),
            (2, 3, PIPELINE, from_file, "int8"),
            (2, 0, {}, from_init, "int8"),
            (4, 2, {}, from_file, "int8"),
            (4, 3, {"shard_group_size": 2}, from_init, "nf4 twice"),
            (4, 2, PIPELINE, from_file, "nf4 twice"),
        )
    ),
]


@pytest.mark.parametrize(("num_ranks", "stage", "options", "build", "kind"), LAYOUTS)
@on_ranks()
def test_the_model_is_the_one_that_transformers_quantizes(folder, num_ranks, stage, options, build, kind):
    given, config = build(folder, kind), {"stage": stage, **options}
    assert all(p.is_meta for p in given.parameters())
    foretold = zeroshard.estimate(given, num_ranks, config, host_computes=True)
    engine = zeroshard.initialize(given, adamw, config).engine
    report = engine.memory_report()
    if "mesh" not in options:
        assert (report.parameters, report.scales) == (foretold.parameters, foretold.scales)
    model = theirs(folder, kind)
    if state := engine.full_state_dict():
        same_state(state, dict(model.state_dict()))
    want = plain(model, range(3), num_ranks)
    if options and num_ranks == 4:  # two groups of ranks add up their gradients first
        want = pytest.approx(want, rel=1e-6)
    assert losses_of(engine, range(3)) == want


@pytest.mark.parametrize("kind", ["nf4 twice", pytest.param("int8", marks=pytest.mark.long)])
@on_ranks(2)
def test_a_unit_with_a_weight_that_no_file_has_gets_the_scales_of_rank_0(folder, tmp_path, kind):
    lacking, rank = "model.layers.1.mlp.up_proj.weight", dist.get_rank()
    own = tmp_path / str(rank)
    own.mkdir()
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if name != lacking}
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    (own / "config.json").write_text((folder / "config.json").read_text())
    torch.manual_seed(rank)  # a weight that the folder lacks has the initial value of rank 0
    engine = zeroshard.initialize(from_file(own, kind), adamw, {"stage": 3}).engine
    found, state = engine.full_state_dict(), theirs(folder, kind).state_dict()
    assert rank or found.keys() == state.keys()
    for name, value in found.items():
        is_other = "layers.1.mlp.up_proj" in name and _is_of_values(name)
        assert same_bits(value, state[name]) != is_other, name


def _is_of_values(name):
    """True for codes and scales, and the description, which has the offset of the scales."""
    return name.endswith((".weight", ".absmax", "nested_absmax", "SCB", "nf4"))


# ------------------------------------------------------------------------------------ quantized folders


def quantized_folder(folder, kind, path):
    """A folder with codes and scales, as transformers saves it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config_of(kind), device_map="cpu", dtype=torch.float32
    )
    model.save_pretrained(path)
    return path


@pytest.fixture
def gpt2(tmp_path, kind):
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 32}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "base")
    return quantized_folder(tmp_path / "base", kind, tmp_path / "codes")


@pytest.mark.parametrize("kind", ["nf4 twice", pytest.param("int8", marks=pytest.mark.long)])
@on_ranks(2)
def test_weights_that_gpt2_has_transposed_are_exported_so(gpt2, tmp_path, kind):
    read = partial(transformers.AutoModelForCausalLM.from_pretrained, gpt2, device_map="cpu")
    tokens = torch.arange(8).view(1, 8)
    model = read(dtype=torch.float32).eval()
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    weights = {
        f"{name}.weight": weight_of(layer).T
        for name, layer in model.named_modules()
        if type(layer).__module__.startswith("bitsandbytes")
    }
    with torch.no_grad():
        want = model(input_ids=tokens, labels=tokens).loss.item()
    engine = zeroshard.initialize(read(), adamw, {"stage": 3}).engine
    assert engine.eval_batch({"input_ids": tokens}, tokens).item() == want
    engine.save_pretrained(tmp_path / "plain", dequantize=True)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "plain").state_dict()
    assert len(weights) == 8
    for name, value in weights.items():
        assert torch.equal(found[name], value), name


def test_a_quantized_folder_is_refused_with_both_remedies(folder, tmp_path):
    path = quantized_folder(folder, "nf4 twice", tmp_path)
    for options in ({}, {"quantization_config": config_of("int8")}):
        with pytest.raises(ValueError, match=r"has codes .* by quantization_config=.* of transformers"):
            zeroshard.from_pretrained(transformers.AutoModelForCausalLM, path, **options)


# ------------------------------------------------------------------------------------------------- blocks


def parts_of(size, cuts):
    places = sorted({0, size, *(cut for cut in cuts if cut < size)})
    return [Span(start, stop) for start, stop in pairwise(places)]


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from([32, 48, 64, 100]),
    st.sampled_from([64, 128, 4096]),
    st.sampled_from([torch.uint8, torch.bfloat16]),
    st.lists(st.integers(0, 600), max_size=4),
)
def test_any_parts_have_the_codes_and_scales_of_the_whole(rows, width, block, storage, cuts):
    weight = torch.randn(4 * rows, width, generator=torch.Generator().manual_seed(rows))
    options = {"blocksize": block, "quant_type": "nf4", "quant_storage": storage}
    want, state = bitsandbytes.functional.quantize_4bit(weight, **options)

    def quantize(values):
        codes, inner = bitsandbytes.functional.quantize_4bit(values, **options)
        return codes, inner.absmax

    codes = Codes(weight, block, 2 * storage.itemsize, quantize)
    assert codes.numel == want.numel()
    unit = 256 // storage.itemsize  # a range of a rank begins on a block of the layout
    found = torch.cat([codes.read(span) for span in parts_of(want.numel(), [unit * cut for cut in cuts])])
    assert torch.equal(found.view(torch.uint8), want.view(-1).view(torch.uint8))
    assert torch.equal(codes.scales, state.absmax)


# ---------------------------------------------------------------------------------------------- quantize


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(64, 64) for _ in range(4))
        self.second.weight = self.first.weight


def test_layers_with_a_shared_weight_and_those_that_are_named_stay_as_they_are():
    model = zeroshard.quantize(Tied(), transformers.BitsAndBytesConfig(load_in_4bit=True))
    kinds = [type(layer).__name__ for layer in model.children()]
    assert kinds == ["Linear", "Linear", "Linear4bit", "Linear4bit"]
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["third"])
    kinds = [type(layer).__name__ for layer in zeroshard.quantize(Tied(), config).children()]
    assert kinds == ["Linear", "Linear", "Linear", "Linear4bit"]
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["third", "fourth"])
    with pytest.raises(ValueError, match=r"expected layers of torch\.nn\.Linear in Tied, got none"):
        zeroshard.quantize(Tied(), config)


def test_a_model_with_memory_is_quantized_at_once_as_by_bitsandbytes():
    torch.manual_seed(0)
    layer = nn.Linear(64, 96)
    want, _ = bitsandbytes.functional.quantize_4bit(layer.weight.detach(), quant_type="nf4")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = zeroshard.quantize(nn.Sequential(layer), config)
    assert torch.equal(model[0].weight, want)
    assert model[0].bias is layer.bias
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad  # as transformers leaves it


@pytest.mark.parametrize("around", [lambda model: model, nn.Sequential])
def test_a_model_with_adapters_is_refused_and_one_that_is_quantized_before_them_trains_them(around):
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    adapted = around(with_adapters(transformers.LlamaForCausalLM(llama())))
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    with pytest.raises(ValueError, match=r"has adapters of peft, .* Quantize it before peft adds"):
        zeroshard.quantize(adapted, config)
    assert {name for name, p in adapted.named_parameters() if p.requires_grad} == trained
    quantized = around(with_adapters(zeroshard.quantize(transformers.LlamaForCausalLM(llama()), config)))
    assert {name for name, p in quantized.named_parameters() if p.requires_grad} == trained
