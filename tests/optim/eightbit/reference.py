"""The reference for 8-bit steps: plain torch on whole tensors, nearest codes by trying all 256.

Formulas are those of the papers; each operation is rounded to float32 by itself, as the kernels do it.
"""

import math
from dataclasses import dataclass, field

import torch

BLOCK = 256


def create_dynamic_map(signed: bool) -> torch.Tensor:
    """As bitsandbytes documents them: seven decades, the k-th in 2^k parts (unsigned: 2^(k+1))."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += middles.tolist() + ((-middles).tolist() if signed else [])
    return torch.tensor(sorted(values))


SIGNED, UNSIGNED = create_dynamic_map(True), create_dynamic_map(False)


@dataclass
class Blocks:
    """A quantized tensor."""

    codes: torch.Tensor
    absmax: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, values: torch.Tensor) -> "Blocks":
        flat = x.reshape(-1)
        rows = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        absmax = rows.abs().amax(1)
        inverse = torch.where(absmax > 0, 1 / absmax, 0.0)
        scaled = (rows * inverse[:, None]).view(-1)[: flat.numel()]
        codes = [
            (part.double()[:, None] - values.double()).abs().argmin(1)  # ties: the first, which is the lower
            for part in scaled.split(4096)
        ]
        return cls(torch.cat(codes).to(torch.uint8), absmax, values)

    def read(self) -> torch.Tensor:
        return self.values[self.codes.long()] * self.absmax.repeat_interleave(BLOCK)[: self.codes.numel()]


def root(x: torch.Tensor) -> torch.Tensor:
    """Rounded exactly."""
    return x.double().sqrt().float()


@dataclass
class Reference:
    """One parameter, flat, with its states."""

    kind: str
    p: torch.Tensor
    states: dict[str, Blocks] = field(default_factory=dict)
    step_count: int = 0

    def read(self, name: str, values: torch.Tensor = SIGNED) -> torch.Tensor:
        if name not in self.states:
            self.states[name] = Blocks.of(torch.zeros_like(self.p), values)
        return self.states[name].read()

    def keep(self, name: str, x: torch.Tensor, values: torch.Tensor = SIGNED) -> None:
        self.states[name] = Blocks.of(x, values)

    def step(self, g: torch.Tensor, **numbers: object) -> None:
        self.step_count += 1
        getattr(self, self.kind.lower())(g.reshape(-1), **numbers)

    def adamw8bit(self, g, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        beta1, beta2 = betas
        m = self.read("exp_avg") * beta1 + g * (1 - beta1)
        v = self.read("exp_avg_sq", UNSIGNED) * beta2 + (g * g) * (1 - beta2)
        denominator = root(v) * (1 / math.sqrt(1 - beta2**self.step_count)) + eps
        size = lr / (1 - beta1**self.step_count)
        self.p = self.p * (1 - lr * weight_decay) - (m / denominator) * size
        self.keep("exp_avg", m)
        self.keep("exp_avg_sq", v, UNSIGNED)

    def adam8bit(self, g, **numbers):
        self.adamw8bit(g, **{"weight_decay": 0.0, **numbers})

    def lion8bit(self, g, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        beta1, beta2 = betas
        m = self.read("exp_avg")
        direction = torch.sign(m * beta1 + g * (1 - beta1))
        self.p = self.p * (1 - lr * weight_decay) - direction * lr
        self.keep("exp_avg", m * beta2 + g * (1 - beta2))

    def sgd8bit(self, g, lr, momentum=0.9, weight_decay=0.0):
        m = self.read("momentum_buffer") * momentum + (self.p * weight_decay + g)
        self.p = self.p - m * lr
        self.keep("momentum_buffer", m)

    def ademamix8bit(
        self,
        g,
        lr=1e-3,
        betas=(0.9, 0.999, 0.9999),
        alpha=5.0,
        t_alpha=None,
        t_beta3=None,
        eps=1e-8,
        weight_decay=1e-2,
    ):
        beta1, beta2, beta3 = betas
        t = self.step_count
        if t_alpha is not None:
            alpha = min(t / t_alpha, 1.0) * alpha
        if t_beta3 is not None and t < t_beta3:  # equation 5 of the paper, by half lives
            ln1, ln3, share = math.log(beta1), math.log(beta3), t / t_beta3
            beta3 = min(math.exp(ln1 * ln3 / ((1 - share) * ln3 + share * ln1)), beta3)
        m = self.read("exp_avg") * beta1 + g * (1 - beta1)
        slow = self.read("exp_avg_slow") * beta3 + g * (1 - beta3)
        v = self.read("exp_avg_sq", UNSIGNED) * beta2 + (g * g) * (1 - beta2)
        denominator = root(v) * (1 / math.sqrt(1 - beta2**t)) + eps
        mixed = m * (1 / (1 - beta1**t)) + slow * alpha
        self.p = self.p * (1 - lr * weight_decay) - (mixed / denominator) * lr
        self.keep("exp_avg", m)
        self.keep("exp_avg_slow", slow)
        self.keep("exp_avg_sq", v, UNSIGNED)

    def trust(self, other: torch.Tensor, factor: float = 1.0, decay: float = 0.0) -> float:
        """factor * |p| / (|other| + decay * |p|), in float64; 1 where a norm is 0."""
        one, two = self.p.double().norm().item(), other.double().norm().item()
        return factor * one / (two + decay * one) if one and two else 1.0

    def lamb8bit(self, g, lr, betas, eps, weight_decay, trust_ratio=True):
        """You et al. 2020, algorithm 2; the ratio is that of the update before its moments are quantized."""
        beta1, beta2 = betas
        m = self.read("exp_avg") * beta1 + g * (1 - beta1)
        v = self.read("exp_avg_sq", UNSIGNED) * beta2 + (g * g) * (1 - beta2)
        denominator = root(v) * (1 / math.sqrt(1 - beta2**self.step_count)) + eps
        update = (m * (1 / (1 - beta1**self.step_count))) / denominator + self.p * weight_decay
        self.p = self.p - update * (lr * (self.trust(update) if trust_ratio else 1.0))
        self.keep("exp_avg", m)
        self.keep("exp_avg_sq", v, UNSIGNED)

    def lars8bit(self, g, lr, momentum, weight_decay, trust_coefficient, trust_ratio=True):
        """You, Gitman, Ginsburg 2017, algorithm 1."""
        ratio = self.trust(g, trust_coefficient, weight_decay) if trust_ratio else 1.0
        m = self.read("momentum_buffer") * momentum + (self.p * weight_decay + g) * (lr * ratio)
        self.p = self.p - m
        self.keep("momentum_buffer", m)
