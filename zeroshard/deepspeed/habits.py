"""The attributes and methods of DeepSpeed's engine, for scripts that were written for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object  # the class stands before nn.Module among the bases of the engine


class DeepSpeedNames(_Module):
    """Attributes and methods under DeepSpeed's names; other missing names are looked up in the model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("module")
            if module is None or name.startswith("__"):
                raise
        return getattr(module, name)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        device: torch.device = self._runtime.context.device
        return device

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node: LOCAL_RANK, which torchrun sets, else the device's index."""
        return int(os.environ.get("LOCAL_RANK", self.device.index or 0))

    @property
    def global_rank(self) -> int:
        """The number of this rank among all ranks."""
        rank: int = self._runtime.context.axes.world.rank
        return rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        size: int = self._runtime.context.axes.world.size
        return size

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that have different data: all but tensor and pipeline ranks of a batch."""
        size: int = self._runtime.context.axes.dp.size
        return size

    @property
    def global_steps(self) -> int:
        """`global_step`."""
        return self.global_step  # type: ignore[no-any-return]

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return `config.micro_batch_size`."""
        return self.config.micro_batch_size  # type: ignore[no-any-return]

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in a step; `set_gradient_accumulation_steps` changes it."""
        return self._num_micro_batches  # type: ignore[no-any-return]

    def train_batch_size(self) -> int:
        """Return the number of samples in an optimizer step over all ranks."""
        steps = self.gradient_accumulation_steps()
        return self.train_micro_batch_size_per_gpu() * steps * self.dp_world_size

    def gradient_clipping(self) -> float:
        """Return `config.clip_grad_norm`; 0.0 when gradients are not clipped."""
        return self.config.clip_grad_norm or 0.0

    def zero_optimization_stage(self) -> int:
        """Return `config.stage`."""
        return self.config.stage  # type: ignore[no-any-return]

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell, before `step()`, whether that call takes an optimizer step."""
        return self._is_at_boundary  # type: ignore[no-any-return]

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say, before `backward()`, whether the next `step()` takes an optimizer step.

        `backward()` divides the loss by the number of micro-batches of the config nevertheless, unless it is
        called with `scale_wrt_gas=False`.

        Args:
            is_boundary: True or False until the next call, the same on all ranks. None: micro-batches are
                counted again.

        Raises:
            ValueError: `is_boundary` is something else.
        """
        self._set_boundary(is_boundary)

    def get_global_grad_norm(self) -> float | None:
        """Return `grad_norm` as a number, for which the host waits; None before the first clipping."""
        return None if self.grad_norm is None else self.grad_norm.item()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]
