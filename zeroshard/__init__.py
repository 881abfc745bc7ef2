"""zeroshard: a ZeRO/FSDP memory-sharding training engine for PyTorch.

A public name is imported when it is used first. `zeroshard --help` then needs no torch, which takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard import optim
    from zeroshard.averages import EMA
    from zeroshard.config.pipeline import Pipeline
    from zeroshard.config.sections import Checkpoint, Config, Loader, Mesh, Offload, Precision
    from zeroshard.engine import Engine
    from zeroshard.entry import Initialized, initialize
    from zeroshard.hf.pretrained import from_pretrained
    from zeroshard.hf.quantize import quantize
    from zeroshard.lazy.recording import deferred_init
    from zeroshard.logs.steplog import StepLog
    from zeroshard.memory.estimate import Estimate, estimate
    from zeroshard.memory.report import CommReport, MemoryReport
    from zeroshard.parallel.tensor.losses import cross_entropy
    from zeroshard.profiling.profiler import Profile, profile
    from zeroshard.sharded import Sharded, shard

__all__ = [
    "EMA",
    "Checkpoint",
    "CommReport",
    "Config",
    "Engine",
    "Estimate",
    "Initialized",
    "Loader",
    "MemoryReport",
    "Mesh",
    "Offload",
    "Pipeline",
    "Precision",
    "Profile",
    "Sharded",
    "StepLog",
    "cross_entropy",
    "deferred_init",
    "estimate",
    "from_pretrained",
    "initialize",
    "optim",
    "profile",
    "quantize",
    "shard",
]

_SECTIONS = ("Checkpoint", "Config", "Loader", "Mesh", "Offload", "Precision")

_HOMES = {
    "EMA": "averages",
    "CommReport": "memory.report",
    **dict.fromkeys(_SECTIONS, "config.sections"),
    "Pipeline": "config.pipeline",
    "Engine": "engine",
    **dict.fromkeys(("Initialized", "initialize"), "entry"),
    "from_pretrained": "hf.pretrained",
    "quantize": "hf.quantize",
    "deferred_init": "lazy.recording",
    **dict.fromkeys(("Estimate", "estimate"), "memory.estimate"),
    "StepLog": "logs.steplog",
    "MemoryReport": "memory.report",
    "cross_entropy": "parallel.tensor.losses",
    "profile": "profiling.profiler",
    "Profile": "profiling.profiler",
    **dict.fromkeys(("Sharded", "shard"), "sharded"),
}
"""The module of each public name. A name must not be the name of a module, whose import would hide it."""


if not TYPE_CHECKING:  # to a type checker a name that is not imported above is an error

    def __getattr__(name: str) -> Any:
        """Import a public name (PEP 562)."""
        if name == "optim":
            return import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'zeroshard' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
