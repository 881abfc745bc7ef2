"""A model that computes one of its chunks at a time, and the order of the modules along which it is cut.

    before      blocks                          after
    embedding   block 0   block 1   block 2     norm, head
    |--- chunk 0 ---|     |--- chunk 1 ---|  |-- chunk 2 --|

A chunk is the same model, in which the modules of other chunks hand on what they are given. So its own
forward makes masks and positions from the arguments, in every chunk, and nothing of it is written again here.

Modules of other ranks are taken out, together with their parameters. This rank's modules take turns: while a
chunk computes, stand-ins take the places of the modules of the others, and hand on their first argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.parameters.unsharded import retire

_OF_A_SEQUENCE = ("forward", "__call__", "__iter__")
"""The methods that make a Sequential call its modules one after another."""


@dataclass(frozen=True)
class Outline:
    """The modules of a model in the order in which they compute, by their names."""

    before: tuple[str, ...]
    """Modules before the blocks; the first one is the embedding of the tokens, if there is one."""
    blocks: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All modules, in order."""
        return (*self.before, *self.blocks, *self.after)

    def chunk(self, blocks: range) -> tuple[str, ...]:
        """Return the modules of a chunk with a run of blocks."""
        own = tuple(self.blocks[number] for number in blocks)
        first = self.before if blocks.start == 0 else ()
        return (*first, *own, *(self.after if blocks.stop == len(self.blocks) else ()))


def outline_of(model: nn.Module) -> Outline:
    """Return the outline of a `Sequential`, or of a causal language model of transformers.

    Adapters of peft in its layers belong to the modules that have these layers.

    Raises:
        ValueError: the model is neither, or has modules whose place is not known.
    """
    if isinstance(model, nn.Sequential):
        if any(getattr(type(model), name) is not getattr(nn.Sequential, name) for name in _OF_A_SEQUENCE):
            raise unknown_model(model, "it is a Sequential with a forward of its own")
        return Outline((), tuple(model._modules), ())  # a module may have several places
    if callable(to_dict := getattr(getattr(model, "config", None), "to_dict", None)):
        refuse_collected(to_dict())
    causal = without_adapters(model)
    base = base_of(causal)
    blocks_name, blocks = _blocks_of(causal, base)
    children = [name for name, _ in base.named_children()]
    place = children.index(blocks_name)
    prefix, outer = (("" if inside is model else f"{_name_of(model, inside)}.") for inside in (base, causal))
    before = [name for name in children[:place] if _computes(base.get_submodule(name))]
    after = [name for name in children[place + 1 :] if _computes(base.get_submodule(name))]
    outside = [name for name, child in causal.named_children() if child is not base and _computes(child)]
    embedding = _name_of(base, causal.get_input_embeddings())  # type: ignore[operator]
    if embedding not in before:
        raise unknown_model(causal, f"its embedding '{embedding}' is not among the modules before its blocks")
    before.sort(key=lambda name: name != embedding)
    return Outline(
        tuple(prefix + name for name in before),
        tuple(f"{prefix}{blocks_name}.{number}" for number in range(len(blocks))),
        (*(prefix + name for name in after), *(outer + name for name in outside)),
    )


def refuse_collected(options: Mapping[str, Any]) -> None:
    """Refuse outputs of all layers: the last rank would have its own layers' outputs alone.

    Raises:
        ValueError: a config or arguments ask for them.
    """
    for key in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if options.get(key):
            raise ValueError(
                f"mesh.pp: expected {key}=False, got True: it collects values of all layers, and a pipeline "
                "rank has only its own"
            )


def without_adapters(model: Any) -> nn.Module:
    """Return the model that peft has wrapped, or the given one if it has wrapped none.

    Raises:
        ValueError: its adapters are not in its layers alone.
    """
    if not (getattr(model, "peft_config", None) and hasattr(model, "get_base_model")):
        given: nn.Module = model
        return given
    from peft.tuners.tuners_utils import BaseTuner

    has_own_forward = type(model.base_model).forward is not BaseTuner.forward  # AdaLoRA adds to the loss
    for name, config in model.peft_config.items():
        if has_own_forward or getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"mesh.pp: expected adapters of layers, such as LoRA, got adapter '{name}' "
                f"({config.peft_type.value}), which acts around the model or depends on the tokens: a chunk "
                "has a part of the model, and only the first one has the tokens"
            )
    inside: nn.Module = model.get_base_model()
    return inside


def _computes(module: nn.Module) -> bool:
    """True for a module whose values depend on parameters or random numbers, unlike tables of positions."""
    return isinstance(module, nn.Dropout) or any(True for _ in module.parameters())


def base_of(model: Any) -> nn.Module:
    """Return the model inside a causal language model, which has the blocks."""
    base = getattr(model, "base_model", None)
    has_table = hasattr(model, "get_input_embeddings")
    if not (isinstance(base, nn.Module) and has_table) or base is model:
        raise unknown_model(model, "it is no such model")
    if getattr(model.config, "is_encoder_decoder", False):
        raise unknown_model(model, "it has an encoder and a decoder")
    return base


