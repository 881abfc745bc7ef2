"""The plan of a model whose user gives none: that of transformers, or one of our own."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from zeroshard.parallel.pipeline.chunked import Absent

_T5 = {
    "*shared": "rowwise",
    "*embed_tokens": "rowwise",
    "*Attention.[qkv]": "colwise",
    "*Attention.o": "rowwise",
    "*Attention.relative_attention_bias": "embedding_per_head",
    "*DenseReluDense.wi*": "colwise",
    "*DenseReluDense.wo": "rowwise",
    "lm_head": "colwise_gather_output",
}
_OWN: dict[str, dict[str, str]] = {
    "gpt2": {
        "*wte": "rowwise",
        "*attn.c_attn": "colwise",
        "*attn.c_proj": "rowwise",
        "*crossattention.c_attn": "colwise",
        "*crossattention.q_attn": "colwise",
        "*crossattention.c_proj": "rowwise",
        "*mlp.c_fc": "colwise",
        "*mlp.c_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "t5": _T5,
    "mt5": _T5,
}
"""Plans for models of transformers that have none there, by `config.model_type`."""

_BESIDE = {
    "phi": {"*self_attn.[qk]_layernorm": "replicated_with_grad_allreduce"},
    "apertus": {"*mlp.act_fn": "replicated_with_grad_allreduce"},
}
"""Entries that the plans of transformers lack, by `config.model_type`. A rank uses these layers for its own
heads or hidden elements."""


_PREFIX = "base_model.model."
"""The names of a model begin with it once peft has wrapped the model."""


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """Return the plan of a model, {} if there is none.

    A plan serves several variants of a model. The patterns that fit nothing in this one are left out.
    """
    kind = str(getattr(getattr(model, "config", None), "model_type", None))
    plan = getattr(model, "tp_plan", None) or _OWN.get(kind, {})
    plan = {**plan, **_BESIDE.get(kind, {})} if plan else plan
    names = [name for name, _ in model.named_modules()]
    if any(name.startswith(_PREFIX) for name in names):
        plan = {_PREFIX + at: word for at, word in plan.items()}
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    plan = {at: word for at, word in plan.items() if any(fnmatchcase(name, at) for name in names)}
    return plan | _with_tied_embedding(model, plan)


def _with_tied_embedding(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """An entry for an embedding that the plan leaves out, and whose table is that of a divided head."""
    if not hasattr(model, "resize_token_embeddings"):
        return {}
    table, head = _found(model, "get_input_embeddings"), _found(model, "get_output_embeddings")
    names = {module: name for name, module in model.named_modules()}
    weights = [getattr(module, "weight", None) for module in (table, head)]
    if table not in names or head not in names or weights[0] is None or weights[0] is not weights[1]:
        return {}
    is_known = {module: any(fnmatchcase(names[module], at) for at in plan) for module in (table, head)}
    return {names[table]: "rowwise"} if is_known[head] and not is_known[table] else {}


def check_vocabulary(model: nn.Module, plan: Mapping[str, Any], num_ranks: int) -> None:
    """Raise a ValueError for a model of transformers if the ranks do not divide its vocabulary."""
    if not hasattr(model, "resize_token_embeddings"):
        return
    tables = [_found(model, "get_input_embeddings"), _found(model, "get_output_embeddings")]
    for name, module in model.named_modules():
        if isinstance(module, Absent) or not any(module is table for table in tables):
            continue
        word = next((plan[pattern] for pattern in plan if fnmatchcase(name, pattern)), "replicate")
        num_tokens = len(module.weight)
        if word != "replicate" and num_tokens % num_ranks:
            raise ValueError(
                f"'{name}.weight', a vocabulary of {num_tokens} tokens: {num_tokens} elements cannot be "
                f"divided over mesh.tp={num_ranks} ranks; expected a multiple of {num_ranks}. "
                f"model.resize_token_embeddings(pad_to_multiple_of={num_ranks}) before zeroshard.initialize "
                "adds tokens to it"
            )


def _found(model: Any, method: str) -> Any:
    """The embeddings that a model of transformers names, None if it names none."""
    try:
        return getattr(model, method)()
    except NotImplementedError:
        return None
