"""Runs of small language models over pipeline ranks, and the same in one process."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn

import zeroshard
from tests.distributed.training import part_of, seeded

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


LAYOUTS = {
    "1x1x1": (1, {}, {}),
    "pp 2": (2, {"pp": 2}, {"schedule": "interleaved", "num_microbatches": 2}),
    "pp 2 x dp 2": (4, {"pp": 2}, {"schedule": "zbv", "num_microbatches": 2}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2}, {"schedule": "1f1b", "num_microbatches": 2}),
}
"""(ranks, mesh, pipeline)."""
RECOMPUTED = "0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1R0,1B0,1F1,1R1,1I1,1W1\n"


def llama(**others):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | others))


def tied_llama():
    return llama(tie_word_embeddings=True)


def tied_gpt():
    dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **dropout))


def mixtral(**others):
    experts = {"num_local_experts": 4, "experts_implementation": "eager"}  # others have no float64
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **experts, **others))


GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 16}
KINDS = ("Llama", "Qwen3", "GPT2", "Mixtral", "GPTNeoX", "Phi", "Gemma", "Mistral", "Qwen2")
"""Models of transformers whose blocks follow each other."""


def of_kind(kind, **others):
    """A model with dropout, to evaluate."""
    torch.manual_seed(0)
    sizes = GPT2 if kind == "GPT2" else SIZES | {"num_local_experts": 4, "head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(**sizes | {"pad_token_id": None} | others)
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config).eval()


MODELS = {
    "llama": llama,
    "tied llama": tied_llama,
    "tied gpt": tied_gpt,
    "mixtral": mixtral,
}


def build(name, seed=0):
    return seeded(MODELS[name], seed=seed).double()


sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=1e-3)


def tokens_of(number, rows=BATCH):
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(number))


def pair_of(rows, width, number):
    """Inputs and targets of a step, in float64."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2)]


def rows_of(value, num, place):
    """A part of inputs or targets."""
    if isinstance(value, dict):
        return {key: rows_of(one, num, place) for key, one in value.items()}
    return value.chunk(num)[place]


def language_loss(model, inputs, labels):
    return model(**inputs, labels=labels).loss


def train_plainly(model, batches, loss_of=language_loss, make=sgd, *, num=1, max_norm=None):
    """Losses and norms of one process; a loss is the mean over `num` micro-batches."""
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses, norms = make(own), [], []
    for inputs, targets in batches:
        losses.append(0.0)
        for place in range(num):
            loss = loss_of(model, rows_of(inputs, num, place), rows_of(targets, num, place)) / num
            loss.backward()
            losses[-1] += loss.item()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(own, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def plain(name, numbers, max_norm=0.5, make=sgd):
    """Losses, gradient norms and parameters of training in one process."""
    model = build(name)
    batches = (({"input_ids": tokens}, tokens) for tokens in map(tokens_of, numbers))
    losses, norms = train_plainly(model, batches, make=make, max_norm=max_norm)
    return losses, norms, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def config_of(layout, stage=3, **more):
    _, mesh, pipeline = LAYOUTS[layout]
    return {"stage": stage, "mesh": mesh, **({"pipeline": pipeline} if pipeline else {}), **more}


def start(model, config, make=sgd, seed=0):
    """An engine over a model, or over one of a name."""
    if "split" not in config.get("pipeline", {"split": ()}):  # the names in the tests are of this cut
        config = config | {"pipeline": {"balance": "memory", **config["pipeline"]}}
    model = build(model, seed) if isinstance(model, str) else model
    return zeroshard.initialize(model, make, {"clip_grad_norm": 0.5, **config}).engine


def train(engine, numbers, rows=BATCH):
    """Losses and gradient norms of steps; each rank takes its part of the batch."""
    losses, norms = [], []
    for number in numbers:
        tokens = part_of(engine, tokens_of(number, rows))
        losses.append(engine.train_batch({"input_ids": tokens}, tokens).item())
        norms.append(engine.grad_norm.item())
    return losses, norms


def parameters_of(engine):
    """The parameters of this rank's part of the model, whole, by all of their names."""
    with engine.unsharded():
        named = engine.module.named_parameters(remove_duplicate=False)
        return {name: parameter.detach().clone() for name, parameter in named}


def run(name, config, numbers=range(3), make=sgd):
    """Losses, gradient norms and parameters of this rank after these steps."""
    engine = start(name, config, make)
    found = (*train(engine, numbers), parameters_of(engine))
    engine.close(restore=False)
    return found


def agree(found, want, *, rel=1e-6, absolute=1e-6, whole=True):
    """Compare what ranks have, with `whole` all of them, with losses, norms and parameters of one process."""
    want_losses, want_norms, values = want
    names = set()
    for losses, norms, state in found:
        assert losses == pytest.approx(want_losses, rel=rel)
        assert norms == pytest.approx(want_norms, rel=rel)
        names |= state.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, values[name].detach(), rtol=0, atol=absolute, msg=name)
    assert names == values.keys() or not whole
