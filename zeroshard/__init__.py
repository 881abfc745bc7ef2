"""zeroshard: a ZeRO/FSDP memory-sharding training engine for PyTorch."""

from zeroshard import data, optim
from zeroshard.comm.counter import CommReport
from zeroshard.config.sections import Checkpoint, Config, Loader, Mesh, Offload, Pipeline, Precision
from zeroshard.engine import Engine
from zeroshard.hf.pretrained import from_pretrained
from zeroshard.initialize import Initialized, initialize
from zeroshard.lazy.recorder import deferred_init
from zeroshard.memory.estimate import Estimate, estimate
from zeroshard.memory.report import MemoryReport
from zeroshard.sharded import Sharded, shard

__all__ = [
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
    "Sharded",
    "data",
    "deferred_init",
    "estimate",
    "from_pretrained",
    "initialize",
    "optim",
    "shard",
]
