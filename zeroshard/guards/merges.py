"""Merges of adapters into codes of a sharded model: refused, as they would replace codes and scales.

peft adds an adapter to the dequantized weight, quantizes the sum, and assigns a new parameter with scales of
its own. A sharded model keeps its parameters.
"""

from __future__ import annotations

import functools
from typing import Any, Never

from torch import nn

from zeroshard.forwards.quantized import has_codes
from zeroshard.sharding.runtime import Runtime


def guard_merges(runtime: Runtime) -> None:
    """Refuse `merge()` and `unmerge()` of the layers of peft around codes."""
    for name, layer in runtime.module.named_modules():
        base = layer._modules.get("base_layer")
        if isinstance(base, nn.Module) and has_codes(base):
            for method in ("merge", "unmerge"):
                runtime.changes.set(layer, method, functools.partial(_refuse, method, name))


def _refuse(method: str, name: str, *_: Any, **__: Any) -> Never:
    raise RuntimeError(
        f"{method}() of the adapter of '{name}', whose weight holds codes, would put other codes and scales "
        "in its place: engine.save_pretrained(folder, merge_adapters=True) and "
        "engine.named_full_parameters(merge_adapters=True) give dequantized weights with adapters merged; "
        "or merge after engine.close()"
    )
