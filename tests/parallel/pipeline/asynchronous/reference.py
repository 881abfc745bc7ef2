"""Asynchronous training in one process: the history of each stage's weights, and plain PyTorch.

Micro-batch m meets these versions at stage s of p, in 1F1B with a step after each k backwards:

    forward       f = max(0, m - (p - 1 - s)) // k        p - 1 - s forwards are ahead of the backwards
    backward      b = m // k                              also the version that the gradient is applied to
    round trip    (m + s // 2) // k, or the last one      the version when m comes back to stage 0
"""

import copy

import torch
from torch import nn


def velocity_of(optimizer, parameter):
    """The change of the next step, without a new gradient."""
    group, state = optimizer.param_groups[0], optimizer.state.get(parameter, {})
    if not state or "momentum_buffer" in state:
        return -group["lr"] * state.get("momentum_buffer", torch.zeros_like(parameter))
    (beta1, beta2), step = group["betas"], state["step"].item()
    first, second = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
    decay = group["weight_decay"] * parameter.detach() if isinstance(optimizer, torch.optim.AdamW) else 0
    return -group["lr"] * (first / (second.sqrt() + group["eps"]) + decay)


class Stage:
    def __init__(self, blocks, make):
        self.model, self.parameters = nn.Sequential(*blocks), [p for b in blocks for p in b.parameters()]
        self.optimizer, self.history = make(self.parameters), []
        self.note(*[[torch.zeros_like(p) for p in self.parameters]] * 2)

    def note(self, delta, last):
        values = [p.detach().clone() for p in self.parameters]
        velocity = [velocity_of(self.optimizer, p) for p in self.parameters]
        self.history.append({"w": values, "velocity": velocity, "delta": delta, "last": last})

    def model_with(self, version, ahead, along, model=None):
        model, then = model or copy.deepcopy(self.model), self.history[version]
        for parameter, w, change in zip(model.parameters(), then["w"], then[along], strict=True):
            parameter.data.copy_(w + ahead * change if ahead else w)  # a graph reads the parameter
        return model

    def step(self, gradients, tau, number, method, decay):
        group, before, correction = self.optimizer.param_groups[0], self.history[-1], method.get("correction")
        lr, anneal = group["lr"], method.get("anneal")
        if correction == "rescale":
            group["lr"] = lr / max(tau, 1) ** (1 - min(number / anneal, 1) if anneal else 1)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        group["lr"] = lr
        if correction == "spike":
            m = group["momentum"]
            a, b = m**tau, (1 - m**tau) / (1 - m)
            for p, w, g in zip(self.parameters, before["w"], gradients, strict=True):
                v = self.optimizer.state[p]["momentum_buffer"]
                p.data.copy_(w - lr * (a * v + b * (g + group["weight_decay"] * w)))
        last = [p.detach() - w for p, w in zip(self.parameters, before["w"], strict=True)]
        self.note([decay * d + (1 - decay) * c for d, c in zip(before["delta"], last, strict=True)], last)


def uses(weights, m, s, p, k, num):  # (version, steps ahead, direction) of forward and backward
    f, b = max(0, m - (p - 1 - s)) // k, m // k
    back = (m + s // 2) // k if m + s // 2 < num else -(-num // k)
    return {
        "stash": ((f, 0, "w"), (f, 0, "w")),
        "vertical": ((max(0, m - (p - 1)) // k, 0, "w"),) * 2,
        "double": ((max(b - 1, 0), 0, "w"),) * 2,
        "estimate": ((f, 0, "w"), (b, f - b, "delta")),
        "predict": ((f, back - f, "velocity"), (b, back - b, "velocity")),
        "lwp": ((f, b - f, "velocity"), (b, 0, "w")),
        "lwp-weights": ((f, b - f, "last"), (b, 0, "w")),
    }.get(weights, ((f, 0, "w"), (b, 0, "w")))  # "latest" and "bounded"


def train(stages, batch, loss_fn, k, method):
    """The losses of a list of micro-batches; `stages` are changed."""
    p, losses, found = len(stages), [], []
    for stage in stages:
        stage.history = stage.history[-1:]
    for m, (x, target) in enumerate(batch):
        both, calls = [uses(method["weights"], m, s, p, k, len(batch)) for s in range(p)], []
        for s, stage in enumerate(stages):
            model, entered = stage.model_with(*both[s][0]), x.detach().requires_grad_()
            x = model(entered) if s < p - 1 else loss_fn(model(entered), target)
            calls.append((model, entered, x))
        losses.append(x.item())
        for s in reversed(range(p)):
            stages[s].model_with(*both[s][1], calls[s][0])
            torch.autograd.backward(calls[s][2], calls[s + 1][1].grad if s < p - 1 else None)
        found.append([[parameter.grad for parameter in model.parameters()] for model, *_ in calls])
        if len(found) == k or m + 1 == len(batch):
            for s, stage in enumerate(stages):
                gradients = [sum(each) / len(found) for each in zip(*(one[s] for one in found), strict=True)]
                taus = [b // k - max(0, b - (p - 1 - s)) // k for b in range(m + 1 - len(found), m + 1)]
                decay = method.get("d", 0.135) ** (1 / max(1, -(-(p - 1 - s) // k)))  # of a full pipeline
                stage.step(gradients, max(taus), method.get("taken", 0) + m // k, method, decay)
            found = []
    return losses
