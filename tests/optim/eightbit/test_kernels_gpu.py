"""The kernels of a GPU: in Triton's interpreter, compiled without a GPU, and on one."""

import pytest

pytest.importorskip("triton", reason="torch comes with Triton on Linux alone")

import functools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from tests.checkpoint.runs import start
from tests.optim.eightbit.cases import KINDS, OPTIONS, ROUNDED, RULES, begin, gradients, numbers_of, words
from tests.optim.eightbit.interpreted import KEYS, STARTS, compare
from zeroshard.optim.eightbit import rules
from zeroshard.optim.eightbit import step as steps
from zeroshard.optim.eightbit.rules import ADAM, LION
from zeroshard.stepping import attach, rounding
from zeroshard.stepping.rounding import Bits, has_kernels

# One whole program and one that is cut; a block and a part of one, which shows how that is filled up.
STEPS = ["bf16 Adam:2309", "LAMB:300", "exact LAMB:300"]
ROUNDING = ["round:1", "round:2048", "round:5001"]
SIZES = (1, 256, 300, 2048, 2304, 2309, 4096, 10_007)
LONG = [f"{name}:{size}" for name in [*RULES, *(f"bf16 {name}" for name in ROUNDED)] for size in SIZES]
LONG += [f"exact {name}:2309" for name in RULES]


INTERPRETED = [case for case in LONG if not case.endswith((":4096", ":10007"))]  # of two programs at most


@pytest.mark.parametrize("cases", [[*STEPS, *ROUNDING], pytest.param(INTERPRETED, marks=pytest.mark.long)])
def test_interpreted_steps_have_the_bits_of_the_cpu(cases):
    """In a process whose Triton interprets, from its import on."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.optim.eightbit.interpreted", *cases],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not {case: found for case, found in json.loads(done.stdout.splitlines()[-1]).items() if found}


# --------------------------------------------------------------------------------- compiled without a GPU


class Pretended:
    """A driver of Triton that names an architecture, and is good for compiling alone."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_device(self):
        return self.arch  # compiled kernels are kept by device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def only_compile(kernel, run, *args, warmup, **kwargs):
    return run(kernel, *args, warmup=True, **kwargs)


@pytest.fixture
def kernels_for(monkeypatch, tmp_path):
    """(architecture) -> the modules whose kernels are compiled for it, and not launched."""
    from triton.runtime import driver

    from zeroshard.optim.eightbit import kernels_gpu
    from zeroshard.stepping import bfloat16_gpu

    def compile_for(arch):
        monkeypatch.setattr(driver, "_active", Pretended(arch))
        for kernel in (kernels_gpu.step_slice, bfloat16_gpu.round_slice):
            kernel.device_caches.pop(arch, None)

            run = functools.partial(only_compile, kernel, type(kernel).run)
            monkeypatch.setattr(kernel, "run", run)
        return kernels_gpu, bfloat16_gpu

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return compile_for


def compiled(kernel, arch):
    """All that was compiled of a kernel."""
    return list(kernel.device_caches[arch][0].values())


COMPILED = [(name, 90, torch.bfloat16 if name in ROUNDED else torch.float32) for name in RULES]
COMPILED += [("Adam", 90, torch.float32), ("Adam", 80, torch.bfloat16)]


@pytest.mark.long_where(arch=[80])
@pytest.mark.long_where(dtype=[torch.float32])
@pytest.mark.long_where(name=[name for name in RULES if name != "Adam"])
@pytest.mark.parametrize(("name", "arch", "dtype"), COMPILED, ids=str)
def test_a_compiled_step_rounds_each_operation_to_nearest(name, arch, dtype, kernels_for):
    rule, (kernels, _) = RULES[name], kernels_for(arch)
    p, states = begin(rule, 2309, dtype)
    bits = Bits(3, 256) if dtype is torch.bfloat16 else None
    kernels.step(rule, p, p.clone(), states, rule.scalars(numbers_of(name, 1)), bits)
    (one,) = compiled(kernels.step_slice, arch)
    assert one.asm["cubin"]
    used = set(re.findall(r"\b(?:div|sqrt|rcp|rsqrt|fma|ex2)\.[a-z.]*f32", one.asm["ptx"]))
    has_root = "root" in rule.update.__code__.co_names
    assert used == {"div.rn.f32", *(["sqrt.rn.f32"] if has_root else [])}
    assert ".ftz" not in one.asm["ptx"], "denormals stay"
    assert one.metadata.enable_fp_fusion is False, "the assembler fuses nothing either"


