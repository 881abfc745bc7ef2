"""Adapters of peft, written by peft itself from gathered parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.agreed import on_first
from zeroshard.checkpoint.files import as_folder
from zeroshard.hf.format import Format
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.wholes import gather_wholes


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
    axis = runtime.context.axes.everyone
    module: Any = runtime.module
    folder = on_first(axis, "start of an export", lambda: as_folder(dir))
    wanted = on_first(axis, "start of an export", lambda: _select(module))
    adapters = _gather(runtime, wanted, how.dtype)

    def write() -> None:
        module.save_pretrained(str(folder), state_dict=adapters)
        how.save_tokenizer(folder)

    on_first(axis, "end of an export", write)


def _select(module: Any) -> list[str]:
    """Return the names, in the model's state_dict(), of the tensors that peft writes."""
    from peft import get_peft_model_state_dict

    state = module.state_dict(keep_vars=True)
    names = {id(value): name for name, value in state.items()}
    selected: set[str] = set()
    for adapter, config in module.peft_config.items():
        written = () if config.is_prompt_learning else get_peft_model_state_dict(module, dict(state), adapter)
        if not written or not all(id(value) in names for value in written.values()):
            raise ValueError(
                f"adapter '{adapter}' ({config.peft_type.value}) is computed from parameters: call "
                "module.save_pretrained() inside engine.unsharded()"
            )
        selected |= {names[id(value)] for value in written.values()}
    return sorted(selected)


def _gather(runtime: Runtime, wanted: list[str], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return full tensors by their names in state_dict(), on rank 0; {} on other ranks."""
    state = runtime.module.state_dict(keep_vars=True)
    names = {id(state[name]): name for name in wanted}
    axes = runtime.context.axes
    is_first = axes.everyone.rank == 0
    tensors = {name: state[name].detach().cpu() for name in wanted} if is_first else {}
    for buffer in runtime.buffers:
        if names.keys().isdisjoint(map(id, buffer.sharded)):
            continue
        views = gather_wholes(buffer, axes.tp)
        for sharded, view in zip(buffer.sharded, views if is_first else (), strict=is_first):
            if (name := names.get(id(sharded))) is not None:
                tensors[name] = view.to("cpu", dtype or view.dtype, copy=True)
    return tensors
