"""Triton's kernels in its interpreter, on the CPU, against those of numba: the same bits.

    TRITON_INTERPRET=1 python -m tests.optim.eightbit.interpreted 'bf16 Adam:2309' round:5000

Each case is a rule and a size, or `round` and a size; `bf16` before a rule means parameters that are rounded,
`exact` means float32 states. The output is JSON: the differences of each case.
"""

import json
import sys
import warnings

import torch

from tests.optim.eightbit.cases import SETTINGS, begin
from zeroshard.optim.eightbit import kernels, kernels_gpu
from zeroshard.optim.eightbit.rules import LAMB_RULE, LARS_RULE
from zeroshard.optim.eightbit.step import step_in_chunks
from zeroshard.stepping import bfloat16_gpu
from zeroshard.stepping.rounding import Bits, Rounding, round_in_chunks

ALL_SETTINGS = SETTINGS | {LAMB_RULE: {"betas": (0.8, 0.95), "eps": 1e-6}, LARS_RULE: {"momentum": 0.7}}
RULES = {rule.optimizers[0]: rule for rule in ALL_SETTINGS}
STEPS = 4
KEYS = (0, 1, 0x9D39247E33776D41, 2**63, 2**64 - 1)
STARTS = (0, 1, 2, 1027, 2**40 + 3)


def gradients(size, dtype):
    """Of all magnitudes, among them zeros and a block of denormals; then also nan, infinity and huge ones."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        g = torch.randn(size, generator=generator) * torch.rand(size, generator=generator).mul(-9).exp()
        g.masked_fill_(torch.rand(size, generator=generator) <= 0.2, 0.0)
        g[256:512] *= 1e-40
        g[512:768] = 0.0
        if step >= 2:
            g[800:1024:100], g[1100:1200:50], g[1700:1710] = float("nan"), -float("inf"), 1e38
            g[-1] = float("nan") if step == 3 else 1.0
        yield g.to(dtype)


def scalars_of(rule, step, lr=1e-2):
    settings = {**ALL_SETTINGS[rule], "lr": lr, "weight_decay": 0.1}
    return rule.scalars(rule.numbers(settings, step)), rule.numbers(settings, step)


def words(values):
    """The bits of values; every nan of float32 alike."""
    if values.dtype is torch.bfloat16:
        return values.view(torch.int16)
    return values.view(torch.int32).where(~values.isnan(), -1) if values.is_floating_point() else values


def differences(what, values, wanted):
    one, other = words(values.cpu()), words(wanted)
    num = int((one != other).sum())
    return [f"{what}: {num} of {one.numel()} differ"] if num else []


def compare_steps(rule, size, device, dtype):
    """Differences over some steps; with stochastic rounding in bfloat16."""
    found = []
    p, states = begin(rule, size, dtype)
    q, others = begin(rule, size, dtype, device)
    for step, g in enumerate(gradients(size, dtype), 1):
        bits = Bits(Rounding(7, step).key("p"), 256 * 3 + 1) if dtype is torch.bfloat16 else None
        h, (scalars, _) = g.to(device, copy=True), scalars_of(rule, step)
        changed = h if rule.gives_update else q
        version = changed._version
        kernels.step(rule, p, g, states, scalars, bits)
        kernels_gpu.step(rule, q, h, others, scalars, bits)
        found += [] if changed._version > version else ["the version of what is changed"]
        place = f"step {step}, {dtype}"
        found += differences(f"{place}, parameter", q, p) + differences(f"{place}, gradient", h, g)
        for name, state, other in zip(rule.states, states, others, strict=True):
            found += differences(f"{place}, codes of {name}", other.codes, state.codes)
            found += differences(f"{place}, scales of {name}", other.absmax, state.absmax)
    return found


def compare_exact(rule, size, device):
    """Differences of steps with float32 states, against torch operations."""
    p, states = begin(rule, size, torch.float32, is_exact=True)
    q, others = begin(rule, size, torch.float32, device, is_exact=True)
    found = []
    for step, g in enumerate(gradients(size, torch.float32), 1):
        scalars, numbers = scalars_of(rule, step)
        h = g.to(device, copy=True)
        step_in_chunks(rule, p, g, states, numbers)
        kernels_gpu.step(rule, q, h, others, scalars)
        found += differences("parameter", q, p) + differences("gradient", h, g)
        for state, other in zip(states, others, strict=True):
            found += differences("state", other.values, state.values)
    return found


def compare_rounding(size, device):
    """Differences of rounded values: normal ones, denormals, infinities and nan of every kind."""
    generator = torch.Generator().manual_seed(size)
    patterns = torch.randint(-(2**31), 2**31, (size,), generator=generator).int().view(torch.float32)
    normal = torch.randn(size, generator=generator)
    small = torch.randint(-(2**23), 2**23, (size,), generator=generator).int().view(torch.float32)
    special = torch.tensor([0x7F800000, -0x800000, 0x7F800001, -1, -(2**31), 0, 0x7F7FFFFF, 0x7FFFFFFF])
    third = size // 3
    values = torch.cat([special.int().view(torch.float32), patterns[:third], small[:third], normal])[:size]
    found = []
    for key, start in zip(KEYS, STARTS, strict=True):
        wanted, out = (torch.empty(size, dtype=torch.bfloat16, device=where) for where in ("cpu", device))
        version = out._version
        round_in_chunks(wanted, values, key, start)
        bfloat16_gpu.round_into(out, values.to(device), key, start)
        found += [] if out._version > version else ["the version of what is changed"]
        found += differences(f"key {key}, start {start}", out, wanted)
    return found


def compare(case, device="cpu"):
    name, _, size = case.partition(":")
    if name == "round":
        return compare_rounding(int(size), device)
    kind, _, name = name.rpartition(" ")
    if kind == "exact":
        return compare_exact(RULES[name], int(size), device)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    return compare_steps(RULES[name], int(size), device, dtype)


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, about nan
    print(json.dumps({case: compare(case) for case in sys.argv[1:]}))
