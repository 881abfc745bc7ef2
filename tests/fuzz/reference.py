"""Training as zeroshard is to do it, in plain PyTorch: a whole model on every rank.

Each rank has main parameters, which the optimizer holds, and a model in the compute dtype. The gradients
of all ranks, times 1/N, are added in rank order: inside a shard group in the reduce dtype's values and the
main dtype's precision, then over the groups. A parameter that no rank used gets no gradient. Ignored
parameters are the model's own, on each rank others. No buffer here is flat, nothing is cut, and nothing runs
beside anything else; so all bits must be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.fuzz import place
from tests.fuzz.cases import Blocks, Case, restaged
from tests.fuzz.habits import halve
from tests.fuzz.models import prediction_of
from tests.fuzz.overrides import compute_dtypes, wrap
from tests.fuzz.saved import Saved
from zeroshard.optim.eightbit.blocks import QuantizedState, codebook

Gradients = dict[str, Tensor]

MAX_NORM = 0.3
"""Of a loop that clips by itself."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Of float16: halved by overflows from the `hysteresis`-th on, doubled after `window` steps without."""

    start: float
    window: int
    minimum: float
    hysteresis: int
    value: float
    num_steps: int = 0
    num_spared: int = 0

    def after(self, *, overflow: bool) -> LossScale:
        """That of the next step."""
        if not overflow and self.num_steps + 1 == self.window:
            return replace(self, value=self.value * 2, num_steps=0, num_spared=0)
        if not overflow:
            return replace(self, num_steps=self.num_steps + 1)
        if self.num_spared + 1 < self.hysteresis:
            return replace(self, num_steps=0, num_spared=self.num_spared + 1)
        return replace(self, num_steps=0, value=max(self.value / 2, self.minimum))


