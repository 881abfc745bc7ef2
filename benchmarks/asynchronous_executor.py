"""Lists of a pipeline in one process: the actions of all ranks, in the order of the simulator's timeline.

Each rank has a module of plain torch. Its parameters are views of one tensor, so that all weights change with
one copy: before each action they become those that the method names. Backwards read them there, since
autograd keeps the parameters and not their values. The formulas are those of the package, which the engine
uses as well; gathers, messages and shards are left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.optim.asynchronous import Corrected, rescaled, spike_compensated, update_of
from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule
from zeroshard.parallel.pipeline.asynchronous.ages import WEIGHTS, Ages, Use, count_live, kept_versions
from zeroshard.parallel.pipeline.asynchronous.method import decay_of_changes, mean_of_changes
from zeroshard.parallel.pipeline.simulate import ScheduleTimes, simulate
from zeroshard.parameters.sharded import set_gradients

LossFunction = Callable[[Tensor, Tensor], Tensor]
Make = Callable[[Sequence[Tensor]], Optimizer]
MicroBatch = Callable[[int], tuple[Tensor, Tensor]]
"""The inputs and the targets of a micro-batch of a list."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The weights of actions, and the correction of steps; see `config.Pipeline` for the fields."""

    weights: str = "latest"
    correction: str = "none"
    decay: float = 0.135
    anneal_steps: int | None = None


@dataclass(frozen=True)
class Delays:
    """A schedule with all that a rule reads from it; the engine has the same of one rank."""

    schedule: Schedule
    weights: str
    uses: dict[Action, Use] = field(init=False)
    kept: tuple[tuple[frozenset[int], ...], ...] = field(init=False)
    """For each rank and step, the older versions that are used behind it."""
    taus: tuple[tuple[int, ...], ...] = field(init=False)
    crossed: tuple[int, ...] = field(init=False)
    live: tuple[int, ...] = field(init=False)
    """The most versions that each rank holds at a time."""
    timeline: ScheduleTimes = field(init=False)
    """With the usual durations: a forward takes 1, a backward 2."""

    def __post_init__(self) -> None:
        ages, ranks = Ages(self.schedule), range(self.schedule.num_ranks)
        uses = WEIGHTS[self.weights](ages)
        kept = tuple(kept_versions(ages, rank, rank, uses) for rank in ranks)
        taus = tuple(tuple(ages.tau_of_step(rank, step) for step in range(len(kept[rank]))) for rank in ranks)
        found: dict[str, object] = {"uses": uses, "kept": kept, "taus": taus, "live": count_live(ages, uses)}
        found |= {"crossed": tuple(map(ages.most_crossed, ranks)), "timeline": simulate(self.schedule)}
        for name, value in found.items():
            object.__setattr__(self, name, value)


class Stage:
    """The module of one rank, with its optimizer and its versions.

    Args:
        module: the layers.
        make: makes the optimizer.
        rule: the method.
    """

    def __init__(self, module: nn.Module, make: Make, rule: Rule) -> None:
        self.module, self.rule = module, rule
        parameters = list(module.parameters())
        values = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.main, self._used = nn.Parameter(values.clone()), values
        self._gradient, start = torch.zeros_like(values), 0
        for parameter in parameters:
            place = slice(start, start := start + parameter.numel())
            parameter.data = values[place].view_as(parameter)
            parameter.grad = self._gradient[place].view_as(parameter)
        self.optimizer = make([self.main])
        needs_update = rule.weights in ("predict", "lwp")
        self._update = update_of(self.optimizer, rule.weights) if needs_update else None
        self.noted = torch.zeros_like(values) if rule.weights in ("estimate", "lwp-weights") else None
        """The mean of changes, or the last one: a state beside those of the optimizer."""
        self._corrected = self._find_correction()
        self._kept: dict[int, Tensor] = {}
        self._newest = self._backwards = 0
        self._loaded: Use | None = None
        self._graphs: dict[int, tuple[Tensor, Tensor]] = {}

    def _find_correction(self) -> Corrected | None:
        if self.rule.correction == "rescale":
            return rescaled(self.optimizer, self.rule.anneal_steps)
        return spike_compensated(self.optimizer) if self.rule.correction == "spike" else None

    def begin(self) -> None:
        """Begin a list: its versions are counted from 0."""
        self._kept, self._newest, self._loaded = {}, 0, None

    @torch.no_grad()
    def show(self, values: Tensor) -> None:
        """Let the module have some weights."""
        self._used.copy_(values)
        self._loaded = None

    @torch.no_grad()
    def _enter(self, use: Use) -> None:
        asked = Use(self._newest if use.version is None else use.version, use.ahead)
        if asked == self._loaded:
            return
        if not use.ahead:
            self.show(self.main if asked.version == self._newest else self._kept[asked.version])
        elif self._update is None:
            torch.add(self.main, self.noted, alpha=use.ahead, out=self._used)
        else:
            [group] = self.optimizer.param_groups
            state = self.optimizer.state.get(self.main, {})
            self._update(self.main.detach(), group, state, use.ahead, self._used)
        self._loaded = asked

    def forward(self, microbatch: int, use: Use, inputs: Tensor) -> Tensor:
        """Compute the output of a micro-batch."""
        self._enter(use)
        inputs = inputs.detach()
        output: Tensor = self.module(inputs.requires_grad_(inputs.is_floating_point()))
        self._graphs[microbatch] = inputs, output
        return output

    def finish(self, microbatch: int, loss: Tensor) -> None:
        """Let the backward of a micro-batch begin with its loss."""
        self._graphs[microbatch] = self._graphs[microbatch][0], loss

    def backward(self, microbatch: int, use: Use, gradient: Tensor | None) -> Tensor | None:
        """Compute the gradient of the weights; return that of the inputs."""
        self._enter(use)
        inputs, output = self._graphs.pop(microbatch)
        torch.autograd.backward(output, gradient)
        self._backwards += 1
        return inputs.grad

    @torch.no_grad()
    def step(self, kept: frozenset[int], tau: int, taken: int, crossed: int) -> None:
        """Take a step with the mean of the gradients since the last one.

        Args:
            kept: the versions that are used behind it.
            tau: the most steps since a forward whose gradient it applies.
            taken: the steps of training before it.
            crossed: the most steps that a micro-batch of this rank crosses.
        """
        self._kept = {version: values for version, values in self._kept.items() if version in kept}
        before = self.main.clone() if self._newest in kept or self.noted is not None else None
        if before is not None and self._newest in kept:
            self._kept[self._newest] = before
        set_gradients([(self.main, self._gradient.div_(self._backwards))])
        if self._corrected is None:
            self.optimizer.step()
        else:
            with self._corrected(tau, taken):
                self.optimizer.step()
        if before is not None and self.noted is not None and crossed:
            self._note(self.main - before, crossed)
        self._gradient.zero_()
        self._newest, self._backwards, self._loaded = self._newest + 1, 0, None

    def _note(self, change: Tensor, crossed: int) -> None:
        assert self.noted is not None, "asked by the caller"
        if self.rule.weights == "estimate":
            mean_of_changes(self.noted, change, decay_of_changes(self.rule.decay, crossed))
        else:
            self.noted.copy_(change)


