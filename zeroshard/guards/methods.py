"""Methods of models that would take slices for parameters, or replace parameters: refused, with a remedy.

transformers and peft have such methods. A model of theirs may be the sharded model, or lie anywhere in it.
"""

from __future__ import annotations

from torch import nn

from zeroshard.forwards.methods import OnWholes
from zeroshard.forwards.quantized import has_codes
from zeroshard.sharding.runtime import Runtime

_REPLACE = ("resize_token_embeddings", "merge_and_unload", "unload", "delete_adapter")
_EDIT = ("merge_adapter", "unmerge_adapter")
_READ = ("save_pretrained", "push_to_hub")


def guard_methods(runtime: Runtime) -> None:
    """Refuse such methods of all models in a model, and merges of adapters into codes."""
    is_divided = runtime.context.axes.pp.size > 1
    edits = () if any(map(has_codes, runtime.module.modules())) else _EDIT  # layers with codes refuse theirs
    for path, module in runtime.module.named_modules():
        for name in (*_REPLACE, *edits, *_READ):
            if hasattr(type(module), name):  # peft hands on the methods of the model inside
                refusal = _describe(name, path, is_divided)
                runs = name in _EDIT or (name in _READ and not is_divided)
                runtime.changes.set(module, name, OnWholes(module, name, refusal, is_ever_right=runs))
        base = module._modules.get("base_layer")
        if isinstance(base, nn.Module) and has_codes(base):
            for name in ("merge", "unmerge"):
                refusal = _MERGE_INTO_CODES.format(name, path)
                runtime.changes.set(module, name, OnWholes(module, name, refusal, is_ever_right=False))


def _describe(name: str, path: str, is_divided: bool) -> str:
    call = f"{name}() of '{path}'" if path else f"{name}()"
    if name in _REPLACE:
        return (
            f"{call} would replace parameters of a sharded model: call it before initialize. For a sharded "
            f"model call engine.close() on all ranks, then {name}(), then initialize again"
        )
    remedy = f"call it under engine.unsharded({'write_back=True' if name in _EDIT else ''}) on all ranks"
    if name in _READ and is_divided:
        remedy = "save engine.full_state_dict(), which has the parameters of all pipeline ranks"
    if name in _READ and not path:
        remedy = f"{remedy}; or call save_pretrained() of the engine"
    return f"{call} of the sharded model sees only this rank's slices: {remedy}"


# peft adds an adapter to the dequantized weight, quantizes the sum, and assigns a new parameter with scales
# of its own. A sharded model keeps its parameters.
_MERGE_INTO_CODES = (
    "{}() of the adapter of '{}', whose weight holds codes, would put other codes and scales in its place: "
    "engine.save_pretrained(folder, merge_adapters=True) and "
    "engine.named_full_parameters(merge_adapters=True) give dequantized weights with adapters merged; or "
    "merge after engine.close()"
)
