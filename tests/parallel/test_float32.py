"""Ten steps in float32 beside one process: losses and parameters within 1e-5, norms within 1e-6."""

import pytest
import torch

from tests.parallel import models, runs

STEPS = 10
LAYOUTS = [(2, 2), (2, 1), (4, 2), (4, 4), (8, 2)]
MODELS = {"tied GPT": runs.GPT, **{name: models.kind_of(name) for name in ("Llama", "Mixtral", "T5")}}


def sgd(parameters):
    # Adam divides a gradient by its own size, and so shows rounding of gradients near 0 as whole steps.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def at_all_stages(kind, tp):
    configs = [{"stage": stage, "mesh": {"tp": tp}} for stage in range(4)]
    return [runs.divided(config, sgd, kind=kind, steps=STEPS, dtype=torch.float32) for config in configs]


@pytest.mark.long_where(name=["tied GPT", "Mixtral", "T5"])
@pytest.mark.long_where(layout=[(2, 1), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("layout", LAYOUTS, ids="{0[0]} ranks, tp {0[1]}".format)
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_are_those_of_one_process_at_every_stage(ranks, name, layout):
    (num_ranks, tp), kind = layout, MODELS[name]
    want = runs.plain(sgd, kind=kind, steps=STEPS, dtype=torch.float32, num_parts=num_ranks // tp)
    first, *others = (
        list(run) for run in zip(*ranks(num_ranks, at_all_stages, kind, tp, timeout=200), strict=True)
    )
    runs.check_same(first)
    assert first[0].losses == pytest.approx(want.losses, rel=1e-5)
    assert first[0].norms == pytest.approx(want.norms, rel=1e-6)
    for key, value in want.state.items():
        assert (first[0].state[key] - value).norm() <= 1e-5 * value.norm(), key
    for run in (*first, *(run for stage in others for run in stage)):
        assert (run.losses, run.norms) == (first[0].losses, first[0].norms)
        assert all(torch.equal(value, first[0].state[key]) for key, value in run.state.items())
