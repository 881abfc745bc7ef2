"""Adapters of peft, written by peft itself from gathered parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.files import as_folder, make_folder
from zeroshard.comm.agreed import on_all, on_first
from zeroshard.full.parts import Named, collect
from zeroshard.hf.format import Format
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.wholes import gather_wholes

_Written = dict[str, dict[str, list[str]]]
"""By adapter and name in its file, all names of the tensor in the model's state_dict()."""


def has_adapters(module: Any) -> bool:
    """True if peft has put adapters into a model."""
    return bool(getattr(module, "peft_config", None))


def export_adapters(runtime: Runtime, dir: object, how: Format) -> None:
    """Write the adapters of the model that is being trained; collective. Rank 0 writes and holds them whole.

    Args:
        runtime: of the model.
        dir: the folder, as rank 0 was given it.
        how: dtype of the adapters in the files.

    Raises:
        ValueError: `dir` is no path; adapters are computed from parameters.
        RuntimeError: rank 0 could not write, on all ranks.
    """
    runtime.settle()
    runtime.require_slices("save_pretrained()")
    axes = runtime.context.axes
    module: Any = runtime.module
    folder = on_first(axes.world, "start of an export", lambda: make_folder(as_folder(dir)))
    is_asked = axes.everyone.rank == 0
    answers = on_all(axes.world, "start of an export", lambda: _select(module) if is_asked else None)
    parts = [answer for answer in answers if answer is not None]
    whole = _join(module, parts)
    own, before = _names_in(parts[axes.pp.rank : axes.pp.rank + 1]), _names_in(parts[: axes.pp.rank])
    pieces = collect(axes, _gather(runtime, own - before, how.dtype))
    firsts = {name: values.cpu().contiguous() for name, values in pieces}
    every = [known for part in parts for names in part.values() for known in names.values()]
    adapters = {name: firsts[known[0]] for known in every for name in known if known[0] in firsts}

    def write() -> None:
        module.save_pretrained(str(folder), state_dict=adapters)
        for adapter, names in whole.items() if len(parts) > 1 else ():
            _complete(module, adapter, names, adapters, folder)
        how.save_tokenizer(folder)

    on_first(axes.world, "end of an export", write)


def _select(module: Any) -> _Written:
    """Return the names of the tensors that peft writes."""
    from peft import get_peft_model_state_dict

    state = module.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    selected: _Written = {}
    for adapter, config in module.peft_config.items():
        if config.is_prompt_learning:
            raise _computed(module, adapter)
        written = get_peft_model_state_dict(module, dict(state), adapter)
        if not all(id(value) in names for value in written.values()):
            raise _computed(module, adapter)
        selected[adapter] = {name: names[id(value)] for name, value in written.items()}
    return selected


def _join(module: Any, parts: Sequence[_Written]) -> _Written:
    """Return the names in all parts of the model."""
    whole: _Written = {adapter: {} for adapter in module.peft_config}
    for adapter, names in whole.items():
        for part in parts:
            names.update(part[adapter])
        if not names:
            raise _computed(module, adapter)
    return whole


def _names_in(parts: Sequence[_Written]) -> set[str]:
    """Return the first names in the model's state_dict() of the tensors that some parts have."""
    return {known[0] for part in parts for names in part.values() for known in names.values()}


def _computed(module: Any, adapter: str) -> ValueError:
    return ValueError(
        f"adapter '{adapter}' ({module.peft_config[adapter].peft_type.value}) is computed from parameters: "
        "call module.save_pretrained() inside engine.unsharded()"
    )


def _gather(runtime: Runtime, wanted: Collection[str], dtype: torch.dtype | None) -> Iterator[Named]:
    """Yield full tensors by their names in state_dict(), on the first rank of a part; nothing on others."""
    state = runtime.module.state_dict(keep_vars=True)
    names = {id(state[name]): name for name in wanted}
    axes = runtime.context.axes
    is_first = axes.everyone.rank == 0
    sharded_ones = set(map(id, runtime.parameters))
    for number, name in names.items() if is_first else ():
        if number not in sharded_ones:
            yield Named(name, state[name].detach())
    for buffer in runtime.buffers:
        if names.keys().isdisjoint(map(id, buffer.sharded)):
            continue
        views = gather_wholes(buffer, axes.tp)
        for sharded, view in zip(buffer.sharded, views if is_first else (), strict=is_first):
            if (own := names.get(id(sharded))) is not None:
                yield Named(own, view.to("cpu", dtype or view.dtype, copy=True))


def _complete(
    module: Any, adapter: str, names: Mapping[str, list[str]], tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Write the file of an adapter again if peft has left tensors out: it looks for some modules by class.

    Raises:
        ValueError: peft has not wrapped the model, so that its file has other names.
    """
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors.torch import save_file

    written = get_peft_model_state_dict(module, dict(tensors), adapter)
    missing = sorted(names.keys() - written.keys())
    if not missing:
        return
    if not hasattr(module, "get_base_model"):
        raise ValueError(
            f"adapter '{adapter}': expected a model that peft.get_peft_model has wrapped, as other pipeline "
            f"ranks hold its '{missing[0]}', got a {type(module).__name__}"
        )
    place = folder if adapter == "default" else folder / adapter
    whole = {name: tensors[known[0]].contiguous() for name, known in names.items()}
    save_file(whole, place / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
