"""Steps of a pipeline that wait for the next batch, against a pipeline with all values on the device."""

from __future__ import annotations

import math

import pytest
import torch

from tests.parallel.pipeline.runs import RECOMPUTED, adamw, parameters_of, start, tokens_of
from tests.stores.late import stepped_late

CASES = {
    "two chunks": ("tied llama", "interleaved", {"recompute": "unit", "clip_grad_norm": 0.5}),
    "recomputed": ("tied gpt", RECOMPUTED, {}),
    "left out": ("tied gpt", "gpipe", {"nonfinite": "skip"}),
    "asynchronous": ("llama", "pb", {}),
}
"""The fuzz draws other schedules with steps that wait."""
FAST = ["two chunks"]


def train(engine, number):
    tokens = tokens_of(number).chunk(engine.dp_world_size)[engine.dp_rank]
    return engine.train_batch({"input_ids": tokens}, tokens).item()


def look(engine, number):
    """What somebody sees between two batches: nothing, a loss, options, parameters or states."""
    if number == 1:
        tokens = tokens_of(100)
        return [engine.eval_batch({"input_ids": tokens}, tokens)]
    if number == 2:
        engine.optimizer.param_groups[0]["lr"] *= 0.5
    if number == 3:
        return [p.norm() for p in engine.parameters()]
    if number == 4:
        states = sorted(engine.optimizer.state_dict()["state"].items())
        return [value.clone() for _, state in states for value in state.values()]
    if number == 6:  # from now on no step waits
        return [value.clone() for value in engine.state_dict().values()]
    return []


def run(name, config):
    with stepped_late() as names:
        engine, seen, losses = start(name, {"clip_grad_norm": None} | config, adamw), [], []
        for number in range(8):
            first = next(engine.parameters())
            handle = first.register_hook(lambda gradient: gradient * math.nan)
            if number != 1 or "nonfinite" not in config:
                handle.remove()
            losses.append(train(engine, number))
            seen += look(engine, number)
            handle.remove()
        skipped, num_late = engine.skipped_steps, len(names)
        seen += parameters_of(engine).values()
        engine.close(restore=False)
    return (losses, skipped), seen, num_late


def different(names, stage, tiers):
    """Differences between steps on the device and steps that wait, for values in files."""
    found = []
    for case in names:
        name, schedule, options = CASES[case]
        pipeline = {"schedule": schedule, "num_microbatches": 2}
        config = {"stage": stage, "mesh": {"pp": 2}, "pipeline": pipeline} | options
        known, want, none = run(name, config)
        known_late, got, num_late = run(name, config | {"offload": tiers})
        found += [f"{case}: {known[1]} steps left out"] * (known[1] != ("nonfinite" in options))
        pairs = enumerate(zip(got, want, strict=True))
        found += [f"{case}: value {number}" for number, pair in pairs if not torch.equal(*pair)]
        found += [f"{case}: {known_late}, not {known}"] * (known_late != known)
        found += [f"{case}: {num_late} units"] * (bool(none) or bool(num_late) is (case == "asynchronous"))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "names", "parameters"),
    [
        (2, ["two chunks", "asynchronous"], "none"),
        pytest.param(4, list(CASES), "nvme", marks=pytest.mark.long),
    ],
)
def test_steps_of_a_pipeline_wait_for_its_next_batch(ranks, tmp_path, num_ranks, names, parameters):
    tiers = {"optimizer": "nvme", "parameters": parameters, "nvme_path": str(tmp_path)}
    for found in ranks(num_ranks, different, names, 3, tiers, timeout=300):
        assert not found
