"""Steps of a pipeline that wait for the next batch, against a pipeline with all values on the device."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.pipeline.runs import adamw, parameters_of, start, tokens_of
from tests.ranks import on_ranks
from tests.stepping.late import stepped_late

CASES = {
    "two chunks": ("tied llama", "interleaved", {"recompute": "unit", "clip_grad_norm": 0.5}),
    "asynchronous": ("llama", "pb", {}),
}
"""The fuzz draws other schedules with steps that wait."""


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
        engine, seen = start(name, {"clip_grad_norm": None} | config, adamw), []
        for number in range(7):
            seen.append(engine.train_batch({"input_ids": tokens_of(number)}, tokens_of(number)))
            seen += look(engine, number)
        num_late = len(names)
        seen += parameters_of(engine).values()
        engine.close(restore=False)
    return seen, num_late


@pytest.mark.parametrize("case", CASES)
@on_ranks(2, timeout=200)
def test_steps_of_a_pipeline_wait_for_its_next_batch(tmp_path, case):
    """For values in files, and as with all values on the device, to the bit."""
    name, schedule, options = CASES[case]
    pipeline = {"schedule": schedule, "num_microbatches": 2}
    config = {"stage": 3, "mesh": {"pp": 2}, "pipeline": pipeline} | options
    tiers = {"optimizer": "nvme", "parameters": "nvme", "nvme_path": str(tmp_path)}
    if case == "asynchronous":
        tiers["parameters"] = "none"
    want, none = run(name, config)
    got, num_late = run(name, config | {"offload": tiers})
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))
    assert not none
    assert bool(num_late) is (case != "asynchronous")