class Shown(NamedTuple):
    """A moment at which all ranks have taken a number of steps; the modules have the weights of then."""

    steps: int
    time: float
    """Of the simulator, when the last rank had taken them."""


Look = Callable[[Shown], None]


class Log(NamedTuple):
    """The outcome of a list."""

    losses: list[float]
    """By micro-batch."""
    makespan: float


class Executor:
    """The ranks of a pipeline.

    Args:
        modules: the layers of each rank.
        make: makes the optimizer of a rank.
        rule: the method.
        loss_fn: (output, targets) -> loss.
    """

    def __init__(self, modules: Sequence[nn.Module], make: Make, rule: Rule, loss_fn: LossFunction) -> None:
        self.stages = [Stage(module, make, rule) for module in modules]
        self._loss_fn, self._taken = loss_fn, 0
        self._messages: dict[Action, Tensor | None] = {}
        self._losses: dict[int, float] = {}

    def run(
        self, delays: Delays, microbatch: MicroBatch, look_at: Collection[int] = (), look: Look | None = None
    ) -> Log:
        """Run the lists of all ranks.

        Args:
            delays: the schedule.
            microbatch: the samples.
            look_at: numbers of steps of this list, after which all modules are shown.
            look: is called with them.
        """
        timeline = delays.timeline
        steps = [0] * len(self.stages)
        seen: dict[int, list[Tensor]] = {number: [] for number in look_at}
        self._losses = {}
        for stage in self.stages:
            stage.begin()
        spans = ([(span, rank) for span in own] for rank, own in enumerate(timeline.spans))
        for (action, _, end), rank in heapq.merge(*spans, key=lambda one: one[0].start):
            if action.kind is not Kind.STEP:
                self._compute(rank, action, delays.uses[action], microbatch)
                continue
            number, steps[rank] = steps[rank], steps[rank] + 1
            kept, tau = delays.kept[rank][number], delays.taus[rank][number]
            self.stages[rank].step(kept, tau, self._taken + number, delays.crossed[rank])
            if (weights := seen.get(number + 1)) is not None:  # ranks take it from the last one to the first
                weights.insert(0, self.stages[rank].main.detach().clone())
                if look is not None and len(weights) == len(self.stages):
                    self._show(weights)
                    look(Shown(number + 1, end))
        self._taken += steps[0]
        self._show([stage.main for stage in self.stages])
        return Log([self._losses[number] for number in sorted(self._losses)], timeline.makespan)

    def _compute(self, rank: int, action: Action, use: Use, microbatch: MicroBatch) -> None:
        assert action.microbatch is not None, "a compute action"
        stage, arrived = self.stages[rank], self._messages.pop(action, None)
        if action.kind is Kind.BACKWARD:
            gradient = stage.backward(action.microbatch, use, arrived)
            if rank:
                self._messages[action._replace(chunk=rank - 1)] = gradient
            return
        inputs, targets = microbatch(action.microbatch)
        output = stage.forward(action.microbatch, use, inputs if arrived is None else arrived)
        if rank < len(self.stages) - 1:
            self._messages[action._replace(chunk=rank + 1)] = output
        else:
            loss = self._loss_fn(output, targets)
            self._losses[action.microbatch] = loss.item()
            stage.finish(action.microbatch, loss)

    def _show(self, weights: Sequence[Tensor]) -> None:
        for stage, values in zip(self.stages, weights, strict=True):
            stage.show(values)
