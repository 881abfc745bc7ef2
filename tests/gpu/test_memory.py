"""Bytes that the allocator has given out, against the formulas of the README."""

import gc

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.training import STAGES, batch, build, gpus, start, train

WIDTH, DEPTH = 1024, 8
MB = 1 << 20
SLACK = 64 * MB
"""For what cuBLAS keeps, 32 MB on the newest GPUs, and the batch."""


def at_rest(stage):
    """(elements, bytes between steps, peak of a step) of a rank, in fp32 with AdamW."""
    model = build(WIDTH, DEPTH)
    num = sum(p.numel() for p in model.parameters())
    engine = start(model, stage)
    del model
    train(engine, range(2))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    rest = torch.cuda.memory_allocated()
    train(engine, range(1))
    return num, rest, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=gpus(n)) for n in (1, 2)])
def test_bytes_at_rest_are_those_of_the_formula_and_stage_3_has_the_lowest_peak(on_gpus, num_ranks):
    peaks = {}
    for stage in STAGES:
        # Without gradients, which step() drops: 4 bytes of parameters and 8 of states.
        share = {0: 12, 1: 4 + 8 / num_ranks, 2: 4 + 8 / num_ranks, 3: 12 / num_ranks}[stage]
        for num, rest, peak in on_gpus(num_ranks, at_rest, stage):
            assert share * num * 0.99 <= rest <= share * num * 1.01 + SLACK
            peaks[stage] = peak
    if num_ranks > 1:
        assert peaks[3] < peaks[2] <= peaks[0]


def peak_of_gathered():
    """Bytes that a forward of stage 3 has beside what is there at rest, and those of one unit in fp32."""
    engine = start(build(WIDTH, DEPTH), 3)
    train(engine, range(1))
    inputs, targets = batch(WIDTH, 0, engine.device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        F.cross_entropy(engine(inputs), targets)
    unit = max(unit.numel for unit in engine.units) * 4
    return torch.cuda.max_memory_allocated() - before, unit


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=gpus(2))])
def test_a_forward_of_stage_3_holds_few_units_at_a_time(on_gpus, num_ranks):
    for grown, unit in on_gpus(num_ranks, peak_of_gathered):
        assert grown <= 4 * unit + SLACK  # this one, the one before, the next, the root
        assert grown < DEPTH * unit


NARROW, BATCH = 256, 1 << 15
"""Of a model whose gradients take little memory beside its activations."""
OF_AN_INPUT = BATCH * NARROW * 4
"""Bytes of a block's input in fp32. A block saves it, the input of `up`, and four times as much twice."""


def with_activations(tier, recompute):
    """(peak of a backward beyond what is there at rest, norm of the gradients, pinned bytes)."""
    engine = start(build(NARROW, DEPTH), 1, recompute=recompute, offload={"activations": tier})
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH, NARROW, generator=generator).to(engine.device)
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.backward(engine(inputs).square().mean())
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        norm = engine.clip_grad_norm_(1e9).item()
        engine.zero_grad()
    return peak, norm, engine.memory_report().pinned


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=gpus(1))])
@pytest.mark.parametrize(
    ("recompute", "of_a_block", "fewest"), [("none", 10 * OF_AN_INPUT, 5), ("unit", OF_AN_INPUT, 3)]
)
def test_activations_on_the_host_are_not_on_the_device(on_gpus, num_ranks, recompute, of_a_block, fewest):
    (kept, expected, _), (moved, norm, pinned) = (
        on_gpus(num_ranks, with_activations, tier, recompute)[0] for tier in ("none", "cpu")
    )
    assert norm == expected
    # The device has what two blocks have saved, and what is on its way.
    assert fewest * of_a_block <= kept - moved <= DEPTH * of_a_block
    assert fewest * of_a_block <= pinned <= DEPTH * of_a_block
