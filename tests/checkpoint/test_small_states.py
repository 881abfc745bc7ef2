"""States of one value for a whole parameter."""

import pytest
import torch
from torch.optim import SGD

from tests.checkpoint.runs import start, train


class Decays(SGD):
    """Steps that get shorter, by a counter of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                kept = self.state[parameter]
                if not kept:
                    kept["step"], kept["count"] = torch.zeros(1), torch.zeros((), dtype=torch.int64)
                    kept["average"] = torch.zeros_like(parameter)
                kept["step"] += 1
                kept["count"] += 2
                kept["average"].lerp_(parameter.grad, 0.5)
                factor = 1 / (kept["step"] + kept["count"])
                parameter.add_(kept["average"] * factor, alpha=-group["lr"])


def make(stage, **given):
    with pytest.warns(UserWarning, match="is not known to zeroshard"):
        return start(stage, lambda model: Decays(model.parameters(), lr=0.5), **given)


def save(folder):
    engine = make(3)
    train(engine, [0, 1])
    engine.save_checkpoint(folder)
    return train(engine, [2, 3])


def load(folder):
    found = []
    for stage in (0, 3):
        engine = make(stage, seed=1)
        engine.load_checkpoint(folder)
        counts = {tuple(kept["step"].tolist()) for kept in engine.optimizer.state.values()}
        shapes = {tuple(kept["count"].shape) for kept in engine.optimizer.state.values()}
        losses = train(engine, [2, 3])
        found.append((counts, shapes, losses))
    return found


def test_counters_load_at_another_number_of_ranks(ranks, tmp_path):
    (expected, _) = ranks(2, save, tmp_path / "at two")
    for found in ranks(3, load, tmp_path / "at two"):
        for counts, shapes, losses in found:
            assert counts == {(2.0,)}
            assert shapes == {()}
            assert losses == pytest.approx(expected, rel=1e-5)
