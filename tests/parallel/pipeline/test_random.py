"""Random numbers of pipeline ranks: other masks in each part, the same state for the user, the same again."""

import pytest
import torch
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import sgd

WIDTH = 64


class Noted(nn.Dropout):
    def forward(self, value):
        self.mask = super().forward(torch.ones_like(value)).bool()
        return value * self.mask


def build():
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), Noted()) for _ in range(4))).double()


def start(schedule):
    pipeline = {"schedule": schedule, "num_microbatches": 2, "balance": "memory"}
    config = {"mesh": {"pp": 2}, "pipeline": pipeline}
    return zeroshard.initialize(build(), sgd, config, loss_fn=nn.functional.mse_loss).engine


def losses_of(engine, number):
    found = []
    for _ in range(number):
        x = torch.randn(4, WIDTH, dtype=torch.float64)  # drawn by all pipeline ranks alike
        found.append(engine.train_batch(x, x).item())
    return found


def masks():
    engine = start("1f1b")
    torch.manual_seed(7)
    losses_of(engine, 2)
    return [module.mask for module in engine.modules() if isinstance(module, Noted)], torch.get_rng_state()


def test_parts_drop_other_elements_and_leave_the_user_the_same_state(ranks):
    (one, state), (other, other_state) = ranks(2, masks)
    assert torch.equal(state, other_state)
    together = [*one, *other]
    assert len(together) == 4
    for number, mask in enumerate(together):
        assert 0.3 < mask.double().mean() < 0.7
        assert all(0.3 < (mask == later).double().mean() < 0.7 for later in together[number + 1 :])


def by_schedule(schedule):
    engine = start(schedule)
    torch.manual_seed(7)
    return losses_of(engine, 3)


def test_a_recomputation_drops_the_same_elements_again(ranks):
    """Each rank draws for its forwards in the order of micro-batches, with both schedules."""
    assert ranks(2, by_schedule, "varuna") == ranks(2, by_schedule, "gpipe")


def resumed(folder):
    engine = start("1f1b")
    torch.manual_seed(7)
    losses_of(engine, 2)
    engine.save_checkpoint(folder)
    want = losses_of(engine, 2)
    torch.manual_seed(99)
    engine.load_checkpoint(folder)
    return want, losses_of(engine, 2)


def test_a_checkpoint_goes_on_with_the_same_numbers(ranks, tmp_path):
    for want, found in ranks(2, resumed, tmp_path):
        assert found == want


def raised(folder):
    """The state after a batch whose loss has failed on the last rank."""
    engine = start("gpipe")
    torch.manual_seed(7)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match="multiple"):
        engine.train_batch(x, x)
    return torch.rand(1).item()


def test_a_batch_that_is_refused_draws_nothing(ranks, tmp_path):
    torch.manual_seed(7)
    torch.randn(3, WIDTH, dtype=torch.float64)
    assert ranks(2, raised, tmp_path) == [torch.rand(1).item()] * 2
