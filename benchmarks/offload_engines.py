"""The engines of `offload.py`: zeroshard without offload, with each tier, and DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engines import Setting, Step, adamw, zeroshard_step
from model import GPT, next_token_loss

BASE = "none"
"""The engine that the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A setting of zeroshard."""

    offload: dict[str, Any]
    """`Config.offload`, without nvme_path."""
    is_8bit: bool = False
    """True for `AdamW8bit`."""
    main_dtype: str | None = None
    """`Config.precision.main_dtype`."""

    @property
    def uses_files(self) -> bool:
        """True if values lie in files."""
        return "nvme" in self.offload.values()


def _tiers() -> dict[str, Tier]:
    """The settings by name; a device that computes on the host has no other tier of parameters."""
    cpu, nvme = {"optimizer": "cpu"}, {"optimizer": "nvme"}
    early, all_nvme = {"step_in_backward": True}, {"parameters": "nvme"}
    tiers = {
        BASE: Tier(offload={}),
        "cpu": Tier(offload=cpu),
        "cpu-parameters": Tier(offload=cpu | {"parameters": "cpu"}),
        "cpu-early": Tier(offload=cpu | early),
        "cpu-8bit-bf16": Tier(offload=cpu, is_8bit=True, main_dtype="bf16"),
        "cpu-8bit-bf16-early": Tier(offload=cpu | early, is_8bit=True, main_dtype="bf16"),
    }
    for kind, rest in {
        "": {},
        "-8bit": {"is_8bit": True},
        "-8bit-bf16": {"is_8bit": True, "main_dtype": "bf16"},
    }.items():
        tiers[f"nvme{kind}"] = Tier(offload=nvme, **rest)
        tiers[f"nvme{kind}-early"] = Tier(offload=nvme | early, **rest)
    tiers["nvme-parameters"] = Tier(offload=nvme | all_nvme)
    tiers["nvme-parameters-early"] = Tier(offload=nvme | all_nvme | early)
    return tiers


TIERS = _tiers()


def build_tier(setting: Setting, folder: Path, *, name: str) -> tuple[Step, Any]:
    """Build an engine of zeroshard at stage 3; return its training step and the engine."""
    import zeroshard as zs

    tier, model = TIERS[name], setting.model()
    offload = tier.offload | ({"nvme_path": str(folder)} if tier.uses_files else {})
    precision = {"param_dtype": "bf16" if setting.bf16 else None, "main_dtype": tier.main_dtype}
    optimizer = zs.optim.AdamW8bit(model.parameters(), lr=3e-4) if tier.is_8bit else adamw(model.parameters())
    config = {"stage": 3, "offload": offload, "precision": precision}
    engine = zs.initialize(model, optimizer, config).engine
    return zeroshard_step(engine), engine


def _deepspeed_zero(model: GPT, folder: Path, *, tier: str, pinned: bool) -> dict[str, Any]:
    """The section "zero_optimization" of DeepSpeed; buffers fit the model as ours do.

    With DeepSpeed's own sizes, made for billions of parameters, "nvme" would be host memory: up to 1e9
    parameters stay there, and all states are one group that is read, stepped and written as a whole.
    """
    # By default it puts its own function in the place of F.linear, for all engines of the process.
    zero: dict[str, Any] = {"stage": 3, "memory_efficient_linear": False}
    if tier == "cpu":
        return zero | {"offload_optimizer": {"device": "cpu", "pin_memory": pinned}}
    num_ranks = dist.get_world_size()
    block = sum(p.numel() for p in model.blocks[0].parameters()) // num_ranks
    place = {"device": "nvme", "nvme_path": str(folder), "pin_memory": True}
    # Parameter, gradient and two states of a group each: one is read, one is stepped, one is written.
    pipeline = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
    zero |= {"offload_optimizer": place | pipeline, "sub_group_size": block}
    if tier == "nvme-parameters":
        largest = max(p.numel() for p in model.parameters()) // num_ranks
        zero["offload_param"] = place | {"max_in_cpu": 0, "buffer_count": 32, "buffer_size": largest}
        # Each gathered weight holds a buffer, so none is kept for its backward. No prefetch: that of
        # DeepSpeed 0.19.8 asks for weights that have a buffer already, and fails.
        whole = block * num_ranks
        zero |= {"stage3_max_live_parameters": 3 * whole, "stage3_max_reuse_distance": 0}
        zero |= {"stage3_prefetch_bucket_size": 0}
    return zero


def _deepspeed(setting: Setting, folder: Path, *, tier: str) -> tuple[Step, Any]:
    """DeepSpeed with its own CPU Adam: ZeRO-Offload ("cpu") or ZeRO-Infinity (the others)."""
    if setting.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
    import deepspeed as ds

    model = setting.model()
    zero = _deepspeed_zero(model, folder, tier=tier, pinned=setting.device.type == "cuda")
    config = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "gradient_clipping": 0.0,  # its default is 1.0; the others do not clip
        "bf16": {"enabled": setting.bf16},
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
        "steps_per_print": 10**9,
    }
    if "offload_param" in zero:  # by `initialize` parameters become bf16 where float16 is not supported
        ds.zero.Init(model, config_dict_or_path=config, remote_device="nvme", pin_memory=True)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(engine(tokens[:, :-1]), tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, None


Build = Callable[[Setting, Path], tuple[Step, Any]]

ENGINES: dict[str, Build] = {
    **{name: partial(build_tier, name=name) for name in TIERS},
    "deepspeed-cpu": partial(_deepspeed, tier="cpu"),
    "deepspeed-nvme": partial(_deepspeed, tier="nvme"),
    "deepspeed-nvme-parameters": partial(_deepspeed, tier="nvme-parameters"),
}
