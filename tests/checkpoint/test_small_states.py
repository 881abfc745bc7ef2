"""States of one value for a whole parameter, and of some values, which are refused."""

import pytest
import torch
from torch.optim import SGD

from tests.checkpoint.runs import start, train
from tests.ranks import on_ranks


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
    for stage in (0, 1, 3):
        engine = make(stage, seed=1)
        engine.load_checkpoint(folder)
        counts = {tuple(kept["step"].tolist()) for kept in engine.optimizer.state.values()}
        shapes = {tuple(kept["count"].shape) for kept in engine.optimizer.state.values()}
        losses = train(engine, [2, 3])
        engine.save_checkpoint(folder.with_name("again"))
        found.append((counts, shapes, losses))
    return found


def test_counters_load_at_any_number_of_ranks(ranks, tmp_path):
    (expected, _) = ranks(2, save, tmp_path / "at two")
    for num_ranks in (1, 2, 3):
        for found in ranks(num_ranks, load, tmp_path / "at two"):
            for counts, shapes, losses in found:
                assert counts == {(2.0,)}
                assert shapes == {()}
                assert losses == pytest.approx(expected, rel=1e-5)


class Some(Decays):
    def step(self, closure=None):
        super().step(closure)
        for kept in self.state.values():
            kept["some"] = torch.zeros(3)


@on_ranks(2)
def test_some_values_for_a_parameter_are_refused_by_name(tmp_path):
    with pytest.warns(UserWarning, match="is not known to zeroshard"):
        engine = start(3, lambda model: Some(model.parameters(), lr=0.5))
    train(engine, [0])
    expected = r"has shape \(3,\); expected a number, a tensor without dimensions, or one value for each"
    with pytest.raises(ValueError, match=expected):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
