"""zeroshard: a ZeRO/FSDP memory-sharding training engine for PyTorch.

A public name is imported when it is used first. `zeroshard --help` then needs no torch, which takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard import optim as optim
    from zeroshard.averages import EMA as EMA
    from zeroshard.config.pipeline import Pipeline as Pipeline
    from zeroshard.config.sections import Checkpoint as Checkpoint
    from zeroshard.config.sections import Config as Config
    from zeroshard.config.sections import Loader as Loader
    from zeroshard.config.sections import Loss as Loss
    from zeroshard.config.sections import Mesh as Mesh
    from zeroshard.config.sections import Mlp as Mlp
    from zeroshard.config.sections import Offload as Offload
    from zeroshard.config.sections import Precision as Precision
    from zeroshard.engine import Engine as Engine
    from zeroshard.entry import Initialized as Initialized
    from zeroshard.entry import initialize as initialize
    from zeroshard.hf.pretrained import from_pretrained as from_pretrained
    from zeroshard.hf.quantize import quantize as quantize
    from zeroshard.lazy.recording import deferred_init as deferred_init
    from zeroshard.logs.steplog import StepLog as StepLog
    from zeroshard.memory.estimate import Estimate as Estimate
    from zeroshard.memory.estimate import estimate as estimate
    from zeroshard.memory.report import CommReport as CommReport
    from zeroshard.memory.report import MemoryReport as MemoryReport
    from zeroshard.outer import OuterStep as OuterStep
    from zeroshard.parallel.tensor.losses import cross_entropy as cross_entropy
    from zeroshard.parallel.tensor.losses import tiled_cross_entropy as tiled_cross_entropy
    from zeroshard.profiling.profiler import Profile as Profile
    from zeroshard.profiling.profiler import profile as profile
    from zeroshard.sharded import Sharded as Sharded
    from zeroshard.sharded import shard as shard

_MODULES = {
    "averages": ("EMA",),
    "config.pipeline": ("Pipeline",),
    "config.sections": ("Checkpoint", "Config", "Loader", "Loss", "Mesh", "Mlp", "Offload", "Precision"),
    "engine": ("Engine",),
    "entry": ("Initialized", "initialize"),
    "hf.pretrained": ("from_pretrained",),
    "hf.quantize": ("quantize",),
    "lazy.recording": ("deferred_init",),
    "logs.steplog": ("StepLog",),
    "memory.estimate": ("Estimate", "estimate"),
    "memory.report": ("CommReport", "MemoryReport"),
    "outer": ("OuterStep",),
    "parallel.tensor.losses": ("cross_entropy", "tiled_cross_entropy"),
    "profiling.profiler": ("Profile", "profile"),
    "sharded": ("Sharded", "shard"),
}
"""The public names by module. A name must not be the name of a module, whose import would hide it."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted((*_HOMES, "optim"))


if not TYPE_CHECKING:  # to a type checker a name that is not imported above is an error

    def __getattr__(name: str) -> Any:
        """Import a public name (PEP 562)."""
        if name == "optim":
            return import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'zeroshard' has no attribute {name!r}")
        if name != "estimate":  # which needs torch for a model alone; configs have its dtypes
            import_module("torch")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
