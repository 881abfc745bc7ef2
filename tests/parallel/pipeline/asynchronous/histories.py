"""Asynchronous training in one process, by lists that are made here, timed and run action by action.

With data-parallel ranks, synchronous steps, any micro-batches a step and any optimizer. Nothing is shared
with the package. An action of a list is (kind, micro-batch): "F" a forward, "B" a backward, "S" a step behind
the backward of that micro-batch.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True)
class Method:
    """The keys of a method; see the config of a pipeline."""

    weights: str
    per_step: int
    correction: str = "none"
    anneal_steps: int | None = None
    decay: float = 0.135
    synchronous_steps: int = 0


# ---------------------------------------------------------------------------------------------- lists


def lists_of(num_stages, num, per_step, synchronous):
    """The list of each stage: `synchronous` steps with a drain each, then one list of all that is left."""
    bounds = [min(step * per_step, num) for step in range(synchronous + 1)]
    spans = [(start, end) for start, end in zip(bounds, [*bounds[1:], num], strict=True) if start < end]
    return [
        [one for span in spans for one in _between(num_stages - 1 - s, *span, per_step)]
        for s in range(num_stages)
    ]


def _between(ahead, start, end, per_step):
    """1F1B of the micro-batches from `start` to `end`, some forwards ahead of the backwards."""
    forwards = iter(range(start, end))
    actions = [("F", m) for _, m in zip(range(ahead), forwards, strict=False)]
    for backward in range(start, end):
        actions += [("F", m) for m in (next(forwards, None),) if m is not None]
        actions.append(("B", backward))
        if (backward + 1 - start) % per_step == 0 or backward + 1 == end:
            actions.append(("S", backward))
    return actions


def needed_by(stage, kind, microbatch, num_stages):
    """The action of another stage that must be done before; None for none."""
    if kind == "F" and stage:
        return stage - 1, "F", microbatch
    if kind == "B" and stage < num_stages - 1:
        return stage + 1, "B", microbatch
    return None


def ordered(lists):
    """Yield (stage, kind, micro-batch) in an order in which all that an action needs comes before it."""
    done, places = set(), [0] * len(lists)
    while any(place < len(own) for place, own in zip(places, lists, strict=True)):
        for stage, own in enumerate(lists):
            while places[stage] < len(own):
                kind, microbatch = own[places[stage]]
                needed = needed_by(stage, kind, microbatch, len(lists))
                if needed is not None and needed not in done:
                    break
                done.add((stage, kind, microbatch))
                places[stage] += 1
                yield stage, kind, microbatch


def starts_of(lists):
    """The start of each action where a forward and a backward take 1, and a step no time."""
    starts, ends, clocks = {}, {}, [0] * len(lists)
    for action in ordered(lists):
        stage, kind, _ = action
        starts[action] = max(clocks[stage], ends.get(needed_by(*action, len(lists)), 0))
        clocks[stage] = ends[action] = starts[action] + (kind != "S")
    return starts


class Ages:
    """The versions in lists: for each action of a stage, the steps of that stage before it.

    Args:
        lists: the lists of all stages.
    """

    def __init__(self, lists):
        self.lists, self.before, self.applied = lists, {}, {}
        for stage, own in enumerate(lists):
            taken, waiting = 0, []
            for kind, microbatch in own:
                if kind == "S":
                    self.applied |= {(stage, one): taken for one in waiting}
                    taken, waiting = taken + 1, []
                else:
                    self.before[stage, kind, microbatch] = taken
                    waiting += [microbatch] if kind == "B" else []

    def tau(self, stage, step):
        """The most steps between a forward and the step that applies its gradient."""
        late = [
            step - self.before[s, "F", m] for (s, m), at in self.applied.items() if (s, at) == (stage, step)
        ]
        return max(late)

    def uses(self, weights):
        """For each action: a version, the steps by which it is moved, and along which change."""
        starts = starts_of(self.lists)
        steps = [[starts[s, *one] for one in own if one[0] == "S"] for s, own in enumerate(self.lists)]
        found = {}
        for action, version in self.before.items():
            stage, kind, microbatch = action
            forward, backward = (self.before[stage, one, microbatch] for one in "FB")
            use = version, 0, "weights"
            if weights == "stash":
                use = forward, 0, "weights"
            elif weights == "vertical":
                use = self.before[0, "F", microbatch], 0, "weights"
            elif weights == "double":
                step = self.applied[0, microbatch]
                first = min(m for (s, m), at in self.applied.items() if (s, at) == (0, step))
                use = self.before[0, "F", first], 0, "weights"
            elif weights == "estimate" and kind == "B":
                use = version, forward - backward, "mean"
            elif weights == "predict":
                back = sum(start < starts[0, "B", microbatch] for start in steps[stage])
                use = version, max(0, back - version), "update"
            elif weights in ("lwp", "lwp-weights") and kind == "F":
                ahead = self.applied[stage, microbatch] - version
                use = version, ahead, "update" if weights == "lwp" else "last"
            found[action] = use
        return found


# --------------------------------------------------------------------------------------------- stages


def update_of(optimizer, parameter):
    """The change of the next step without a new gradient, of SGD with momentum, Adam and AdamW."""
    [group] = (one for one in optimizer.param_groups if any(p is parameter for p in one["params"]))
    state = optimizer.state.get(parameter, {})
    if state.get("momentum_buffer") is not None:
        return -group["lr"] * state["momentum_buffer"]
    if "exp_avg" not in state:
        return torch.zeros_like(parameter)
    (beta1, beta2), step = group["betas"], state["step"].item()
    second = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"] / (1 - beta2**step)
    change = state["exp_avg"] / (1 - beta1**step) / (second.sqrt() + group["eps"])
    if isinstance(optimizer, torch.optim.AdamW):
        change = change + group["weight_decay"] * parameter.detach()
    return -group["lr"] * change


@dataclass
class Stage:
    """The blocks of a pipeline rank, with the history of their weights in a list."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    """None if all parameters are frozen."""
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    buffers: list[list[torch.Tensor]]
    """Of each data-parallel rank."""
    mean: list[torch.Tensor | None] = field(init=False)
    last: list[torch.Tensor | None] = field(init=False)
    history: list[dict[str, list[torch.Tensor | None]]] = field(default_factory=list)

    def __post_init__(self):
        self.parameters = list(self.model.parameters())
        self.mean, self.last = ([None] * len(self.parameters) for _ in range(2))

    def note(self):
        """Add the present weights and changes to the history."""
        updates = [
            update_of(self.optimizer, p) if self.optimizer is not None and p.requires_grad else None
            for p in self.parameters
        ]
        weights = [p.detach().clone() for p in self.parameters]
        self.history.append({"weights": weights, "update": updates, "mean": self.mean, "last": self.last})

    @torch.no_grad()
    def write(self, model, version, ahead, along):
        """Write the weights that an action uses into a copy of the model; a graph may read it already."""
        then = self.history[version]
        for parameter, weights, change in zip(model.parameters(), then["weights"], then[along], strict=True):
            parameter.data.copy_(weights if not ahead or change is None else weights + ahead * change)

    def copy_for(self, place, use):
        """A model of a data-parallel rank with the weights and buffers of a forward."""
        model = copy.deepcopy(self.model)
        self.write(model, *use)
        for buffer, value in zip(model.buffers(), self.buffers[place], strict=True):
            buffer.copy_(value)
        return model

    def step(self, gradients, tau, number, method, crossed):
        """Take a corrected step, and note its change."""
        if self.optimizer is None:
            return
        before = self.history[-1]["weights"]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if method.correction == "rescale":
            annealed = min(number / method.anneal_steps, 1) if method.anneal_steps else 0
            for group in self.optimizer.param_groups:
                group["lr"] /= max(tau, 1) ** (1 - annealed)
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if method.correction == "spike":
            self._compensate(before, gradients, tau)
        decay = method.decay ** (1 / crossed) if crossed else 0.0
        self.mean, self.last = list(self.mean), list(self.last)
        for index, (parameter, weights) in enumerate(zip(self.parameters, before, strict=True)):
            if gradients[index] is None and self.mean[index] is None:
                continue
            change, mean = parameter.detach() - weights, self.mean[index]
            self.last[index] = change
            self.mean[index] = (1 - decay) * change + (0 if mean is None else decay * mean)
        if self.scheduler is not None:
            self.scheduler.step()

    @torch.no_grad()
    def _compensate(self, before, gradients, tau):
        for group in self.optimizer.param_groups:
            a = group["momentum"] ** tau
            b = (1 - a) / (1 - group["momentum"])
            for parameter, weights, gradient in zip(self.parameters, before, gradients, strict=True):
                if gradient is not None and any(p is parameter for p in group["params"]):
                    velocity = self.optimizer.state[parameter]["momentum_buffer"]
                    late = gradient + group["weight_decay"] * weights
                    parameter.copy_(weights - group["lr"] * (a * velocity + b * late))


# ----------------------------------------------------------------------------------------------- runs


def train_by_history(stages, batches, loss_fn, method, taken):
    """Run a list; return the mean loss and the steps of it.

    Args:
        stages: the stages, which are changed.
        batches: for each data-parallel rank, its (input, target) of each micro-batch.
        taken: the steps of training before.
    """
    num_stages, num = len(stages), len(batches[0])
    lists = lists_of(num_stages, num, method.per_step, max(0, method.synchronous_steps - taken))
    ages = Ages(lists)
    uses = ages.uses(method.weights)
    calls, losses, arrived = {}, [], {}
    waiting = [[] for _ in stages]
    for stage in stages:
        stage.history.clear()
        stage.note()
    for action in ordered(lists):
        s, kind, m = action
        stage = stages[s]
        if kind == "S":
            found, waiting[s] = waiting[s], []
            gradients = [_mean(own) for own in zip(*found, strict=True)]
            step = len(stage.history) - 1
            crossed = -(-(num_stages - 1 - s) // method.per_step)  # of a full pipeline
            stage.step(gradients, ages.tau(s, step), taken + step, method, crossed)
            stage.note()
            continue
        for place, batch in enumerate(batches):
            if kind == "F":
                entered = batch[m][0] if s == 0 else calls[s - 1, m, place][2].detach().requires_grad_()
                model = stage.copy_for(place, uses[action])
                output = model(entered)
                stage.buffers[place] = [buffer.clone() for buffer in model.buffers()]
                if s == num_stages - 1:
                    output = loss_fn(output, batch[m][1])
                    losses.append(output.item())
                calls[s, m, place] = model, entered, output
            else:
                model, entered, output = calls[s, m, place]
                stage.write(model, *uses[action])
                if output.requires_grad:
                    torch.autograd.backward(output, arrived.pop((s, m, place), None))
                if s:
                    arrived[s - 1, m, place] = (
                        torch.zeros_like(entered) if entered.grad is None else entered.grad
                    )
                waiting[s].append([parameter.grad for parameter in model.parameters()])
    return sum(losses) / len(losses), len(stages[0].history) - 1


def _mean(gradients):
    """The mean over micro-batches and ranks, where a parameter without a gradient counts as zero."""
    there = [one for one in gradients if one is not None]
    return sum(there) / len(gradients) if there else None


@torch.no_grad()
def evaluate(stages, batches, loss_fn):
    """The mean loss of micro-batches with the newest weights."""
    losses = []
    for place, batch in enumerate(batches):
        for x, target in batch:
            for stage in stages:
                stage.history.clear()
                stage.note()
                x = stage.copy_for(place, (0, 0, "weights")).eval()(x)
            losses.append(loss_fn(x, target).item())
    return sum(losses) / len(losses)
