"""A check before the cut of a model of transformers: between its modules the model computes nothing.

A chunk is the whole model, in which the modules of other chunks hand on what they are given. So a model whose
modules all hand on their input must return its input. A model that scales embeddings or logits in a forward
of its own would scale them in every chunk. One whose blocks return tuples would take them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.parallel.pipeline.chunked import is_embedding
from zeroshard.parallel.pipeline.outline import Outline, unknown_model, without_adapters
from zeroshard.parallel.pipeline.profile import Profiler
from zeroshard.parallel.pipeline.sample import same_random_numbers

_LENGTH = 2
"""Tokens of the input: a forward that takes the first token alone is found."""


class _Handing(Profiler):
    """Lets all modules of a model hand on their first argument."""

    def _standing_for(self, name: str, module: nn.Module) -> Callable[..., Any]:
        is_added = is_embedding(module)

        def stand_in(value: Any, *_: Any, **__: Any) -> Any:
            return torch.zeros((), device=value.device) if is_added else value

        return stand_in


def require_handed_on(model: nn.Module, outline: Outline, device: torch.device) -> None:
    """Check that a model without its modules returns its input; it does not change.

    Args:
        model: a `Sequential`, which is not checked, or a causal language model of transformers.
        outline: the order of its modules.
        device: the device of the check, which needs a few kilobytes.

    Raises:
        ValueError: the model computes something outside of its modules.
    """
    if isinstance(model, nn.Sequential):
        return
    embedding: Any = without_adapters(model).get_input_embeddings()  # type: ignore[operator]
    profiler = _Handing(device, None)
    with same_random_numbers(device), torch.no_grad(), profiler.inside(model, outline):
        value = torch.rand(1, _LENGTH, embedding.weight.shape[-1], device=device)
        try:
            found = model(inputs_embeds=value.clone(), use_cache=False).logits
        except Exception as error:  # of any kind: the model takes apart what its blocks return
            why = f"its forward does not run without its blocks ({type(error).__name__}: {error})"
            raise unknown_model(model, why) from error
    if not (isinstance(found, Tensor) and torch.equal(found, value)):
        raise unknown_model(
            model, "its forward computes outside of these, such as a factor of embeddings or logits"
        )
