"""A model of any structure, cut into chunks by a trace of its forward.

    model     embedding -> blocks.0 -> blocks.1 -> head            any Python code between its modules
    trace     graph of operations, by torch.distributed.pipelining
    chunks    [embedding, blocks.0] | [blocks.1, head]             split = ["blocks.1"]

A chunk is a graph. Its modules have the names of the model's modules, and compute with the model's own
parameters: both have the same dictionary of them, so a parameter that changes there changes here. torch
copies tied parameters for each stage; here they stay tied.

A module that is cut between chunks, such as the list of blocks, computes in several graphs. It has one place
in the tree of names, which nobody calls. So it cannot be a unit, and its own parameters belong to the root.

[Note: Values may skip chunks]
A value that a later chunk needs goes through all chunks between. So messages go to the next chunk only, as
with other models, and schedules need not know of it. Messages between any two chunks would need an order and
room of their own.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from zeroshard.internals.warn import first_of
from zeroshard.parallel.pipeline.chunked import Outline, surroundings_of, tell_hooked
from zeroshard.parallel.pipeline.profile import SampleBatch, same_modes, same_random_numbers
from zeroshard.plan.names import fitting

Value = tuple[int, int]
"""An output of a chunk: the number of the chunk, and its place among the outputs."""


class _ChunkGraph(NamedTuple):
    """The graph of a chunk."""

    graph: nn.Module
    sources: tuple[str | Value, ...]
    """Its arguments: each is an argument of the model, by name, or a value of an earlier chunk."""


def find_begin(pattern: str, names: Sequence[str]) -> str:
    """Return the name of the one module that an entry of `pipeline.split` fits.

    Raises:
        ValueError: it fits none, or several.
    """
    found = fitting(pattern, names, inside=False)
    if len(found) != 1:
        raise ValueError(
            f"pipeline.split: '{pattern}' fits {first_of(found) or 'none'} of {first_of(names)}; expected one"
        )
    return found[0]


def trace(model: nn.Module, sample: SampleBatch, names: Sequence[str]) -> TracedChunks:
    """Trace a model with a micro-batch, and cut it before modules.

    Args:
        model: the whole model; it stays as it is.
        sample: a micro-batch. All micro-batches must have its shapes.
        names: patterns for the modules that each begin a new chunk.

    Raises:
        ValueError: a pattern does not fit one module, a module has hooks, the model cannot be traced, or its
            output is no tensor.
    """
    from torch.distributed.pipelining import SplitPoint, pipeline  # here: few scripts need them

    known = dict(model.named_modules())
    if hooked := [name for name, module in known.items() if any(surroundings_of(module)[1:])]:
        raise ValueError(tell_hooked(hooked[0]))
    inside = [name for name in known if name]
    names = [find_begin(name, inside) for name in names]
    bound = inspect.signature(model.forward).bind(*sample.inputs, **sample.named)
    if unknown := [key for key, value in bound.arguments.items() if not isinstance(value, Tensor)]:
        raise ValueError(
            f"pipeline.trace: expected tensors as arguments of the model, got another type in "
            f"{', '.join(unknown)}"
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with same_random_numbers(device), _unchanged(known[name] for name in names):
        try:
            has_modes = _has_modes(model, bound)
            split = dict.fromkeys(names, SplitPoint.BEGINNING)
            pipe = pipeline(model, bound.args, bound.kwargs, split_spec=split)
        except Exception as error:  # of any kind, from torch.export
            raise ValueError(
                f"pipeline.trace: the {type(model).__name__} could not be traced: {error.__cause__ or error}"
            ) from error
    stages = _read_stages(pipe.split_gm)
    _, readers = _uses_of(stages)
    for name in readers:
        if "@" in name:  # torch names the second call of a module so, and copies its parameters
            called = re.sub(r"@\d+", "", name).rpartition(".")[0]
            raise ValueError(
                "pipeline.trace: expected modules with parameters to run once in a forward, but "
                f"'{called}' runs several times"
            )
    _refuse_written(model, bound, readers)
    if len(stages) != len(names) + 1:
        raise ValueError(
            f"pipeline.split: expected {len(names) + 1} chunks, as many as names and one more, got "
            f"{len(stages)}: each name must begin another module that computes"
        )
    forms = {name: form_of(value) for name, value in bound.arguments.items()}
    return TracedChunks(model, stages, names, forms, has_modes=has_modes)


def _refuse_written(model: nn.Module, bound: inspect.BoundArguments, readers: Mapping[str, set[int]]) -> None:
    """Refuse buffers that one chunk writes and another chunk reads: each rank has a copy."""
    chunks: dict[Tensor, set[int]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        chunks.setdefault(buffer, set()).update(readers.get(name, ()))
    if max(map(len, chunks.values()), default=0) > 1:
        program = torch.export.export(model, bound.args, bound.kwargs).run_decompositions()
        for name in program.graph_signature.buffers_to_mutate.values():
            if len(found := sorted(chunks[model.get_buffer(name)])) > 1:
                raise ValueError(
                    f"pipeline.trace: expected a written buffer in one chunk, got '{name}' in {found}. Make "
                    "a tensor, use that, and write it once: step = self.step + 1; self.step.copy_(step)"
                )


@contextmanager
def _unchanged(modules: Any) -> Iterator[None]:
    """Undo the marks of torch for its split points: forwards of these modules."""
    before = {module: vars(module).get("forward") for module in modules}
    try:
        yield
    finally:
        for module, forward in before.items():
            vars(module).pop("forward", None)
            vars(module).pop("_orig_forward", None)
            if forward is not None:
                module.forward = forward


def _has_modes(model: nn.Module, bound: inspect.BoundArguments) -> bool:
    """True if the graphs in train mode and in eval mode differ."""
    texts = []
    with same_modes(model):
        for mode in (True, False):
            model.train(mode)
            texts.append(str(torch.export.export(model, bound.args, bound.kwargs).graph))
    return texts[0] != texts[1]


def form_of(value: Any) -> Any:
    """Return dtype and shape of a tensor; any other value itself."""
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value


def _read_stages(whole: fx.GraphModule) -> list[_ChunkGraph]:
    """The stages of a graph whose nodes call one after another.

    Raises:
        ValueError: the output is no single value of the last one.
    """
    found: dict[fx.Node, str | Value] = {}
    stages: list[_ChunkGraph] = []
    output: Any = None
    for node in whole.graph.nodes:
        if node.op == "placeholder":
            found[node] = str(node.target)
        elif node.op == "call_module":
            found[node] = (len(stages), 0)
            stages.append(
                _ChunkGraph(whole.get_submodule(str(node.target)), tuple(found[a] for a in node.args))
            )
        elif node.op == "call_function":  # one of several outputs
            source, place = node.args
            chunk = found[source][0]
            found[node] = (int(chunk), int(place))
        elif node.op == "output":
            (output,) = node.args
    values = [found.get(one) for one in output] if isinstance(output, list | tuple) else [found.get(output)]
    if values != [(len(stages) - 1, 0)]:
        raise ValueError("pipeline.trace: expected a model that returns one tensor, of its last chunk")
    return stages


def _uses_of(stages: Sequence[_ChunkGraph]) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Return the chunks that compute a module, and those that read a parameter or buffer, by name."""
    users, readers = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for chunk, stage in enumerate(stages):
        for name, module in stage.graph.named_modules():
            graph = getattr(module, "graph", None)
            for node in graph.nodes if isinstance(graph, fx.Graph) else ():
                if node.op not in ("output", "placeholder"):
                    users[name].add(chunk)
                if node.op == "get_attr":
                    readers[f"{name}.{node.target}" if name else str(node.target)].add(chunk)
    return dict(users), dict(readers)


