"""States of a few values for a whole parameter, such as a counter of shape [1]."""

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

from tests.checkpoint.runs import start, train


class Decays(SGD):
    """Steps that get shorter: by a counter of its own, and by three numbers that it keeps beside."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                kept = self.state[parameter]
                if not kept:
                    kept["step"], kept["count"] = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
                    kept["three"], kept["average"] = torch.ones(3), torch.zeros_like(parameter)
                kept["step"] += 1
                kept["count"] += 2
                kept["three"] *= 0.5
                kept["average"].lerp_(parameter.grad, 0.5)
                factor = kept["three"][2] / (kept["step"] + kept["count"])
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


def test_counters_of_one_element_load_at_any_number_of_ranks(ranks, tmp_path):
    (expected, _) = ranks(2, save, tmp_path / "at two")
    for num_ranks in (1, 2, 3):
        for found in ranks(num_ranks, load, tmp_path / "at two"):
            for counts, shapes, losses in found:
                assert counts == {(2.0,)}
                assert shapes == {(1,)}
                assert losses == pytest.approx(expected, rel=1e-5)


class Differs(Decays):
    def step(self, closure=None):
        super().step(closure)
        for kept in self.state.values():
            kept["three"] += dist.get_rank()


class Large(Decays):
    def step(self, closure=None):
        super().step(closure)
        for kept in self.state.values():
            kept["rows"] = torch.zeros(65)


def refuse(folder, kind):
    with pytest.warns(UserWarning, match="is not known to zeroshard"):
        engine = start(3, lambda model: kind(model.parameters(), lr=0.5))
    train(engine, [0])
    with pytest.raises(ValueError, match="state") as caught:
        engine.save_checkpoint(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Differs, "states 'count', 'step', 'three' differ between ranks. Expected a state with one value"),
        (Large, "has shape (65,); expected one value, or up to 64, or one for each of the"),
    ],
)
def test_states_that_belong_to_a_rank_are_refused_by_name(ranks, tmp_path, kind, message):
    for text in ranks(2, refuse, tmp_path, kind):
        assert message in text
    assert not list(tmp_path.iterdir())
