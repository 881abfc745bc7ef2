"""The parameters of a model that Muon steps, and those that are left to AdamW."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from zeroshard.optim.muon import Split
from zeroshard.parallel.pipeline.chunked import Absent

_HEADS = frozenset(("lm_head", "head", "output", "embed_out", "unembed", "classifier", "score"))
"""Names of the module that makes the output of a model, in the libraries that people use."""

_COPY = re.compile(r"\.modules_to_save\.[^.]+")
"""The part that peft adds to the name of a module that it trains beside adapters."""


def muon_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    exclude: Sequence[str] = (),
    split: Mapping[str, int | Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Divide the trained parameters of a model into groups for `zeroshard.optim.Muon`.

    Muon gets the matrices of hidden layers, and stacks of them such as those of experts; also the matrices of
    LoRA. AdamW gets all else: embeddings and the weights tied to them, the last layer, biases, norms and
    convolutions. Embeddings are those of `nn.Embedding`, and parameters with "embed", "wte" or "wpe" in a
    name; a stack of one is a position or a token, not a matrix. The last layer is that of
    `get_output_embeddings()`, or one of the usual names, such as "lm_head".

    Args:
        model: the model, before it is sharded.
        muon: hyperparameters of the groups of Muon.
        adamw: hyperparameters of the group of AdamW.
        exclude: names of parameters that AdamW gets too; * and ? stand for any letters. A tied parameter has
            several names.
        split: by such names, the matrices that a fused one consists of: see `Muon`. A fused projection of
            queries, keys and values is three matrices, and one of gate and up is two.

    Returns:
        The groups, with the names of their parameters; none of them is empty.

    Raises:
        ValueError: no name fits a pattern of `exclude`, or no parameter of Muon one of `split`; or a split
            between rows is asked for a weight [inputs, outputs], whose fused matrices lie beside each other.
    """
    left, transposed = set(_others(model)), _transposed(model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    rules: dict[str, int | tuple[int, ...]] = {
        pattern: parts if isinstance(parts, int) else tuple(parts) for pattern, parts in (split or {}).items()
    }
    used: set[str] = set()
    matrices: dict[Split, list[tuple[str, nn.Parameter]]] = {}
    others: list[tuple[str, nn.Parameter]] = []
    for parameter, own in names.items():
        name = own[0]
        excluding = [pattern for pattern in exclude if _fits(own, pattern)]
        used.update(excluding)
        if not parameter.requires_grad:
            continue
        if excluding or parameter in left or not all(_is_matrix(one, parameter) for one in own):
            others.append((name, parameter))
            continue
        fits = [pattern for pattern in rules if _fits(own, pattern)]
        used.update(fits)
        if fits and parameter in transposed:
            raise ValueError(
                f"split: '{fits[0]}' would cut '{name}' between inputs, because it is a weight [inputs, "
                "outputs]; expected patterns for weights [outputs, inputs], as nn.Linear has them"
            )
        matrices.setdefault(rules[fits[0]] if fits else None, []).append((name, parameter))
    for key, patterns in (("exclude", exclude), ("split", rules)):
        for pattern in patterns:
            if pattern not in used and not any(fnmatchcase(name, pattern) for name in _elsewhere(model)):
                raise ValueError(f"{key}: expected the name of a parameter, got '{pattern}', which fits none")
    groups = [
        {"params": named, "use_muon": True, **(muon or {}), **({} if parts is None else {"split": parts})}
        for parts, named in matrices.items()
    ]
    return [*groups, {"params": others, "use_muon": False, **(adamw or {})}] if others else groups


def _fits(names: Sequence[str], pattern: str) -> bool:
    """True if a pattern fits one of the names of a parameter."""
    return any(fnmatchcase(name, pattern) for name in names)


def _elsewhere(model: nn.Module) -> Iterator[str]:
    """The names of the parameters that other pipeline ranks have."""
    for name, module in model.named_modules():
        if isinstance(module, Absent):
            yield from (f"{name}.{own}" for own in module.names)


def _transposed(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of layers of transformers whose weights are [inputs, outputs], as in GPT-2."""
    layers = (module for module in model.modules() if type(module).__name__ == "Conv1D")
    return {parameter for layer in layers for parameter in layer.parameters(recurse=False)}


def _others(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of embeddings, of convolutions and of the last layer."""
    find = getattr(model, "get_output_embeddings", None)
    heads = [find()] if callable(find) else []
    for name, module in model.named_modules():
        last = _COPY.sub("", name).rpartition(".")[2]
        is_head = last in _HEADS or any(module is head for head in heads)
        if is_head or isinstance(module, nn.Embedding | nn.EmbeddingBag | _ConvNd):
            yield from module.parameters(recurse=False)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """True for a matrix, or a stack of several, that is no embedding and no bias."""
    parts = name.split(".")
    is_embedding = any("embed" in part or part in ("wte", "wpe") for part in parts)
    is_stack = parameter.dim() == 3 and len(parameter) > 1
    return (parameter.dim() == 2 or is_stack) and not is_embedding and not parts[-1].endswith("bias")