class _Tree(nn.Module):
    """The modules of graphs, under the names of the model."""

    def forward(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Compute a chunk, among the hooks of the root."""
        return compute(*args)


class TracedChunks:
    """The chunks of a traced model, as `Chunked` has the chunks of other models.

    Args:
        whole: the model.
        stages: the graphs of the chunks, in order.
        names: the modules that begin the chunks after the first one.
        forms: dtype and shape of each tensor among the arguments, and the value of any other one.
        has_modes: True if the model computes otherwise in eval mode, as dropout does.
    """

    def __init__(
        self,
        whole: nn.Module,
        stages: Sequence[_ChunkGraph],
        names: Sequence[str],
        forms: Mapping[str, Any],
        *,
        has_modes: bool,
    ) -> None:
        self._whole, self._stages, self._forms = whole, tuple(stages), dict(forms)
        self._has_modes, self._is_training = has_modes, whole.training
        self.outline = Outline((), ("beginning", *names), ())
        self.signature = inspect.signature(whole.forward)
        last = {
            source: chunk
            for chunk, stage in enumerate(stages)
            for source in stage.sources
            if isinstance(source, tuple)
        }
        self._boundaries = tuple(
            tuple(value for value in sorted(last) if value[0] <= chunk < last[value])
            for chunk in range(len(stages))
        )
        """For each chunk, the values that it hands on to the next one."""
        self._users, self._readers = _uses_of(stages)
        """The chunks that compute a module, and those that read a parameter or buffer, by name."""
        for named in (whole.named_parameters, whole.named_buffers):
            for name, _ in named(remove_duplicate=False):
                self._readers.setdefault(name, {0})  # unused ones belong to the first chunk
        self.model = _Tree()
        self.model.training = whole.training
        self._build(range(len(stages)))

    @property
    def containers(self) -> list[tuple[str, nn.Module]]:
        """All modules: a graph calls its own with other arguments, and nobody calls the model's."""
        return [*self.model.named_modules(), *self._whole.named_modules()]

    def tensors_of(self, blocks: range) -> Iterator[Tensor]:
        """Yield the parameters of some chunks, each once."""
        named = self._whole.named_parameters(remove_duplicate=False)
        yield from dict.fromkeys(p for name, p in named if not self._readers[name].isdisjoint(blocks))

    def keep(self, runs: Sequence[range], own: Collection[int]) -> None:
        """Keep some chunks alone; parameters and buffers of the others leave the original model, too."""
        self._build(own)
        named = dict(self._whole.named_modules(remove_duplicate=False))  # one may have several names
        places = [
            (tensors, key, self._readers.get(f"{name}.{key}" if name else key, set()))
            for name, module in named.items()
            for tensors in (module._parameters, module._buffers)
            for key, value in tensors.items()
            if value is not None
        ]
        kept = {(id(tensors), key) for tensors, key, readers in places if self._own & readers}
        for tensors, key, _ in places:
            if (id(tensors), key) not in kept:
                tensors.pop(key, None)

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """Return the modules that one chunk of this rank alone computes."""
        return [one for name, one in self.model.named_modules() if name and self._users.get(name) == {chunk}]

    def check(self, named: Mapping[str, Any]) -> None:
        """Check arguments of the model against those that were traced.

        Raises:
            ValueError: they have other names, dtypes or shapes.
            RuntimeError: the model is in another mode than when it was traced, and computes otherwise there.
        """
        if self.model.training != self._is_training and self._has_modes:
            raise RuntimeError(
                "pipeline.trace: the trace holds the train mode, and this model computes otherwise in eval "
                "mode (dropout, batch statistics): evaluate it without a pipeline"
            )
        found = {name: form_of(value) for name, value in named.items()}
        if found != self._forms:
            raise ValueError(
                f"pipeline.trace: expected arguments as those that were traced, {self._forms}; got {found}"
            )

    def __call__(self, chunk: int, inputs: Sequence[Tensor], kwargs: Mapping[str, Any]) -> Any:
        """Compute a chunk.

        Args:
            chunk: one of the own chunks.
            inputs: the values that the chunk before hands on; () for the first one.
            kwargs: the arguments of the model.

        Returns:
            The values for the next chunk; of the last one, the output of the model.
        """
        return self.model(self._compute, chunk, inputs, kwargs)

    def _compute(self, chunk: int, inputs: Sequence[Tensor], named: Mapping[str, Any]) -> Any:
        received = self._boundaries[chunk - 1] if chunk else ()
        values: dict[Value, Tensor] = dict(zip(received, inputs, strict=True))
        stage = self._stages[chunk]
        args = [named[source] if isinstance(source, str) else values[source] for source in stage.sources]
        outputs = stage.graph(*args)
        made = outputs if isinstance(outputs, list | tuple) else (outputs,)
        if chunk == len(self._stages) - 1:
            return made[0]
        # An output may be a buffer, which the next micro-batch overwrites before this one is sent.
        made = [one.clone() if isinstance(one, Tensor) and not one.requires_grad else one for one in made]
        values |= {(chunk, place): value for place, value in enumerate(made)}
        return [values[key] for key in self._boundaries[chunk]]

    def _build(self, own: Collection[int]) -> None:
        tree, self._own = self.model, frozenset(own)
        tree._modules = {}
        kinds: dict[type, type] = {}
        computing: dict[str, nn.Module] = {}
        originals = dict(self._whole.named_modules(remove_duplicate=False))
        for chunk in sorted(self._own):
            for name, module in self._stages[chunk].graph.named_modules():
                if name in originals:
                    self._share(module, originals[name])
                    if name and self._users.get(name) == {chunk}:
                        kind = type(originals[name])
                        if type(module).__name__ != kind.__name__:  # units are chosen by names of classes
                            base = type(module)
                            module.__class__ = kinds.setdefault(kind, type(kind.__name__, (base,), {}))
                        computing[name] = module
        self._share(tree, self._whole)
        for name, original in originals.items():
            below = [*original.named_parameters(name, remove_duplicate=False), *original.named_buffers(name)]
            if not name or not any(self._own & self._readers.get(one, set()) for one, _ in below):
                continue  # no other chunk's module, nor one without a parameter or buffer of these chunks
            parent, _, attribute = name.rpartition(".")
            holder = tree.get_submodule(parent)
            if attribute in holder._modules:  # inside of a module that computes
                continue
            if (module := computing.get(name)) is None:  # nobody calls it
                # A list or dictionary: `units=` refuses one, as its forward is never called.
                base = nn.ModuleList if isinstance(original, nn.ModuleList) else nn.ModuleDict
                module = type(type(original).__name__, (base,), {})()
                self._share(module, original)
            holder._modules[attribute] = module

    def _share(self, module: nn.Module, original: nn.Module) -> None:
        constants = {k: v for k, v in module._buffers.items() if k not in original._buffers}
        vars(module).update(constants)  # of the trace, such as a tensor that the forward makes of numbers
        vars(module)["_parameters"], vars(module)["_buffers"] = original._parameters, original._buffers
        for key in original._non_persistent_buffers_set:
            module._non_persistent_buffers_set.add(key)
