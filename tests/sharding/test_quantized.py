"""Frozen weights of bitsandbytes with 4 and 8 bits: adapters beside them train as on one process, to the bit.

Losses and parameters are the same bits: codes and scales are those of the unsharded model, each gradient is
scaled by a power of 2, and sums are taken in the order in which one process accumulates.
"""

import copy
import functools
import json
from contextlib import nullcontext
from types import SimpleNamespace

import bitsandbytes
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import zeroshard
from tests.ranks import on_ranks
from tests.sharding.quantized import (
    VOCABULARY,
    adamw,
    base,
    build,
    llama,
    plain,
    quantized,
    same_bits,
    same_state,
    tokens_of,
    train,
    weight_of,
)
from zeroshard.hf.export import Format, export_checkpoint
from zeroshard.hf.quantize import name_bits


def trained(kind, stage, options):
    rank = dist.get_rank()
    model = build(kind, seed=10 * rank)  # all ranks get the codes and scales of rank 0
    engine = zeroshard.initialize(model, adamw, {"stage": stage, **options}).engine
    losses = train(engine, range(3))
    names = [name for name, p in engine.named_parameters() if p.requires_grad]
    state = engine.full_state_dict()
    engine.close()
    if not rank:  # the model is an ordinary one again
        same_state(dict(model.state_dict()), state)
        losses += plain(model, range(3, 5))
    return losses, names, state


