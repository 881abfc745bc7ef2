"""Asynchronous training in one process: the history of each stage's weights, and plain PyTorch.

Micro-batch m meets these versions at stage s of p, in 1F1B with a step after each k backwards:

    forward       f = max(0, m - (p - 1 - s)) // k        p - 1 - s forwards are ahead of the backwards
    backward      b = m // k                              also the version that the gradient is applied to
    round trip    (m + s // 2) // k                       the version when m comes back to stage 0

Nothing here is read from a schedule, and nothing is shared with the package.
"""

import copy

import torch
from torch import nn


def velocity_of(optimizer, parameter):
    """The change of the next step, without a new gradient."""
    group, state = optimizer.param_groups[0], optimizer.state.get(parameter, {})
    if not state:
        return torch.zeros_like(parameter)
    if "momentum_buffer" in state:
        return -group["lr"] * state["momentum_buffer"]
    (beta1, beta2), step = group["betas"], state["step"].item()
    first, second = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
    decay = group["weight_decay"] * parameter.detach() if isinstance(optimizer, torch.optim.AdamW) else 0
    return -group["lr"] * (first / (second.sqrt() + group["eps"]) + decay)


class Stage:
    def __init__(self, blocks, make):
        self.model, self.parameters = nn.Sequential(*blocks), [p for b in blocks for p in b.parameters()]
        self.optimizer = make(self.parameters)
        self.delta = [torch.zeros_like(p) for p in self.parameters]
        self.last = [torch.zeros_like(p) for p in self.parameters]
        self.history = []
        self.note()

    def note(self):
        velocity = [velocity_of(self.optimizer, p) for p in self.parameters]
        values = [p.detach().clone() for p in self.parameters]
        deltas = [delta.clone() for delta in self.delta]
        self.history.append({"w": values, "velocity": velocity, "delta": deltas, "last": self.last})

    def weights(self, version, ahead, along):
        then = self.history[version]
        return [w + ahead * c for w, c in zip(then["w"], then[along], strict=True)] if ahead else then["w"]

    def step(self, gradients, tau, number, method):
        group, before = self.optimizer.param_groups[0], [p.detach().clone() for p in self.parameters]
        lr = group["lr"]
        if method.get("correction") == "rescale":
            anneal = method.get("anneal")
            group["lr"] = lr / max(tau, 1) ** (1 - min(number / anneal, 1) if anneal else 1)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        group["lr"] = lr
        if method.get("correction") == "spike":
            m, decay = group["momentum"], group["weight_decay"]
            a, b = m**tau, (1 - m**tau) / (1 - m)
            for p, w, g in zip(self.parameters, before, gradients, strict=True):
                v = self.optimizer.state[p]["momentum_buffer"]
                p.data.copy_(w - lr * (a * v + b * (g + decay * w)))
        self.last = [p.detach() - w for p, w in zip(self.parameters, before, strict=True)]
        decay = method["decay"]
        self.delta = [decay * d + (1 - decay) * c for d, c in zip(self.delta, self.last, strict=True)]
        self.note()


def uses(weights, m, s, p, k):
    """(version, steps ahead) of forward and backward, and the direction."""
    f, b, back = max(0, m - (p - 1 - s)) // k, m // k, (m + s // 2) // k
    first = max(0, m - (p - 1)) // k
    return {
        "latest": ((f, 0), (b, 0), "w"),
        "bounded": ((f, 0), (b, 0), "w"),
        "stash": ((f, 0), (f, 0), "w"),
        "vertical": ((first, 0), (first, 0), "w"),
        "double": ((max(b - 1, 0), 0), (max(b - 1, 0), 0), "w"),
        "estimate": ((f, 0), (b, f - b), "delta"),
        "predict": ((f, back - f), (b, back - b), "velocity"),
        "lwp": ((f, b - f), (b, 0), "velocity"),
        "lwp-weights": ((f, b - f), (b, 0), "last"),
    }[weights]


def train(stages, batch, loss_fn, k, method):
    """The losses of a list of micro-batches; `stages` are changed."""
    p, losses, sums, num = len(stages), [], None, len(batch)
    for stage in stages:
        stage.history = stage.history[-1:]
    for m, (x, target) in enumerate(batch):
        outputs, inputs = [], []
        for s, stage in enumerate(stages):
            (version, ahead), _, along = uses(method["weights"], m, s, p, k)
            model = copy.deepcopy(stage.model)
            for parameter, value in zip(
                model.parameters(), stage.weights(version, ahead, along), strict=True
            ):
                parameter.data.copy_(value)
            inputs.append((model, x.detach().requires_grad_()))
            x = model(inputs[-1][1])
            outputs.append(x)
        loss = loss_fn(x, target)
        losses.append(loss.item())
        outputs[-1], gradient, found = loss, None, []
        for s in reversed(range(p)):
            _, (version, ahead), along = uses(method["weights"], m, s, p, k)
            model, entered = inputs[s]
            for parameter, value in zip(
                model.parameters(), stages[s].weights(version, ahead, along), strict=True
            ):
                parameter.data.copy_(value)  # autograd has kept the parameter, so it reads this
            torch.autograd.backward(outputs[s], gradient)
            gradient = entered.grad
            found.insert(0, [parameter.grad for parameter in model.parameters()])
        pairs = zip(sums or found, found, strict=True)
        sums = [[a + b for a, b in zip(*both, strict=True)] for both in pairs] if sums else found
        if (m + 1) % k == 0 or m + 1 == num:
            first = m - m % k
            for s, stage in enumerate(stages):
                taus = [one // k - max(0, one - (p - 1 - s)) // k for one in range(first, m + 1)]
                number = method.get("taken", 0) + m // k
                stage.step(
                    [g / (m + 1 - first) for g in sums[s]],
                    max(taus),
                    number,
                    method | decay_of(method, s, p, k),
                )
            sums = None
    return losses


def decay_of(method, s, p, k):
    crossed = max(one // k - max(0, one - (p - 1 - s)) // k for one in range(10 * p * k))
    return {"decay": method.get("d", 0.135) ** (1 / crossed) if crossed else 0.0}
