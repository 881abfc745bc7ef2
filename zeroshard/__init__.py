"""zeroshard: a ZeRO/FSDP memory-sharding training engine for PyTorch."""

from zeroshard import optim
from zeroshard.comm.counter import CommReport
from zeroshard.config import Checkpoint, Config, Mesh, Offload, Pipeline, Precision
from zeroshard.engine import Engine
from zeroshard.initialize import Initialized, initialize
from zeroshard.memory.estimate import Estimate, estimate
from zeroshard.memory.report import MemoryReport
from zeroshard.pretrained import from_pretrained
from zeroshard.sharding.recorder import deferred_init
from zeroshard.sharding.shard import shard

__all__ = [
    "Checkpoint",
    "CommReport",
    "Config",
    "Engine",
    "Estimate",
    "Initialized",
    "MemoryReport",
    "Mesh",
    "Offload",
    "Pipeline",
    "Precision",
    "deferred_init",
    "estimate",
    "from_pretrained",
    "initialize",
    "optim",
    "shard",
]
