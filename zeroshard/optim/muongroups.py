"""The parameters of a model that Muon steps, and those that are left to AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from zeroshard.optim.muon import Split

_HEADS = frozenset(("lm_head", "head", "output", "embed_out", "unembed", "classifier", "score"))
"""Names of the module that makes the output of a model, in the libraries that people use."""


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
        exclude: names of parameters that AdamW gets too; * and ? stand for any letters.
        split: by such names, the matrices that a fused one consists of: see `Muon`. A fused projection of
            queries, keys and values is three matrices, and one of gate and up is two.

    Returns:
        The groups, with the names of their parameters; none of them is empty.

    Raises:
        ValueError: no name fits a pattern of `exclude`, or no parameter of Muon one of `split`.
    """
    left = set(_others(model))
    given = (split or {}).items()
    rules = {pattern: parts if isinstance(parts, int) else tuple(parts) for pattern, parts in given}
    used: set[str] = set()
    matrices: dict[Split, list[tuple[str, nn.Parameter]]] = {}
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        excluding = [pattern for pattern in exclude if fnmatchcase(name, pattern)]
        used.update(excluding)
        if not parameter.requires_grad:
            continue
        if excluding or parameter in left or not _is_matrix(name, parameter):
            others.append((name, parameter))
            continue
        fits = [pattern for pattern in rules if fnmatchcase(name, pattern)]
        used.update(fits)
        matrices.setdefault(rules[fits[0]] if fits else None, []).append((name, parameter))
    for key, patterns in (("exclude", exclude), ("split", rules)):
        for pattern in patterns:
            if pattern not in used:
                raise ValueError(f"{key}: expected the name of a parameter, got '{pattern}', which fits none")
    groups = [
        {"params": named, "use_muon": True, **(muon or {}), **({} if parts is None else {"split": parts})}
        for parts, named in matrices.items()
    ]
    return [*groups, {"params": others, "use_muon": False, **(adamw or {})}] if others else groups


def _others(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of embeddings, of convolutions and of the last layer."""
    find = getattr(model, "get_output_embeddings", None)
    heads = [find()] if callable(find) else []
    for name, module in model.named_modules():
        is_head = name.rpartition(".")[2] in _HEADS or any(module is head for head in heads)
        if is_head or isinstance(module, nn.Embedding | nn.EmbeddingBag | _ConvNd):
            yield from module.parameters(recurse=False)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """True for a matrix, or a stack of several, that is no embedding and no bias."""
    parts = name.split(".")
    is_embedding = any("embed" in part or part in ("wte", "wpe") for part in parts)
    is_stack = parameter.dim() == 3 and len(parameter) > 1
    return (parameter.dim() == 2 or is_stack) and not is_embedding and not parts[-1].endswith("bias")
