"""Runs of small language models over pipeline ranks, and the same in one process."""

import torch
import transformers
from torch import nn

import zeroshard

VOCABULARY, LENGTH, BATCH = 40, 6, 8
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}


def llama(**others):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | others))


def eager_llama():
    return llama(attn_implementation="eager")  # torch 2.11 compiles no other attention in float64


def tied_llama():
    return llama(tie_word_embeddings=True)


def tied_gpt():
    dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))


def mixtral(**others):
    experts = {"num_local_experts": 4, "experts_implementation": "eager"}  # others have no float64
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **experts, **others))


MODELS = {
    "llama": llama,
    "eager llama": eager_llama,
    "tied llama": tied_llama,
    "tied gpt": tied_gpt,
    "mixtral": mixtral,
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name]().double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def tokens_of(number, rows=BATCH):
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(number))


def plain(name, numbers, max_norm=0.5, make=sgd):
    """Losses, gradient norms and parameters of training in one process."""
    model, losses, norms = build(name), [], []
    optimizer = make(model.parameters())
    for number in numbers:
        tokens = tokens_of(number)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def start(name, config, make=sgd, seed=0):
    if "split" not in config.get("pipeline", {"split": ()}):  # a cut that does not depend on measured times
        config = config | {"pipeline": {"balance": "memory", **config["pipeline"]}}
    return zeroshard.initialize(build(name, seed), make, {"clip_grad_norm": 0.5, **config}).engine


def train(engine, numbers, rows=BATCH):
    """Losses and gradient norms of steps; each rank takes its part of the batch."""
    losses, norms = [], []
    for number in numbers:
        tokens = tokens_of(number, rows).chunk(engine.dp_world_size)[engine.dp_rank]
        losses.append(engine.train_batch({"input_ids": tokens}, tokens).item())
        norms.append(engine.grad_norm.item())
    return losses, norms


def parameters_of(engine):
    """The parameters of this rank's part of the model, whole, by all of their names."""
    with engine.unsharded():
        named = engine.module.named_parameters(remove_duplicate=False)
        return {name: parameter.detach().clone() for name, parameter in named}
