"""A checkpoint of the reference: copies of what docs/checkpoints.md says is in one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from tests.fuzz.reference import LossScale, Reference


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint brings back."""

    parameters: dict[str, Tensor]
    left_out: frozenset[str]
    """Frozen parameters that are compared only."""
    buffers: dict[str, Tensor]
    optimizer: SavedOptimizer | None
    scale: LossScale | None

    @classmethod
    @torch.no_grad()
    def of(cls, reference: Reference, *, optimizer: bool) -> Saved:
        """Copy it, with rank 0's buffers."""
        parameters = {name: reference.main[name].clone() for name in reference.sharded}
        frozen = {name for name in parameters if not reference.main[name].requires_grad}
        keeps_frozen = reference.config.get("checkpoint", {}).get("frozen", True)
        buffers = {name: buffer.clone() for name, buffer in _buffers(reference).items()}
        for buffer in buffers.values() if reference.size > 1 else ():
            dist.broadcast(buffer, 0)
        return cls(
            parameters=parameters,
            left_out=frozenset() if keeps_frozen else frozenset(frozen),
            buffers=buffers,
            optimizer=SavedOptimizer.of(reference) if optimizer else None,
            scale=reference.scale,
        )

    @torch.no_grad()
    def load(self, reference: Reference, *, optimizer: bool) -> bool:
        """Bring it back, or the model alone; False, and nothing changes, where frozen parameters differ."""
        if any(not torch.equal(self.parameters[name], reference.main[name]) for name in self.left_out):
            return False
        for name, values in self.parameters.items():
            reference.main[name].copy_(values)
        for name, buffer in _buffers(reference).items():
            buffer.copy_(self.buffers[name])
        if optimizer:
            reference.scale = self.scale
            if self.optimizer is not None:
                self.optimizer.load(reference)
        return True


@dataclass(frozen=True, kw_only=True)
class SavedOptimizer:
    """States of the sharded parameters, hyperparameters of the groups that hold some, and the LR schedule."""

    states: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    schedule: dict[str, Any]

    @classmethod
    def of(cls, reference: Reference) -> SavedOptimizer:
        optimizer = reference.optimizer
        held = {name: optimizer.state.get(reference.main[name], {}) for name in reference.sharded}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return cls(
            states=copy.deepcopy(held),
            groups=copy.deepcopy(groups),
            schedule=copy.deepcopy(reference.scheduler.state_dict()),
        )

    def load(self, reference: Reference) -> None:
        optimizer = reference.optimizer
        for name, states in self.states.items():
            optimizer.state.pop(reference.main[name], None)
            if states:
                optimizer.state[reference.main[name]] = copy.deepcopy(states)
        sharded = {reference.main[name] for name in reference.sharded}
        for group, saved in zip(optimizer.param_groups, self.groups, strict=True):
            if not sharded.isdisjoint(group["params"]):
                group.update(copy.deepcopy(saved))
        reference.scheduler.load_state_dict(copy.deepcopy(self.schedule))


def _buffers(reference: Reference) -> dict[str, Tensor]:
    """Those that are saved."""
    saved = reference.module.state_dict().keys()
    return {name: buffer for name, buffer in reference.module.named_buffers() if name in saved}