def test_other_counts_keys_starts_and_hyperparameters_compile_nothing(kernels_for):
    kernels, rounds = kernels_for(90)
    for size, lr in ((16, 1e-2), (256, 1), (2048, 1.0), (5003, 0.0)):
        for bits in map(Bits, KEYS, STARTS):
            p, states = begin(LION, size, torch.bfloat16)
            kernels.step(LION, p, p.clone(), states, LION.scalars(numbers_of("Lion", 1, lr)), bits)
            rounds.round_into(p, p.float(), *bits)
    for kernel in (kernels.step_slice, rounds.round_slice):
        (one,) = compiled(kernel, 90)
        assert "ld.global.v" in one.asm["ptx"], "whole programs move memory in vectors"
        assert "st.global.v" in one.asm["ptx"]


# ------------------------------------------------------------------------------------- where it is decided


def test_a_device_without_triton_is_warned_of_once():
    nowhere = torch.device("cuda", 99)
    with pytest.warns(UserWarning, match=r"optimizer steps on cuda:99 without triton \(.*pip install triton"):
        assert not has_kernels(nowhere)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not has_kernels(nowhere)
        assert not has_kernels(torch.device("cpu"))


def test_initialize_tries_the_kernel_of_each_rule_and_of_rounding(monkeypatch):
    tried, devices = [], []
    monkeypatch.setattr(rules, "has_kernel", lambda *given: tried.append(given))
    monkeypatch.setattr(attach, "has_kernels", devices.append)
    start(3, lambda model: KINDS["AdamW8bit"](model.parameters()))
    assert not devices
    start({"stage": 3, "precision": {"main_dtype": "bf16"}})
    assert (set(tried), devices) == ({(ADAM, torch.device("cpu"), 8)}, [torch.device("cpu")])


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*STEPS, *ROUNDING, *LONG, "Adam:1000003", "round:1000003"])
def test_steps_on_a_gpu_have_the_bits_of_the_cpu(case):
    assert not compare(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_optimizers_on_a_gpu_have_the_bits_of_the_cpu(name):
    torch.manual_seed(0)
    cpu = nn.Parameter(torch.randn(50_003))
    gpu = nn.Parameter(cpu.detach().cuda())
    first, second = KINDS[name]([cpu], **OPTIONS[name]), KINDS[name]([gpu], **OPTIONS[name])
    for g in gradients((50_003,), 4):
        cpu.grad, gpu.grad = g, g.cuda()
        first.step()
        second.step()
        assert torch.equal(words(cpu.detach()), words(gpu.detach().cpu()))
        for key, value in first.state[cpu].items():
            other = second.state[gpu][key]
            assert other == value if key == "step" else torch.equal(words(other.cpu()), words(value))


@pytest.mark.gpu
def test_without_triton_a_gpu_has_the_bits_of_the_cpu(monkeypatch):
    monkeypatch.setattr(steps, "has_kernel", lambda rule, device, num_scalars: False)
    test_optimizers_on_a_gpu_have_the_bits_of_the_cpu("AdamW8bit")


@pytest.mark.gpu
def test_rounding_on_a_gpu_takes_the_kernel(monkeypatch):
    monkeypatch.setattr(rounding, "round_in_chunks", None)
    out = torch.empty(10, dtype=torch.bfloat16, device="cuda")
    rounding.round_into(out, torch.ones(10, device="cuda"), 1, 0)
    assert (out == 1).all()
