"""A model that computes one of its chunks at a time.

Modules of other ranks are taken out, together with their parameters. Those of this rank take turns: while a
chunk computes, stand-ins take the places of the modules of the others, and hand on their first argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.parallel.pipeline.outline import Outline, names_below, refuse_collected, without_adapters

_OF_THE_HEAD = ("labels", "logits_to_keep", "num_logits_to_keep")
"""Arguments of transformers that concern the logits alone."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Turn:
    """The chunk that computes."""

    def __init__(self) -> None:
        self.chunk: int | None = None


class Absent(nn.Module):
    """A stand-in for a module of another rank or chunk: it hands on its first argument.

    Args:
        adds: True for an embedding, whose rows are added to values that a chunk before has made: it gives a
            zero.
        turn: the chunk that computes.
        name: the name of the module.
        names: the names of the parameters of the module, in it.
    """

    def __init__(self, *, adds: bool, turn: Turn, name: str, names: Sequence[str]) -> None:
        super().__init__()
        self._adds, self._turn, self._name, self.names = adds, turn, name, tuple(names)

    def __getattr__(self, key: str) -> Any:
        """Refuse to stand for an attribute in the forward of the model: that of the module may differ.

        Raises:
            RuntimeError: a chunk computes.
            AttributeError: none does.
        """
        if self._turn.chunk is not None:
            raise RuntimeError(f"it reads '{self._name}.{key}', and another chunk has '{self._name}'")
        return super().__getattr__(key)

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
        return torch.zeros((), device=value.device) if self._adds else value  # it may be added to anything

    __call__ = forward  # without hooks: those of a layer run where it computes

    def extra_repr(self) -> str:
        """Return no details."""
        return "of another chunk"


class _Place(NamedTuple):
    """A module of this rank, and its stand-in."""

    chunk: int
    holder: nn.Module
    attribute: str
    module: nn.Module
    absent: Absent


class Chunked:
    """The chunks of a model on this rank.

    Args:
        model: the model. Its modules of other ranks are taken out.
        outline: the order of its modules.
        blocks: the run of blocks of each chunk of the pipeline.
        own: the chunks of this rank.

    Raises:
        ValueError: a module that is cut has hooks, which would run once a chunk.
    """

    def __init__(
        self, model: nn.Module, outline: Outline, blocks: Sequence[range], own: Sequence[int]
    ) -> None:
        self.model, self._num_chunks, self.chunks = model, len(blocks), tuple(own)
        self._is_sequence = isinstance(model, nn.Sequential)
        self._turn = Turn()
        above = {name[:at] for name in names_below(outline) for at, one in enumerate(name) if one == "."}
        self.containers = [(name, model.get_submodule(name)) for name in sorted({"", *above})]
        """The modules that are cut: each chunk runs their forwards."""
        if hooked := [name for name, one in self.containers if any(surroundings_of(one))]:
            raise ValueError(tell_hooked(hooked[0]))
        num_blocks = len(outline.blocks)
        chunk_of = {
            name: chunk for chunk, run in enumerate(blocks) for name in outline.chunk(run, num_blocks)
        }
        self._places: list[_Place] = []
        for name in names_below(outline):
            parent, _, attribute = name.rpartition(".")
            module, holder = model.get_submodule(name), model.get_submodule(parent)
            is_added = is_embedding(module) and not self._is_sequence
            names = [inside for inside, _ in module.named_parameters(remove_duplicate=False)]
            absent = Absent(adds=is_added, turn=self._turn, name=name, names=names)
            if chunk_of[name] in own:
                self._places.append(_Place(chunk_of[name], holder, attribute, module, absent))
            else:
                holder._modules[attribute] = absent

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """Return the modules of a chunk of this rank."""
        return [place.module for place in self._places if place.chunk == chunk]

    @property
    def signature(self) -> inspect.Signature:
        """The arguments of the model."""
        return inspect.signature(without_adapters(self.model).forward)

    def check(self, named: Mapping[str, Any]) -> None:
        """Refuse arguments that a pipeline cannot serve; see `refuse_collected`."""
        refuse_collected(named)

    def __call__(self, chunk: int, inputs: Sequence[Tensor], kwargs: Mapping[str, Any]) -> Any:
        """Compute a chunk.

        Args:
            chunk: a chunk of this rank.
            inputs: the output of the chunk before; () in the first one.
            kwargs: arguments of the model. For a model of transformers, `labels` make the last chunk return
                an output with a loss; a `Sequential` has one argument, `input`.

        Returns:
            The output of the chunk, a list of one; but of the last chunk, the output of the model.
        """
        value, is_last = inputs[0] if inputs else None, chunk == self._num_chunks - 1
        self._turn.chunk = chunk
        others = [place for place in self._places if place.chunk != chunk]
        for place in others:
            place.holder._modules[place.attribute] = place.absent
        try:
            if self._is_sequence:
                output = self.model(kwargs["input"] if value is None else value)
                return output if is_last else [output]
            given = dict(kwargs) | {"use_cache": False}
            if value is not None:
                given.pop("input_ids", None)
                given["inputs_embeds"] = value
            if not is_last:
                for name in _OF_THE_HEAD:
                    given.pop(name, None)
                given["return_dict"] = True
            outputs = self.model(**given)
            return outputs if is_last else [outputs.logits]
        finally:
            for place in others:
                place.holder._modules[place.attribute] = place.module
            self._turn.chunk = None


def surroundings_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the forward that is set on the instance of a container, and the keys of its hooks."""
    # Layers have forwards of the engine, where weight gradients are computed late.
    return module._modules and vars(module).get("forward"), *(tuple(getattr(module, k)) for k in _HOOKS)


def tell_hooked(name: str = "") -> str:
    """Return the message that refuses hooks, or a forward set on the instance, of a module that is cut."""
    return (
        f"mesh.pp: expected no hooks on {repr(name) if name else 'the model'} and no forward set on it: each "
        "chunk calls them. Hook the first or last layer inside; with pipeline.trace, write it into a forward"
    )


def is_embedding(module: nn.Module) -> bool:
    """True for an embedding, also with an adapter around it or a trained copy beside it."""
    inside = getattr(module, "base_layer", getattr(module, "original_module", module))
    return isinstance(inside, nn.Embedding)
