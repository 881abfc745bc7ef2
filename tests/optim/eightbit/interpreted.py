"""Triton's kernels in its interpreter, on the CPU, against torch operations: the same bits.

    TRITON_INTERPRET=1 python -m tests.optim.eightbit.interpreted 'bf16 Adam:2309' round:5000

Each case is a rule and a size, or `round` and a size; `bf16` before a rule means parameters that are rounded,
`exact` means float32 states. The output is JSON: the differences of each case.
"""

import json
import sys
import warnings

import torch

from tests.optim.eightbit.cases import (
    RULES,
    begin,
    differences,
    hard_gradients,
    numbers_of,
    step_plainly,
    words,
)
from zeroshard.optim.eightbit import kernels_gpu
from zeroshard.stepping import bfloat16_gpu
from zeroshard.stepping.rounding import Bits, Rounding, round_in_chunks

KEYS = (0, 1, 0x9D39247E33776D41, 2**63, 2**64 - 1)
STARTS = (0, 1, 2, 1027, 2**40 + 3)


def compare_steps(name, size, device, dtype, is_exact):
    """Differences over some steps; with stochastic rounding in bfloat16."""
    rule, found = RULES[name], []
    p, states = begin(rule, size, dtype, is_exact=is_exact)
    q, others = begin(rule, size, dtype, device, is_exact=is_exact)
    for step, g in enumerate(hard_gradients(size, dtype), 1):
        bits = Bits(Rounding(7, step).key("p"), 256 * 3 + 1) if dtype is torch.bfloat16 else None
        h, numbers = g.to(device, copy=True), numbers_of(name, step)
        changed = h if rule.gives_update else q
        version = changed._version
        step_plainly(rule, p, g, states, numbers, bits)
        kernels_gpu.step(rule, q, h, others, rule.scalars(numbers), bits)
        found += [] if changed._version > version else ["the version of what is changed"]
        found += [f"step {step}: {text}" for text in differences(q, h, others, p, g, states)]
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
        num = int((words(out.cpu()) != words(wanted)).sum())
        found += [f"key {key}, start {start}: {num}"] if num else []
    return found


def compare(case, device="cpu"):
    name, _, size = case.partition(":")
    if name == "round":
        return compare_rounding(int(size), device)
    kind, _, name = name.rpartition(" ")
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    return compare_steps(name, int(size), device, dtype, kind == "exact")


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, about nan
    print(json.dumps({case: compare(case) for case in sys.argv[1:]}))
