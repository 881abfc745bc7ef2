"""Training as zeroshard is to do it, in plain PyTorch: a whole model on every rank.

Each rank has main parameters, which the optimizer holds, and a model in the compute dtype. The gradients
of all ranks, times 1/N, are added in rank order: inside a shard group in the reduce dtype's values and the
main dtype's precision, then over the groups. A parameter that no rank used gets no gradient. No buffer
here is flat, nothing is cut, and nothing runs beside anything else; so all bits must be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.fuzz.cases import Blocks, Case
from tests.fuzz.habits import halve
from tests.fuzz.models import prediction_of

Gradients = dict[str, Tensor]

MAX_NORM = 0.3
"""Of a loop that clips by itself."""


class Reference:
    """The calls of an engine that a case makes, on this rank's data."""

    def __init__(self, case: Case) -> None:
        self.case, self.size = case, dist.get_world_size()
        self.module = copy.deepcopy(case.model)
        self.parameters = dict(self.module.named_parameters())
        self._dtypes = {name: parameter.dtype for name, parameter in self.parameters.items()}
        self._begin()

    def _begin(self) -> None:
        case = self.case
        self.main = {name: self._main_of(p) for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = self.main[name].detach().to(case.compute_dtype or parameter.dtype, copy=True)
        self.optimizer = case.make_optimizer(list(self.main.values()), [p.dim() for p in self.main.values()])
        self.scheduler = case.make_scheduler(self.optimizer)
        self._waiting: Gradients = {}
        self._hooked: set[str] = set()
        """Parameters whose gradient has changed since hooks were called."""
        self._micro_step = 0
        self.grad_norm: Tensor | None = None

    def restart(self) -> None:
        """Go on with another engine over the same model, which gives all ranks rank 0's buffers."""
        for buffer in self.module.buffers() if self.size > 1 else ():
            dist.broadcast(buffer, 0)
        for name, parameter in self.parameters.items():
            parameter.data = self.main[name].detach().to(self._dtypes[name], copy=True)
        self._begin()

    def _main_of(self, parameter: nn.Parameter) -> nn.Parameter:
        given, precision = parameter.dtype, self.case.config["precision"]
        if parameter.requires_grad:
            dtype = precision.get("main_dtype") or torch.promote_types(given, torch.float32)
        else:
            dtype = self.case.compute_dtype or given
        return nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=parameter.requires_grad)

    def forward(self, inputs: Tensor, blocks: Blocks) -> Tensor:
        if self.case.compute_dtype and inputs.is_floating_point():
            inputs = inputs.to(self.case.compute_dtype)
        try:
            prediction = prediction_of(self.module(inputs, **blocks))
        finally:
            self._keep_edits()
        return prediction.to(self.case.config["precision"].get("output_dtype") or prediction.dtype)

    @torch.no_grad()
    def _keep_edits(self) -> None:
        """What a forward has edited, in the compute dtype, is so in the main parameters, and nothing else."""
        for name, parameter in self.parameters.items() if self.case.habits.edited else ():
            main = self.main[name]
            is_edited = parameter != main.to(parameter.dtype)
            main.copy_(torch.where(is_edited, parameter.to(main.dtype), main))

    def backward(self, loss: Tensor, *, unsynced: bool) -> None:
        config = self.case.config
        defers, is_last = unsynced, True
        if self.case.loop != "plain":
            num_micro_batches = config["gradient_accumulation_steps"]
            is_last = self._micro_step + 1 == num_micro_batches
            loss = loss / num_micro_batches if num_micro_batches > 1 else loss
            defers |= config["stage"] < 2 and not is_last
        loss.backward()
        self._keep_edits()  # of forwards that were run again
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.to(self.main[name].dtype)
                self._waiting[name] = self._waiting[name] + gradient if name in self._waiting else gradient
                parameter.grad = None
        if self.size == 1 or not defers:
            self._reduce()
        if is_last and not defers:
            self._call_hooks()

    def _call_hooks(self) -> None:
        """Call the post-accumulate hooks of gradients that no later micro-batch of the step adds to."""
        for name in self._hooked if self.case.habits.hooks else ():
            halve(self.main[name])
        self._hooked = set()

    def _reduce(self) -> None:
        everyone: list[Any] = [self._waiting]
        if self.size > 1:
            everyone = [None] * self.size
            dist.all_gather_object(everyone, self._waiting)
        self._waiting = {}
        for name, main in self.main.items():
            if any(name in one for one in everyone):
                parts = [one.get(name, torch.zeros_like(main)) for one in everyone]
                total = self._sum(name, parts)
                main.grad = total if main.grad is None else main.grad + total
                self._hooked.add(name)

    def _sum(self, name: str, parts: list[Tensor]) -> Tensor:
        config, main = self.case.config, self.main[name].dtype
        if self.size > 1:
            compute = self.parameters[name].dtype
            wire = config["precision"].get("reduce_dtype") or torch.promote_types(compute, torch.float32)
            parts = [(part * (1 / self.size)).to(wire).to(main) for part in parts]
        group = config.get("shard_group_size", self.size)
        return _add(_add(parts[start : start + group]) for start in range(0, self.size, group))

    def step(self) -> None:
        if self.case.loop != "plain":
            self._micro_step += 1
            if self._micro_step < self.case.config["gradient_accumulation_steps"]:
                return
        if self.pending:
            self._reduce()
        self._call_hooks()
        order, max_norm = self.case.habits.norm_type, self.case.config.get("clip_grad_norm")
        if order is not None:
            self._clip(MAX_NORM, order)
        elif max_norm is not None:
            self._clip(max_norm, 2.0)
        self.optimizer.step()
        self.scheduler.step()
        self._copy_back()
        self.optimizer.zero_grad(self.case.loop != "plain" or self.case.sets_to_none)
        self._micro_step = 0

    def _clip(self, max_norm: float, order: float) -> None:
        trained = [main for main in self.main.values() if main.grad is not None]
        norms = [torch.linalg.vector_norm(main.grad.double(), order) for main in trained if main.grad.numel()]
        total = torch.linalg.vector_norm(torch.stack([torch.zeros((), dtype=torch.float64), *norms]), order)
        self.grad_norm = total.float()
        nn.utils.clip_grads_with_norm_(trained, max_norm, self.grad_norm)

    def train_batch(self, inputs: Tensor, targets: Tensor, blocks: Blocks) -> Tensor:
        number, losses = self.case.num_micro_batches, []
        for part, target in zip(inputs.chunk(number), targets.chunk(number), strict=True):
            losses.append(mean_loss(self.forward(part, blocks), target))
            self.backward(losses[-1], unsynced=False)
            self.step()
        total = _add(loss.detach() for loss in losses) / number
        everyone = [torch.empty_like(total) for _ in range(self.size)]
        dist.all_gather(everyone, total)
        return _add(everyone) / self.size

    def forget(self) -> None:
        """zero_grad(), after a failure too."""
        self._waiting, self._micro_step, self._hooked = {}, 0, set()
        self.module.zero_grad()
        self.optimizer.zero_grad()

    def edit(self, number: int) -> None:
        edit(self.main, number)
        self._copy_back()

    @property
    def pending(self) -> bool:
        """Whether some gradients have not been reduced."""
        return bool(self._waiting)

    def names_with_gradient(self) -> list[str]:
        return [name for name, main in self.main.items() if main.grad is not None]

    def state(self) -> dict[str, Tensor]:
        """As engine.full_state_dict()."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        state = self.module.state_dict(keep_vars=True)
        for name, value in state.items():
            if value in names:
                main = self.main[names[value]]
                state[name] = main.detach().to(torch.promote_types(main.dtype, torch.float32))
        return state

    @torch.no_grad()
    def _copy_back(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.main[name])


def mean_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """0-dim float32."""
    return (prediction.float() - target).square().mean()


@torch.no_grad()
def edit(parameters: dict[str, nn.Parameter], number: int) -> None:
    """What somebody does with full parameters, the same on all ranks."""
    for position, parameter in enumerate(parameters.values()):
        if (position + number) % 3 == 0:
            parameter.mul_(0.5).add_(0.01)


def _add(parts: Iterable[Tensor]) -> Tensor:
    """From the left."""
    first, *others = parts
    for part in others:
        first = first + part
    return first
