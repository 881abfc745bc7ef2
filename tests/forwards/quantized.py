"""A small Llama with weights of bitsandbytes, and its training in one process and over ranks."""

import bitsandbytes
import peft
import torch
import transformers
from bitsandbytes.backends.default import ops
from torch import nn

from tests.distributed.training import part_of

for name in ("_dequantize_blockwise_compute", "_dequantize_4bit_compute"):
    # Not compiled, which takes seconds for each shape. Both sides of a comparison compute with the same code.
    setattr(ops, name, getattr(ops, name).__wrapped__)

VOCABULARY, ROWS, LENGTH = 128, 4, 16


KINDS = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "nf4 twice": {"quant_type": "nf4", "compress_statistics": True},
    "fp4 in bfloat16": {"quant_type": "fp4", "compress_statistics": False, "quant_storage": torch.bfloat16},
    "nf4 twice in float32": {
        "quant_type": "nf4",
        "compress_statistics": True,
        "quant_storage": torch.float32,
    },
    "int8": None,
}


def quantized(layer, kind):
    """A quantized layer with the weight of a linear one."""
    options, weight = KINDS[kind], layer.weight.detach().clone()
    if options is None:
        new = bitsandbytes.nn.Linear8bitLt(
            layer.in_features, layer.out_features, bias=False, has_fp16_weights=False
        )
        new.weight = bitsandbytes.nn.Int8Params(weight, has_fp16_weights=False, requires_grad=False)
    else:
        new = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, **options
        )
        new.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, module=new, **options)
    return new.to("cpu")


def llama(width=64, **options):
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
        **options,
    )


def base(kind, seed=0, width=64):
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(llama(width))
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            model.set_submodule(name, quantized(layer, kind))
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, init_lora_weights=False, **TARGETS),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, init_lora_weights=False, **TARGETS),
    "rslora": lambda: peft.LoraConfig(r=4, use_rslora=True, init_lora_weights=False, **TARGETS),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, init_weights=False, use_cayley_neumann=False, **TARGETS),
}


def adapted_model(kind, seed=0, width=64, adapter="lora"):
    """All but plain LoRA have the classes of peft for codes, by the marks that transformers gives a model."""
    model = base(kind, seed, width)
    if adapter != "lora":
        object.__setattr__(model, f"is_loaded_in_{8 if kind == 'int8' else 4}bit", True)
    torch.manual_seed(seed + 1)
    return peft.get_peft_model(model, ADAPTERS[adapter]())


def adamw(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def tokens_of(number):
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))


def plain(model, steps, num_parts=1):
    """Train in one process; a batch is accumulated part by part, as many as there are ranks."""
    optimizer, losses = adamw(model.parameters()), []
    for number in steps:
        total = torch.zeros(())
        for part in tokens_of(number).chunk(num_parts):
            loss = model(input_ids=part, labels=part).loss / num_parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def losses_of(engine, steps):
    losses = []
    for number in steps:
        part = part_of(engine, tokens_of(number))
        losses.append(engine.train_batch({"input_ids": part}, part).item())
    return losses


def same_state(found, want):
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert same_bits(found[name], value), name


def same_bits(one, other):
    """Codes in a floating-point dtype may be NaN, which equals nothing."""
    bits = (value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)


def weight_of(layer):
    """The weight of a quantized layer as bitsandbytes computes with it."""
    if hasattr(layer.weight, "SCB"):
        return layer.weight.data.float().mul_(layer.weight.SCB.unsqueeze(1).mul(1.0 / 127.0))
    return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