LAYOUTS = [
    *((2, 3, kind) for kind in ("nf4 twice", "fp4 in bfloat16", "int8")),
    *(
        pytest.param(num_ranks, stage, kind, marks=pytest.mark.long)
        for num_ranks, stage, kind in ((1, 3, "nf4"), (2, 0, "int8"), (2, 1, "nf4 twice in float32"))
    ),
    pytest.param(4, 2, "nf4 twice", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("num_ranks", "stage", "kind"), LAYOUTS)
def test_adapters_train_as_in_one_process_to_the_bit(ranks, kind, stage, num_ranks):
    model = build(kind)
    want = plain(model, range(3), num_ranks)
    state = copy.deepcopy(model.state_dict())
    (losses, names, found), *others = ranks(num_ranks, trained, kind, stage, {})
    assert losses[:3] == want
    assert all("lora_" in name for name in names)
    same_state(found, state)
    assert losses[3:] == plain(model, range(3, 5))  # the optimizer begins anew on both sides
    assert all(other[0] == want for other in others)


# ---------------------------------------------------------------------------------------------- precision


@on_ranks(2)
def test_codes_are_not_cast_to_the_compute_dtype():
    kind = "nf4 twice in float32"
    want = build(kind).state_dict()
    model = build(kind)
    config = {"stage": 3, "precision": {"param_dtype": "bfloat16"}}
    engine = zeroshard.initialize(model, adamw, config).engine
    losses = train(engine, range(3))
    state = engine.full_state_dict()
    state = {name: value for name, value in state.items() if "base_layer" in name or ".mlp." in name}
    assert losses == pytest.approx(plain(build(kind), range(3), 2), rel=1e-2)  # bf16 has 8 bits
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
    model = build(kind, width=256)
    sizes = {
        "frozen": sum(p.nbytes for p in model.parameters() if not p.requires_grad),
        "scales": sum(tensor.nbytes for tensor in beside(model)),
    }
    config = {"stage": stage}
    want = zeroshard.estimate(model, dist.get_world_size(), config, host_computes=True)
    shapes = (getattr(getattr(p, "quant_state", None), "shape", p.shape) for p in model.parameters())
    num_params = sum(shape.numel() for shape in shapes)
    engine = zeroshard.initialize(model, adamw, config).engine
    assert engine.num_parameters() == num_params
    train(engine, range(1))
    buffers = [buffer for unit in engine._runtime.units for buffer in unit.buffers if not buffer.trainable]
    held = sum(buffer.main.nbytes + buffer.full.untyped_storage().nbytes() for buffer in buffers)
    report = engine.memory_report()
    if stage == 3:
        assert held == pytest.approx(sizes["frozen"] / 2, rel=0.02)
    assert report.scales == want.scales == sizes["scales"]
    assert report.parameters == want.parameters
    assert "scales of codes" in str(report)
    assert "scales of codes" in str(want)
    assert report.total == report.parameters + report.scales + report.gradients + report.optimizer


# -------------------------------------------------------------------------------------------- checkpoints


def saved(kind, stage, frozen, directory):
    config = {"stage": stage, "checkpoint": {"frozen": frozen}}
    engine = zeroshard.initialize(build(kind), adamw, config).engine
    train(engine, range(2))
    engine.save_checkpoint(directory)
    return train(engine, range(2, 4)), engine.full_state_dict()


def loaded(kind, stage, seed, directory):
    engine = zeroshard.initialize(build(kind, seed), adamw, {"stage": stage}).engine
    engine.load_checkpoint(directory)
    return train(engine, range(2, 4)), engine.full_state_dict()


@pytest.mark.parametrize(("kind", "frozen"), [("nf4 twice", True), ("int8", False)])
def test_a_checkpoint_loads_at_another_layout_over_the_same_base_or_any(ranks, tmp_path, kind, frozen):
    (want, state), *_ = ranks(2, saved, kind, 3, frozen, tmp_path)
    (losses, found), *_ = ranks(1, loaded, kind, 2, 5 if frozen else 0, tmp_path)
    same_state(ranks(2, loaded, kind, 2, 5 if frozen else 0, tmp_path)[0][1], state)
    assert losses == pytest.approx(want, rel=1e-5)  # one rank has other sums
    assert found.keys() == state.keys()


def test_a_checkpoint_of_another_base_or_kind_is_refused(ranks, tmp_path):
    ranks(2, saved, "nf4 twice", 3, False, tmp_path / "without")
    ranks(2, saved, "nf4 twice", 3, True, tmp_path / "with")
    with pytest.raises(AssertionError, match="leaves out the frozen parameter"):
        ranks(2, loaded, "nf4 twice", 3, 5, tmp_path / "without")
    with pytest.raises(AssertionError, match="is quantized as"):
        ranks(2, loaded, "nf4", 3, 0, tmp_path / "with")


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


def with_adapters_of(model, kind):
    """The same adapters over another base."""
    model = peft.get_peft_model(model, build(kind).peft_config["default"])
    model.load_state_dict({n: v for n, v in build(kind).state_dict().items() if "lora_" in n}, strict=False)
    return model


def exported_whole(kind, adapters, config, folder):
    model = build(kind) if adapters else base(kind)
    if not adapters:
        model.model.norm.weight.requires_grad_(True)
    engine = zeroshard.initialize(model, adamw, config).engine
    if adapters:
        engine.save_pretrained(folder / "adapters")
        with pytest.raises(ValueError, match="has adapters of peft"):
            engine.save_pretrained(folder / "adapters", merge_adapters=True)
        with pytest.raises(ValueError, match="expected merge_adapters=True with it"):
            engine.save_pretrained(folder / "out", dequantize=True)
    engine.save_pretrained(folder / "out", merge_adapters=adapters, dequantize=not adapters)
    return train(engine, range(2))


@pytest.mark.parametrize(
    ("kind", "adapters", "config"),
    [
        ("nf4 twice", True, {"stage": 3}),
        ("int8", False, {"stage": 3}),
        pytest.param("nf4 twice", True, {"stage": 3, **PARTS}, marks=pytest.mark.long),
    ],
)
def test_a_whole_export_is_the_model_that_peft_merges_into_dequantized_weights(
    ranks, tmp_path, kind, adapters, config
):
    want = dequantized_base(kind)
    if adapters:
        want = with_adapters_of(want, kind).merge_and_unload()
    losses, *_ = ranks(2, exported_whole, kind, adapters, config, tmp_path)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in content
    assert content["architectures"] == ["LlamaForCausalLM"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is transformers.LlamaForCausalLM
    same_state(model.state_dict(), want.state_dict())
    if adapters:  # and training goes on as before
        assert losses == plain(build(kind), range(2), 2)


@on_ranks(2)
def test_adapters_around_weights_that_are_not_sharded_are_not_left_out_of_a_merge():
    config = {"stage": 3, "ignored": ["*q_proj.base_layer.weight"]}
    engine = zeroshard.initialize(build("nf4"), adamw, config).engine
    with pytest.raises(ValueError, match=r"q_proj.base_layer.weight', which is ignored, has an adapter"):
        engine.named_full_parameters(merge_adapters=True)
    assert train(engine, range(1)) == plain(build("nf4"), range(1), 2)


TARGETS = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
NOT_ADDED = {
    "DoRA": peft.LoraConfig(use_dora=True, **TARGETS),
    "a bias": peft.LoraConfig(lora_bias=True, **TARGETS),
    "activated LoRA": peft.LoraConfig(alora_invocation_tokens=[1], **TARGETS),
    "OFT": peft.OFTConfig(oft_block_size=4, **TARGETS),
    "HiRA": peft.HiraConfig(r=4, **TARGETS),
}


@pytest.mark.long_where(kind=["a bias", "activated LoRA", "HiRA"])
@pytest.mark.parametrize("kind", NOT_ADDED)
@on_ranks(2)
def test_an_adapter_that_does_more_than_add_is_refused_before_a_file_is_there(tmp_path, kind):
    model = peft.get_peft_model(base("nf4"), NOT_ADDED[kind])
    engine = zeroshard.initialize(model, adamw, {"stage": 3}).engine
    with pytest.raises(ValueError, match=r"q_proj.weight', which is quantized: expected LoRA without a bias"):
        engine.save_pretrained(tmp_path / "out", merge_adapters=True)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------- errors


def not_yet(model, _):
    name = "base_model.model.model.layers.0.mlp.up_proj"
    layer = bitsandbytes.nn.Linear4bit(64, 96, bias=False)
    model.set_submodule(name, layer)


class Doubled(bitsandbytes.nn.Linear8bitLt):
    def forward(self, x):
        return 2 * super().forward(x)


def with_another_forward(model, _):
    linear = nn.Linear(64, 96)
    layer = quantized(linear, "int8")
    layer.__class__ = Doubled
    model.set_submodule("base_model.model.model.layers.0.mlp.up_proj", layer)


def with_an_embedding(model, _):
    model.base_model.model.model.embed_tokens = bitsandbytes.nn.EmbeddingNF4(VOCABULARY, 64).to("cpu")


def other_blocks(model, rank):
    model.get_submodule("base_model.model.model.layers.0.mlp.up_proj").weight.quant_state.blocksize = 64 * (
        1 + rank
    )


def packed_on_rank_1(model, rank):
    if rank == 1:
        layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
        layer.weight.quant_state.packing_format_for_cpu = True


def nothing(model, _):
    pass


@pytest.mark.parametrize(
    ("change", "config", "text"),
    [
        (not_yet, {}, "layers.0.mlp.up_proj.weight' is not quantized yet"),
        (packed_on_rank_1, {}, "layers.0.mlp.up_proj.weight' was packed for inference"),
        (with_another_forward, {}, "layers.0.mlp.up_proj' (a layer of Doubled) has a forward of its own"),
        (with_an_embedding, {}, "embed_tokens' (a layer of EmbeddingNF4) needs the scales"),
        (other_blocks, {}, "is quantized in another way on some ranks"),
        (nothing, {"mesh": {"tp": 2}}, "holds codes of a quantized weight, which tensor ranks cannot divide"),
    ],
)
@on_ranks(2)
def test_mistakes_are_named_on_all_ranks(change, config, text):
    model = build("nf4 twice")
    change(model, dist.get_rank())
    with pytest.raises((ValueError, RuntimeError)) as caught:
        zeroshard.initialize(model, adamw, config)
    message = str(caught.value)
    assert text in message


def with_layers_of_peft(kind):
    """Adapters of the classes that peft has for codes."""
    model = base(kind)
    name_bits(model, SimpleNamespace(load_in_4bit=kind != "int8", load_in_8bit=kind == "int8"))
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )


@on_ranks(2)
def test_adapters_are_not_merged_into_the_codes_of_an_engine():
    kind = "nf4 twice"
    model = with_layers_of_peft(kind)
    want = plain(model, range(3), 2)
    want += plain(model, range(3, 4), 2)
    model = with_layers_of_peft(kind)
    engine = zeroshard.initialize(model, adamw, {"stage": 3}).engine
    losses = train(engine, range(1))
    for shown in (nullcontext, functools.partial(engine.unsharded, write_back=True)):
        with shown(), pytest.raises(RuntimeError, match=r"merge\(\) .* of an adapter around codes"):
            model.merge_adapter()
    losses += train(engine, range(1, 3))
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


@pytest.mark.parametrize(("kind", "merge_adapters"), [("nf4 twice in float32", True), ("int8", False)])
@on_ranks(2)
def test_a_stream_has_weights_and_not_codes(kind, merge_adapters):
    model = build(kind)
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
    engine = zeroshard.initialize(build(kind), adamw, {"stage": 3}).engine
    stream = engine.named_full_parameters(dtype=torch.float32, merge_adapters=merge_adapters)
    same_state({name: value.cpu() for name, value in stream}, want)


def train_loss(engine):
    tokens = tokens_of(9)
    return engine.eval_batch({"input_ids": tokens}, tokens).item()


def with_threshold(kind, threshold):
    model = build(kind)
    for layer in model.modules():
        if hasattr(layer, "state") and hasattr(layer.state, "threshold"):
            layer.state.threshold = threshold
    return model


@pytest.mark.long_where(threshold=[6.0])
@pytest.mark.parametrize("threshold", [0.5, 6.0])
@on_ranks(2)
def test_outliers_of_8_bits_are_computed_as_in_one_process(threshold):
    model = with_threshold("int8", threshold)

    def evaluated():
        model.eval()
        with torch.no_grad():
            loss = model(input_ids=tokens_of(9), labels=tokens_of(9)).loss.item()
        model.train()
        return loss

    want = evaluated(), plain(model, range(2), 2), evaluated()
    engine = zeroshard.initialize(with_threshold("int8", threshold), adamw, {"stage": 3}).engine
    assert (train_loss(engine), train(engine, range(2)), train_loss(engine)) == want
