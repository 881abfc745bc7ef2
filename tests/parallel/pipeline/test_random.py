"""Random numbers of pipeline ranks: other masks in each part, the same state for the user, the same again."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import sgd
from tests.ranks import on_ranks

WIDTH = 64


class Noted(nn.Dropout):
    def forward(self, value):
        self.mask = super().forward(torch.ones_like(value)).bool()
        return value * self.mask


def noted_engine(schedule):
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), Noted()) for _ in range(4))).double()
    config = {
        "mesh": {"pp": 2},
        "pipeline": {"schedule": schedule, "num_microbatches": 2, "balance": "memory"},
    }
    engine = zeroshard.initialize(model, sgd, config, loss_fn=nn.functional.mse_loss).engine
    torch.manual_seed(7)
    return engine


def losses_of(engine, number):
    found = []
    for _ in range(number):
        x = torch.randn(4, WIDTH, dtype=torch.float64)  # drawn by all pipeline ranks alike
        found.append(engine.train_batch(x, x).item())
    return found


@on_ranks(2)
def test_parts_drop_other_elements_and_leave_the_user_the_same_state():
    """A batch that is refused draws nothing."""
    engine = noted_engine("1f1b")
    state, x = torch.get_rng_state(), torch.ones(3, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match="multiple"):
        engine.train_batch(x, x)
    assert torch.equal(torch.get_rng_state(), state)
    losses_of(engine, 2)
    own = [module.mask for module in engine.modules() if isinstance(module, Noted)], torch.get_rng_state()
    everyone = [None, None]
    dist.all_gather_object(everyone, own)
    (one, state), (other, other_state) = everyone
    assert torch.equal(state, other_state)
    together = [*one, *other]
    assert len(together) == 4
    for number, mask in enumerate(together):
        assert 0.3 < mask.double().mean() < 0.7
        assert all(0.3 < (mask == later).double().mean() < 0.7 for later in together[number + 1 :])


@on_ranks(2)
def test_a_recomputation_drops_the_same_elements_again():
    """Each rank draws for its forwards in the order of micro-batches, with both schedules."""
    assert losses_of(noted_engine("varuna"), 3) == losses_of(noted_engine("gpipe"), 3)


@on_ranks(2)
def test_a_checkpoint_goes_on_with_the_same_numbers(tmp_path):
    engine = noted_engine("1f1b")
    losses_of(engine, 2)
    engine.save_checkpoint(tmp_path)
    want = losses_of(engine, 2)
    torch.manual_seed(99)
    engine.load_checkpoint(tmp_path)
    assert losses_of(engine, 2) == want
