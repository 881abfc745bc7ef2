"""A model that computes one of its chunks at a time.

Modules of other ranks are taken out, together with their parameters. Those of this rank take turns: while a
chunk computes, the modules of the others hand on their first argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.parallel.pipeline.outline import Outline, names_below


class Turn:
    """The chunk that computes."""

    def __init__(self) -> None:
        self.chunk: int | None = None


class Absent(nn.Module):
    """A module of another rank: it hands on its first argument.

    Args:
        adds: True for an embedding, whose rows are added to values that a chunk before has made: it gives a
            zero.
        turn: the chunk that computes.
    """

    def __init__(self, *, adds: bool, turn: Turn) -> None:
        super().__init__()
        self._adds, self._turn = adds, turn

    def forward(self, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the value; or a zero for an embedding.

        Raises:
            RuntimeError: no chunk computes: somebody has called the model by itself.
        """
        if self._turn.chunk is None:
            raise RuntimeError(
                "this rank has only its chunks of the model (mesh.pp >= 2), and cannot run its forward: call "
                "engine.train_batch(inputs, targets) or engine.eval_batch(inputs, targets) on all ranks"
            )
        return _nothing(value) if self._adds else value

    def extra_repr(self) -> str:
        """Return no details."""
        return "of another pipeline rank"


class Chunked:
    """The chunks of a model on this rank.

    Args:
        model: the model. Its modules of other ranks are taken out.
        outline: the order of its modules.
        blocks: the run of blocks of each chunk of the pipeline.
        own: the chunks of this rank.
    """

    def __init__(
        self, model: nn.Module, outline: Outline, blocks: Sequence[range], own: Sequence[int]
    ) -> None:
        self.model, self._num_chunks = model, len(blocks)
        self._is_sequence = isinstance(model, nn.Sequential)
        self._turn = Turn()
        num_blocks = len(outline.blocks)
        chunk_of = {
            name: chunk for chunk, run in enumerate(blocks) for name in outline.chunk(run, num_blocks)
        }
        for name in names_below(outline):
            parent, _, attribute = name.rpartition(".")
            module = model.get_submodule(name)
            adds = isinstance(module, nn.Embedding)
            if chunk_of[name] in own:
                module.forward = self._in_turn(module.forward, chunk_of[name], adds)
            else:
                holder = model.get_submodule(parent)
                holder._modules[attribute] = Absent(adds=adds, turn=self._turn)

    def _in_turn(self, forward: Callable[..., Any], chunk: int, adds: bool) -> Callable[..., Any]:
        @functools.wraps(forward)
        def in_turn(*args: Any, **kwargs: Any) -> Any:
            if self._turn.chunk in (None, chunk):
                return forward(*args, **kwargs)
            value = args[0] if args else next(iter(kwargs.values()))
            return _nothing(value) if adds else value

        return in_turn

    def __call__(self, chunk: int, value: Tensor | None, kwargs: Mapping[str, Any]) -> Any:
        """Compute a chunk.

        Args:
            chunk: a chunk of this rank.
            value: the output of the chunk before; None in the first one.
            kwargs: arguments of the model. For a model of transformers, `labels` make the last chunk return
                an output with a loss; a `Sequential` has one argument, `input`.

        Returns:
            The output of the chunk: a tensor, but in the last chunk of a model of transformers its output.
        """
        self._turn.chunk = chunk
        try:
            if self._is_sequence:
                return self.model(kwargs["input"] if value is None else value)
            given = dict(kwargs)
            if value is not None:
                given.pop("input_ids", None)
                given["inputs_embeds"] = value
            is_last = chunk == self._num_chunks - 1
            if not is_last:
                given.pop("labels", None)
            outputs = self.model(**given, use_cache=False)
            return outputs if is_last else outputs.logits
        finally:
            self._turn.chunk = None


def _nothing(value: Tensor) -> Tensor:
    """A zero that may be added to anything."""
    return torch.zeros((), device=value.device)