def _blocks_of(model: nn.Module, base: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    lists = [
        (name, child)
        for name, child in base.named_children()
        if isinstance(child, nn.ModuleList) and len(child)
    ]
    if len(lists) != 1:
        raise unknown_model(model, f"it has {len(lists)} lists of blocks: {[name for name, _ in lists]}")
    name, blocks = lists[0]
    return name, list(blocks)


def _name_of(model: nn.Module, module: Any) -> str:
    return next((name for name, other in model.named_modules() if other is module), "")


def unknown_model(model: nn.Module, why: str) -> ValueError:
    """Return the error for a model that a pipeline cannot cut."""
    return ValueError(
        "mesh.pp: expected a torch.nn.Sequential, or a causal language model of transformers whose "
        f"embedding, blocks, norm and head follow each other; got a {type(model).__name__}: {why}. "
        "pipeline.trace=True cuts models of other structures that return one tensor"
    )


_OF_THE_HEAD = ("labels", "logits_to_keep", "num_logits_to_keep")
"""Arguments of transformers that concern the logits alone."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes of a module that have its hooks."""


class ChunkTurn:
    """The chunk that computes."""

    chunk: int | None = None


class Absent(nn.Module):
    """A stand-in for a module of another rank or chunk: it hands on its first argument.

    Args:
        adds: True for an embedding, whose rows are added to values that a chunk before has made: it gives a
            zero.
        turn: the chunk that computes.
        name: the name of the module.
        names: the names of the parameters of the module, in it.
    """

    def __init__(self, *, adds: bool, turn: ChunkTurn, name: str, names: Sequence[str]) -> None:
        super().__init__()
        self._adds, self._turn, self._name, self.names = adds, turn, name, tuple(names)

    def __getattr__(self, key: str) -> Any:
        """Refuse to stand for an attribute in the forward of the model: the module's may differ.

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

    __call__ = forward  # without hooks: the hooks of a layer run where it computes


class Chunked:
    """The chunks of a model: first all of them, then the chunks of this rank.

    Args:
        model: the model; see `outline_of`.

    Raises:
        ValueError: it cannot be cut; or a module that is cut has hooks, which would run once a chunk.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.outline = model, outline_of(model)
        self.signature = inspect.signature(without_adapters(model).forward)
        """The arguments of the model."""
        names = self.outline.names
        above = {name[:at] for name in names for at, one in enumerate(name) if one == "."}
        self.containers = [(name, model.get_submodule(name)) for name in sorted({"", *above})]
        """The modules that are cut: each chunk runs their forwards."""
        if hooked := [name for name, one in self.containers if any(surroundings_of(one))]:
            raise ValueError(tell_hooked(hooked[0]))
        self._is_sequence, self._turn = isinstance(model, nn.Sequential), ChunkTurn()
        self._last_chunk = 0
        self._stand_ins: list[tuple[int, nn.Module, str, Absent]] = []
        """Of each module of this rank: its chunk, the container with its name there, and its stand-in."""

    def tensors_of(self, blocks: range) -> Iterator[Tensor]:
        """Yield the parameters of the chunk with a run of blocks, and the buffers that it may write."""
        modules = self.model.modules()
        tables = {part._buffers.get(key) for part in modules for key in part._non_persistent_buffers_set}
        for module in map(self.model.get_submodule, self.outline.chunk(blocks)):
            yield from (*module.parameters(), *(one for one in module.buffers() if one not in tables))

    def keep(self, runs: Sequence[range], own: Collection[int], stand_in: type[Absent] = Absent) -> None:
        """Take out the modules of other ranks; any use of their parameters is an error from now on.

        Args:
            runs: the blocks of each chunk of the pipeline.
            own: the chunks of this rank.
            stand_in: the class of the stand-ins.
        """
        self._last_chunk = len(runs) - 1
        before = {p: name for name, p in self.model.named_parameters() if not p.is_meta}
        for chunk, run in enumerate(runs):
            for name in self.outline.chunk(run):
                parent, _, attribute = name.rpartition(".")
                module, holder = self.model.get_submodule(name), self.model.get_submodule(parent)
                is_added = is_embedding(module) and not self._is_sequence
                names = [inside for inside, _ in module.named_parameters(remove_duplicate=False)]
                absent = stand_in(adds=is_added, turn=self._turn, name=name, names=names)
                if chunk in own:
                    self._stand_ins.append((chunk, holder, attribute, absent))
                else:
                    holder._modules[attribute] = absent
        # A module that refers to one of another rank would compute with its first values forever.
        for parameter in before.keys() - set(self.model.parameters()):
            retire(parameter, before[parameter])

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """Return the modules of a chunk of this rank."""
        return [holder.get_submodule(name) for own, holder, name, _ in self._stand_ins if own == chunk]

    check = staticmethod(refuse_collected)

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
        value, is_last = inputs[0] if inputs else None, chunk == self._last_chunk
        self._turn.chunk = chunk
        # Containers of its own for each chunk would miss what the user and the engine change later: the mode,
        # an attribute such as the loss function, a module, a forward around the model's.
        whole = [(one._modules, one._modules.copy()) for _, one in self.containers]
        for own, holder, attribute, absent in self._stand_ins:
            if own != chunk:
                holder._modules[attribute] = absent
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
            for modules, before in whole:
                modules.update(before)
            self._turn.chunk = None


def surroundings_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the forward that is set on the instance of a container, and the keys of its hooks."""
    # Layers have forwards of the engine, where weight gradients are computed late.
    return module._modules and vars(module).get("forward"), *(tuple(getattr(module, k)) for k in HOOKS)


def tell_hooked(name: str = "") -> str:
    """Return the message that refuses hooks, or a forward set on the instance, of a module that is cut."""
    return (
        f"mesh.pp: expected no hooks on {repr(name) if name else 'the model'} and no forward set on it: each "
        "chunk calls them. Hook the first or last layer inside; with pipeline.trace, write it into a forward"
    )


def is_embedding(module: nn.Module) -> bool:
    """True for an embedding, also with an adapter around it or with a trained copy."""
    inside = getattr(module, "base_layer", getattr(module, "original_module", module))
    return isinstance(inside, nn.Embedding)