class Reference:
    """The calls of an engine that a case makes, on this rank's data."""

    def __init__(self, case: Case) -> None:
        self.case, self.size, self.config = case, dist.get_world_size() // case.tp, case.config
        self.module = copy.deepcopy(case.model).to(place.device())
        wrap(self.module, case.overrides, case.compute_dtype)
        self.parameters = dict(self.module.named_parameters())
        ignored = find_ignored(self.module, case.config)
        differ(ignored.values(), case.data_rank)
        self.ignored = frozenset(ignored)
        self.sharded = [name for name in self.parameters if name not in self.ignored]
        self.checkpoint: Saved | None = None
        self._dtypes = {name: parameter.dtype for name, parameter in self.parameters.items()}
        self._begin()

    def _begin(self) -> None:
        case = self.case
        self.main = {n: p if n in self.ignored else self._main_of(p) for n, p in self.parameters.items()}
        for name in self.sharded:
            parameter = self.parameters[name]
            parameter.data = self.main[name].detach().to(self._compute_dtype(parameter), copy=True)
        self.optimizer = case.make_optimizer(list(self.main.values()), [p.dim() for p in self.main.values()])
        self.scheduler = case.make_scheduler(self.optimizer)
        self._waiting: Gradients = {}
        self._hooked: set[str] = set()
        """Parameters whose gradient has changed since hooks were called."""
        self._micro_step = 0
        self.grad_norm: Tensor | None = None
        self.num_micro_batches = self.config.get("gradient_accumulation_steps", 1)
        policy = self.config["precision"].get("loss_scale")
        self.scale = None if policy is None else LossScale(**policy, value=policy["start"])
        for name in self.ignored if case.habits.hooks else ():
            if self.parameters[name].requires_grad:
                self.parameters[name].register_post_accumulate_grad_hook(halve)

    def restart(self, stage: int) -> None:
        """Go on with another engine over the same model, which gives all ranks rank 0's buffers."""
        for buffer in self.module.buffers() if self.size > 1 else ():
            dist.broadcast(buffer, 0)
        for name in self.sharded:
            self.parameters[name].data = self.main[name].detach().to(self._dtypes[name], copy=True)
        self.config = restaged(self.config, stage)
        self._begin()

    def end(self) -> None:
        """Nothing is open."""

    def train(self, mode: bool) -> None:
        self.module.train(mode)

    def set_num_micro_batches(self, number: int) -> None:
        self.num_micro_batches = number

    def _main_of(self, parameter: nn.Parameter) -> nn.Parameter:
        given, precision = parameter.dtype, self.case.config["precision"]
        if parameter.requires_grad:
            dtype = precision.get("main_dtype") or torch.promote_types(given, torch.float32)
        else:
            dtype = self._compute_dtype(parameter)
        return nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=parameter.requires_grad)

    def _compute_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        overridden = compute_dtypes(self.module, self.case.overrides)
        return overridden.get(parameter) or self.case.compute_dtype or parameter.dtype

    def forward(self, inputs: Tensor, blocks: Blocks) -> Tensor:
        if self.case.compute_dtype and inputs.is_floating_point():
            inputs = inputs.to(self.case.compute_dtype)
        prediction = prediction_of(self.module(inputs, **blocks))
        return prediction.to(self.case.config["precision"].get("output_dtype") or prediction.dtype)

    def backward(self, loss: Tensor, *, unsynced: bool) -> None:
        defers, is_last = unsynced, True
        if self.scale is not None:
            loss = loss * self.scale.value
        if self.case.loop != "plain":
            is_last = self._micro_step + 1 == self.num_micro_batches
            loss = loss / self.num_micro_batches if self.num_micro_batches > 1 else loss
            defers |= self.config["stage"] < 2 and not is_last
        loss.backward()
        for name in self.sharded:
            parameter = self.parameters[name]
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
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, self._waiting)
            everyone = everyone[:: self.case.tp]
        self._waiting = {}
        for name, main in self.main.items():
            if any(name in one for one in everyone):
                parts = [one.get(name, torch.zeros_like(main)) for one in everyone]
                total = self._sum(name, parts)
                main.grad = total if main.grad is None else main.grad + total
                self._hooked.add(name)

    def _sum(self, name: str, parts: list[Tensor]) -> Tensor:
        config, main = self.config, self.main[name].dtype
        if self.size > 1:
            compute = self.parameters[name].dtype
            wire = config["precision"].get("reduce_dtype") or torch.promote_types(compute, torch.float32)
            parts = [(part * (1 / self.size)).to(wire).to(main) for part in parts]
        group = config.get("shard_group_size", self.size)
        total = _add(_add(parts[start : start + group]) for start in range(0, self.size, group))
        return total if self.scale is None else total * (1 / self.scale.value)

    def step(self) -> None:
        if self.case.loop != "plain":
            self._micro_step += 1
            if self._micro_step < self.num_micro_batches:
                return
        self._make_ready()
        order, max_norm = self.case.habits.norm_type, self.config.get("clip_grad_norm")
        if order is not None:
            self._clip(MAX_NORM, order)
        elif max_norm is not None:
            self._clip(max_norm, 2.0)
        is_taken = self.scale is None or self._is_finite
        if is_taken:
            self.optimizer.step()
            self.scheduler.step()
            self._copy_back()
        if self.scale is not None:
            self.scale = self.scale.after(overflow=not is_taken)
        self.optimizer.zero_grad(self.case.loop != "plain" or self.case.sets_to_none)
        self._micro_step = 0

    def _make_ready(self) -> None:
        if self._waiting:
            self._reduce()
        self._call_hooks()

    @property
    def _is_finite(self) -> bool:
        """Whether all gradients are; the same on all ranks."""
        return all(bool(main.grad.isfinite().all()) for main in self.main.values() if main.grad is not None)

    def _clip(self, max_norm: float, order: float) -> None:
        trained = [self.main[name] for name in self.sharded if self.main[name].grad is not None]
        norms = [torch.linalg.vector_norm(main.grad.double(), order) for main in trained if main.grad.numel()]
        none = torch.zeros((), dtype=torch.float64, device=place.device())
        total = torch.linalg.vector_norm(torch.stack([none, *norms]), order)
        self.grad_norm = total.float()
        nn.utils.clip_grads_with_norm_(trained, max_norm, self.grad_norm)

    def train_batch(self, inputs: Tensor, targets: Tensor, blocks: Blocks) -> Tensor:
        number, losses = self.num_micro_batches, []
        for part, target in zip(inputs.chunk(number), targets.chunk(number), strict=True):
            losses.append(mean_loss(self.forward(part, blocks), target))
            self.backward(losses[-1], unsynced=False)
            self.step()
        total = _add(loss.detach() for loss in losses) / number
        everyone = [torch.empty_like(total) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, total)
        return _add(everyone[:: self.case.tp]) / self.size

    def drop_gradients(self) -> None:
        """zero_grad(), after a failure too."""
        self._waiting, self._micro_step, self._hooked = {}, 0, set()
        self.module.zero_grad()
        self.optimizer.zero_grad()

    def edit(self, number: int) -> None:
        edit(self.main, number)
        self._copy_back()

    def names_with_gradient(self) -> list[str]:
        """The names; refused where a sharded one lacks gradients of later micro-batches, which wait."""
        names = [name for name, main in self.main.items() if main.grad is not None]
        return ["refused"] if self._waiting and not self.ignored.issuperset(names) else names

    def state(self) -> dict[str, Tensor]:
        """As engine.full_state_dict()."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        state = self.module.state_dict(keep_vars=True)
        for name, value in state.items():
            if value in names and names[value] in self.sharded:
                state[name] = _wide(self.main[names[value]])
        return state

    @property
    def loss_scale(self) -> float | None:
        return None if self.scale is None else self.scale.value

    def own(self) -> dict[str, Tensor]:
        """The ignored parameters of this rank."""
        return {name: self.main[name].detach() for name in sorted(self.ignored)}

    # -- checkpoints --------------------------------------------------------------------------------------

    def save(self, *, optimizer: bool, blocking: bool) -> None:
        self.checkpoint = Saved.of(self, optimizer=optimizer)

    def load(self, *, optimizer: bool) -> bool:
        assert self.checkpoint is not None, "a case saves first"
        is_loaded = self.checkpoint.load(self, optimizer=optimizer)
        if is_loaded:
            self._copy_back()
            self.drop_gradients()
        return is_loaded

    # -- by name ------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Of the sharded parameters, the tied ones with all of theirs."""
        sharded = {self.parameters[name] for name in self.sharded}
        return [n for n, p in self.module.named_parameters(remove_duplicate=False) if p in sharded]

    def _main(self, name: str) -> nn.Parameter:
        mains = {self.parameters[first]: main for first, main in self.main.items()}
        return mains[self.module.get_parameter(name)]

    def shape_of(self, name: str) -> torch.Size:
        return self._main(name).shape

    def is_trained(self, name: str) -> bool:
        return self._main(name).requires_grad

    def full_parameter(self, name: str) -> Tensor:
        return _wide(self._main(name))

    def full_gradient(self, name: str) -> Tensor | None:
        self._make_ready()
        gradient = self._main(name).grad
        return None if gradient is None else _wide(gradient)

    def full_optimizer_state(self, name: str) -> dict[str, Any]:
        main = self._main(name)
        states, found = self.optimizer.state.get(main, {}), {}
        for key, value in states.items():
            if key == "step" or not isinstance(value, Tensor):
                found[key] = copy.deepcopy(value)
            elif value.dtype == torch.uint8:
                found[key] = _quantized(states, key).load().view(main.shape)
            elif not key.endswith("_absmax"):
                found[key] = _wide(value).view(main.shape)
        return found

    @torch.no_grad()
    def set_full_parameter(self, name: str, values: Tensor) -> None:
        self._main(name).copy_(values)
        self._copy_back()

    def set_full_gradient(self, name: str, values: Tensor) -> None:
        self._make_ready()
        main = self._main(name)
        main.grad = values.to(main.device, main.dtype, copy=True)

    @torch.no_grad()
    def set_full_optimizer_state(self, name: str, values: Mapping[str, Any]) -> None:
        states = self.optimizer.state.get(self._main(name), {})
        for key, value in values.items():
            if not isinstance(states[key], Tensor):
                states[key] = value
            elif states[key].dtype == torch.uint8:
                _quantized(states, key).store(value.flatten().to(states[key].device))
            else:
                states[key].copy_(value.view(states[key].shape))

    def record(self, tracer: str) -> None:
        """Refused by an engine, so nothing is done."""

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


def find_ignored(module: nn.Module, config: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """The parameters that a config ignores, by their first name."""
    fits = {
        parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if any(fnmatchcase(name, pattern) for pattern in config.get("ignored", ()))
    }
    return {name: parameter for name, parameter in module.named_parameters() if parameter in fits}


@torch.no_grad()
def differ(parameters: Iterable[nn.Parameter], rank: int) -> None:
    """Give a rank other values than the others have."""
    for parameter in parameters:
        parameter.add_(0.0625 * rank)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


def _quantized(states: Mapping[str, Any], key: str) -> QuantizedState:
    book = codebook(key != "exp_avg_sq", states[key].device)
    return QuantizedState(states[key].view(-1), states[f"{key}_absmax"], book)


def _add(parts: Iterable[Tensor]) -> Tensor:
    """From the left."""
    first, *others = parts
    for part in others:
        first = first + part
    return first
